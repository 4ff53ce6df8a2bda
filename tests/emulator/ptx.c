// ptx.c: reads a PTX module.
//
// Registers are found by the ranges they were declared in (`.reg .b32 %r<90>`), innermost scope
// first, so tables are as large as the text says.  Labels are resolved when a kernel ends, along
// the scopes they stand in.
#include "ptx.h"
#include <ctype.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct range { char name[64]; int count, first, scope; };   // count 0: a single register
struct label { char name[96]; int scope, position; };
struct reference { char name[96]; int scope; uint32_t line; };

struct reader {
  const char *at;
  uint32_t line, source_line;
  struct ptx_module *module;
  struct ptx_kernel *kernel;
  struct range *ranges;
  int range_count;
  struct label *labels;
  int label_count;
  struct reference *references;
  int reference_count;
  int *parents;                        // of each scope
  int scope_count, scope;
  char *problem;
  size_t problem_bytes;
  jmp_buf give_up;
};

static _Noreturn void refuse(struct reader *reader, const char *format, ...)
{
  int length = snprintf(reader->problem, reader->problem_bytes, "PTX line %u: ", reader->line);
  va_list values;
  va_start(values, format);
  vsnprintf(reader->problem + length, reader->problem_bytes - (size_t)length, format, values);
  va_end(values);
  longjmp(reader->give_up, 1);
}

static void *grow(void *array, int count, size_t bytes)
{
  if (count & (count - 1)) return array;  // room doubles at each power of two
  void *more = realloc(array, (count ? 2 * (size_t)count : 1) * bytes);
  if (!more) abort();
  return more;
}

// The next free element of an array that grows.
#define APPEND(array, count) \
  ((array) = grow((array), (int)(count), sizeof *(array)), \
   memset(&(array)[count], 0, sizeof *(array)), &(array)[(count)++])

static void skip_space(struct reader *reader)
{
  for (;;) {
    while (isspace((unsigned char)*reader->at)) reader->line += *reader->at++ == '\n';
    if (reader->at[0] == '/' && reader->at[1] == '/') {
      while (*reader->at && *reader->at != '\n') reader->at++;
    } else if (reader->at[0] == '/' && reader->at[1] == '*') {
      while (*reader->at && !(reader->at[0] == '*' && reader->at[1] == '/'))
        reader->line += *reader->at++ == '\n';
      if (*reader->at) reader->at += 2;
    } else {
      return;
    }
  }
}

static bool accept(struct reader *reader, char mark)
{
  skip_space(reader);
  if (*reader->at != mark) return false;
  reader->at++;
  return true;
}

static void expect(struct reader *reader, char mark)
{
  if (!accept(reader, mark)) refuse(reader, "'%c' expected at '%.20s'", mark, reader->at);
}

static bool wordy(char c) { return isalnum((unsigned char)c) || c == '_' || c == '$' || c == '%'; }

// A name, dots and colons included where asked.
static void read_word(struct reader *reader, char *word, size_t bytes, bool dots)
{
  skip_space(reader);
  size_t length = 0;
  while (wordy(*reader->at) || (dots && (*reader->at == '.' || (*reader->at == ':' &&
         reader->at[1] == ':') || (*reader->at == ':' && reader->at[-1] == ':')))) {
    if (length + 1 == bytes) refuse(reader, "name too long");
    word[length++] = *reader->at++;
  }
  word[length] = 0;
  if (!length) refuse(reader, "name expected at '%.20s'", reader->at);
}

static void skip_line(struct reader *reader)
{
  while (*reader->at && *reader->at != '\n') reader->at++;
}

static void skip_braces(struct reader *reader)
{
  int depth = 0;
  do {
    if (!*reader->at) refuse(reader, "the text ends inside braces");
    depth += (*reader->at == '{') - (*reader->at == '}');
    reader->line += *reader->at++ == '\n';
  } while (depth);
}

static uint64_t read_number(struct reader *reader)
{
  skip_space(reader);
  const char *at = reader->at;
  char *end;
  uint64_t value;
  bool minus = *at == '-';
  if (minus) at++;
  if (at[0] == '0' && (at[1] == 'f' || at[1] == 'F' || at[1] == 'd' || at[1] == 'D')) {
    value = strtoull(at + 2, &end, 16);
  } else {
    value = strtoull(at, &end, 0);
    if (*end == '.' || *end == 'e') {
      float real = strtof(at, &end);
      uint32_t bits;
      memcpy(&bits, &real, 4);
      value = bits ^ (minus ? UINT32_C(1) << 31 : 0);
      minus = false;
    }
  }
  if (end == at) refuse(reader, "number expected at '%.20s'", reader->at);
  while (*end == 'U' || *end == 'u') end++;
  reader->at = end;
  return minus ? 0 - value : value;
}

static int bits_of_type(struct reader *reader, const char *type)
{
  if (!strcmp(type, "pred")) return 1;
  if (strchr("busf", type[0])) {
    int bits = atoi(type + 1);
    if (bits == 8 || bits == 16 || bits == 32 || bits == 64 || bits == 128) return bits;
  }
  refuse(reader, "type .%s is not known", type);
}

// .reg .b32 %r<90>;  .reg .pred p, q;
static void read_registers(struct reader *reader)
{
  char type[32];
  skip_space(reader);
  expect(reader, '.');
  read_word(reader, type, sizeof type, false);
  int bits = bits_of_type(reader, type);
  do {
    struct range *range = APPEND(reader->ranges, reader->range_count);
    read_word(reader, range->name, sizeof range->name, false);
    range->scope = reader->scope;
    range->first = reader->kernel->register_count;
    if (accept(reader, '<')) {
      range->count = (int)read_number(reader);
      expect(reader, '>');
    }
    for (int i = 0; i < (range->count ? range->count : 1); i++)
      APPEND(reader->kernel->registers, reader->kernel->register_count)->bits = (uint8_t)bits;
  } while (accept(reader, ','));
  expect(reader, ';');
}

static int find_register(const struct reader *reader, const char *name)
{
  for (int i = reader->range_count; i-- > 0;) {
    const struct range *range = &reader->ranges[i];
    if (!range->count) {
      if (!strcmp(range->name, name)) return range->first;
      continue;
    }
    size_t length = strlen(range->name);
    if (strncmp(range->name, name, length) || !isdigit((unsigned char)name[length])) continue;
    char *end;
    long number = strtol(name + length, &end, 10);
    if (!*end && number < range->count) return range->first + (int)number;
  }
  return -1;
}

static const struct ptx_variable *find_variable(const struct reader *reader, const char *name,
                                                int *index, bool *of_module)
{
  *of_module = false;
  if (reader->kernel)
    for (int i = 0; i < reader->kernel->variable_count; i++)
      if (!strcmp(reader->kernel->variables[i].name, name)) {
        *index = i;
        return &reader->kernel->variables[i];
      }
  *of_module = true;
  for (int i = 0; i < reader->module->variable_count; i++)
    if (!strcmp(reader->module->variables[i].name, name)) {
      *index = i;
      return &reader->module->variables[i];
    }
  return NULL;
}

static uint64_t round_up(uint64_t value, uint64_t multiple)
{
  return (value + multiple - 1) / multiple * multiple;
}

static void read_initial(struct reader *reader, struct ptx_variable *variable, int element_bytes)
{
  variable->initial = calloc(1, variable->bytes ? variable->bytes : 1);
  bool list = accept(reader, '{');
  uint64_t at = 0;
  do {
    skip_space(reader);
    if (isalpha((unsigned char)*reader->at) || *reader->at == '_' || *reader->at == '$')
      refuse(reader, "an initial value that is an address is not known");
    uint64_t value = read_number(reader);
    if (at + (uint64_t)element_bytes > variable->bytes) refuse(reader, "too many initial values");
    memcpy(variable->initial + at, &value, (size_t)element_bytes);
    at += (uint64_t)element_bytes;
  } while (list && accept(reader, ','));
  if (list) expect(reader, '}');
}

// [.align 8] [.ptr ...] .b8 name[64] [= {...}], the space already read.
static struct ptx_variable read_variable(struct reader *reader, enum ptx_space space, bool extern_)
{
  struct ptx_variable variable = { .space = space, .alignment = 1 };
  char word[128];
  int bits = 0, vector = 1;
  while (accept(reader, '.')) {
    read_word(reader, word, sizeof word, false);
    if (!strcmp(word, "align")) variable.alignment = read_number(reader);
    else if (!strcmp(word, "ptr") || !strcmp(word, "global") || !strcmp(word, "const") ||
             !strcmp(word, "shared") || !strcmp(word, "attribute")) continue;
    else if (!strcmp(word, "v2") || !strcmp(word, "v4")) vector = word[1] - '0';
    else bits = bits_of_type(reader, word);
  }
  read_word(reader, word, sizeof word, false);
  variable.name = strdup(word);
  int element_bytes = bits / 8;
  variable.bytes = (uint64_t)(element_bytes * vector);
  if (variable.alignment < variable.bytes && variable.alignment == 1)
    variable.alignment = variable.bytes;
  while (accept(reader, '[')) {
    if (accept(reader, ']')) {
      variable.dynamic = extern_;
      variable.bytes = 0;
    } else {
      variable.bytes *= read_number(reader);
      expect(reader, ']');
    }
  }
  if (accept(reader, '=')) read_initial(reader, &variable, element_bytes);
  return variable;
}

static void add_module_variable(struct reader *reader, enum ptx_space space, bool extern_)
{
  struct ptx_variable variable = read_variable(reader, space, extern_);
  expect(reader, ';');
  if (space != PTX_SHARED) {
    variable.offset = round_up(reader->module->global_bytes, variable.alignment);
    reader->module->global_bytes = variable.offset + variable.bytes;
  }
  *APPEND(reader->module->variables, reader->module->variable_count) = variable;
}

static void add_kernel_variable(struct reader *reader, enum ptx_space space)
{
  struct ptx_variable variable = read_variable(reader, space, false);
  uint64_t *bytes = space == PTX_PARAM ? &reader->kernel->param_bytes
                  : space == PTX_SHARED ? &reader->kernel->shared_bytes
                                        : &reader->kernel->local_bytes;
  variable.offset = round_up(*bytes, variable.alignment);
  *bytes = variable.offset + variable.bytes;
  *APPEND(reader->kernel->variables, reader->kernel->variable_count) = variable;
}

static int refer(struct reader *reader, const char *name)
{
  for (int i = reader->reference_count; i-- > 0;)
    if (reader->references[i].scope == reader->scope && !strcmp(reader->references[i].name, name))
      return i;
  struct reference *reference = APPEND(reader->references, reader->reference_count);
  snprintf(reference->name, sizeof reference->name, "%s", name);
  reference->scope = reader->scope;
  reference->line = reader->line;
  return reader->reference_count - 1;
}

static void read_operand(struct reader *reader, int group, bool address)
{
  struct ptx_operand operand = { .group = group, .address = address };
  skip_space(reader);
  operand.negated = accept(reader, '!');
  skip_space(reader);
  char c = *reader->at;
  if (isdigit((unsigned char)c) || c == '-') {
    operand.kind = PTX_NUMBER;
    operand.value = read_number(reader);
  } else {
    char word[128];
    bool of_module;
    read_word(reader, word, sizeof word, false);
    if ((operand.index = find_register(reader, word)) >= 0) {
      operand.kind = PTX_REG;
    } else if (!strcmp(word, "_")) {
      operand.kind = PTX_NOTHING;
    } else if (word[0] == '%') {
      operand.kind = PTX_SPECIAL;
      int length = snprintf(operand.special, sizeof operand.special, "%.20s", word + 1);
      if (*reader->at == '.' && strchr("xyz", reader->at[1])) {
        operand.special[length] = '.';
        operand.special[length + 1] = reader->at[1];
        operand.special[length + 2] = 0;
        reader->at += 2;
      }
    } else if (find_variable(reader, word, &operand.index, &of_module)) {
      operand.kind = PTX_SYMBOL;
      operand.of_module = of_module;
    } else {
      operand.kind = PTX_LABEL;
      operand.index = refer(reader, word);
    }
  }
  while (accept(reader, '+')) operand.offset += (int64_t)read_number(reader);
  skip_space(reader);
  if (address && *reader->at == '-') operand.offset += (int64_t)read_number(reader);
  *APPEND(reader->kernel->operands, reader->kernel->operand_count) = operand;
}

// One operand group: r, {r, r}, p|q, [r+8], [r, {r, r}].
static void read_group(struct reader *reader, int group)
{
  if (accept(reader, '{')) {
    do read_operand(reader, group, false); while (accept(reader, ','));
    expect(reader, '}');
  } else if (accept(reader, '[')) {
    do {
      if (accept(reader, '{')) {
        do read_operand(reader, group, true); while (accept(reader, ','));
        expect(reader, '}');
      } else {
        read_operand(reader, group, true);
      }
    } while (accept(reader, ','));
    expect(reader, ']');
  } else {
    read_operand(reader, group, false);
    if (accept(reader, '|')) read_operand(reader, group, false);
  }
}

static void read_instruction(struct reader *reader)
{
  struct ptx_instruction instruction = { .guard = -1, .line = reader->line,
                                         .source_line = reader->source_line };
  char word[192];
  if (accept(reader, '@')) {
    instruction.guard_negated = accept(reader, '!');
    read_word(reader, word, sizeof word, false);
    instruction.guard = find_register(reader, word);
    if (instruction.guard < 0) refuse(reader, "register %s was not declared", word);
  }
  read_word(reader, word, sizeof word, true);
  instruction.name = strdup(word);
  instruction.first = reader->kernel->operand_count;
  for (int group = 0; !accept(reader, ';'); group++) {
    if (group && !accept(reader, ',')) refuse(reader, "',' expected at '%.20s'", reader->at);
    read_group(reader, group);
  }
  instruction.count = reader->kernel->operand_count - instruction.first;
  *APPEND(reader->kernel->instructions, reader->kernel->instruction_count) = instruction;
}

// Directives inside a body, the dot already read.
static void read_body_directive(struct reader *reader)
{
  char word[64];
  read_word(reader, word, sizeof word, false);
  if (!strcmp(word, "reg")) {
    read_registers(reader);
  } else if (!strcmp(word, "loc")) {
    read_number(reader);
    reader->source_line = (uint32_t)read_number(reader);
    skip_line(reader);
  } else if (!strcmp(word, "shared") || !strcmp(word, "local")) {
    add_kernel_variable(reader, word[0] == 's' ? PTX_SHARED : PTX_LOCAL);
    expect(reader, ';');
  } else if (!strcmp(word, "pragma")) {
    while (*reader->at && *reader->at != ';') reader->at++;
    expect(reader, ';');
  } else if (!strcmp(word, "branchtargets")) {
    struct ptx_targets *targets = APPEND(reader->kernel->targets, reader->kernel->target_count);
    const struct label *label = &reader->labels[reader->label_count - 1];
    targets->label = refer(reader, label->name);
    targets->first = (uint32_t)reader->kernel->target_label_count;
    do {
      read_word(reader, word, sizeof word, false);
      int index = refer(reader, word);
      *APPEND(reader->kernel->target_labels, reader->kernel->target_label_count) = index;
      targets->count++;
    } while (accept(reader, ','));
    expect(reader, ';');
  } else {
    refuse(reader, "directive .%s is not known here", word);
  }
}

static bool at_label(const struct reader *reader)
{
  const char *at = reader->at;
  while (wordy(*at)) at++;
  return at > reader->at && *at == ':' && at[1] != ':';
}

static void open_scope(struct reader *reader)
{
  *APPEND(reader->parents, reader->scope_count) = reader->scope;
  reader->scope = reader->scope_count - 1;
}

static void close_scope(struct reader *reader)
{
  while (reader->range_count && reader->ranges[reader->range_count - 1].scope == reader->scope)
    reader->range_count--;
  reader->scope = reader->parents[reader->scope];
}

static void resolve_labels(struct reader *reader)
{
  struct ptx_kernel *kernel = reader->kernel;
  kernel->label_count = reader->reference_count;
  kernel->label_positions = calloc((size_t)reader->reference_count + 1, sizeof(int));
  for (int i = 0; i < reader->reference_count; i++) {
    int found = -1;
    for (int scope = reader->references[i].scope; found < 0; scope = reader->parents[scope]) {
      for (int k = 0; k < reader->label_count && found < 0; k++)
        if (reader->labels[k].scope == scope &&
            !strcmp(reader->labels[k].name, reader->references[i].name))
          found = reader->labels[k].position;
      if (reader->parents[scope] == scope) break;
    }
    reader->line = reader->references[i].line;
    if (found < 0) refuse(reader, "%s was not declared", reader->references[i].name);
    kernel->label_positions[i] = found;
  }
}

static void read_body(struct reader *reader)
{
  reader->range_count = reader->label_count = reader->reference_count = reader->scope_count = 0;
  reader->scope = 0;
  open_scope(reader);
  int depth = 1;
  while (depth) {
    skip_space(reader);
    if (accept(reader, '{')) {
      open_scope(reader);
      depth++;
    } else if (accept(reader, '}')) {
      depth--;
      if (depth) close_scope(reader);
    } else if (accept(reader, ';')) {
      continue;
    } else if (accept(reader, '.')) {
      read_body_directive(reader);
    } else if (at_label(reader)) {
      struct label *label = APPEND(reader->labels, reader->label_count);
      read_word(reader, label->name, sizeof label->name, false);
      label->scope = reader->scope;
      label->position = reader->kernel->instruction_count;
      reader->at++;
    } else if (!*reader->at) {
      refuse(reader, "the text ends inside %s", reader->kernel->name);
    } else {
      read_instruction(reader);
    }
  }
  resolve_labels(reader);
}

static void read_kernel(struct reader *reader)
{
  char word[256];
  reader->kernel = APPEND(reader->module->kernels, reader->module->kernel_count);
  read_word(reader, word, sizeof word, false);
  reader->kernel->name = strdup(word);
  if (accept(reader, '(')) {
    while (!accept(reader, ')')) {
      expect(reader, '.');
      read_word(reader, word, sizeof word, false);
      add_kernel_variable(reader, PTX_PARAM);
      accept(reader, ',');
    }
  }
  reader->kernel->param_count = reader->kernel->variable_count;
  while (!accept(reader, '{')) {
    expect(reader, '.');
    read_word(reader, word, sizeof word, false);
    if (!strcmp(word, "maxntid") || !strcmp(word, "reqntid")) {
      reader->kernel->max_threads = 1;
      do reader->kernel->max_threads *= (int)read_number(reader); while (accept(reader, ','));
    } else {
      skip_line(reader);
    }
  }
  read_body(reader);
  reader->kernel = NULL;
}

static void read_module_directive(struct reader *reader, bool *extern_)
{
  struct ptx_module *module = reader->module;
  char word[64];
  read_word(reader, word, sizeof word, false);
  if (!strcmp(word, "version")) {
    char *end;
    module->version = 10 * (int)strtol(reader->at, &end, 10);
    if (*end == '.') module->version += (int)strtol(end + 1, NULL, 10);
    skip_line(reader);
  } else if (!strcmp(word, "target")) {
    read_word(reader, module->target, sizeof module->target, false);
    module->arch = atoi(module->target + 3);
    skip_line(reader);
  } else if (!strcmp(word, "address_size") || !strcmp(word, "file")) {
    skip_line(reader);
  } else if (!strcmp(word, "visible") || !strcmp(word, "weak") || !strcmp(word, "common")) {
  } else if (!strcmp(word, "extern")) {
    *extern_ = true;
    return;
  } else if (!strcmp(word, "entry")) {
    read_kernel(reader);
  } else if (!strcmp(word, "global") || !strcmp(word, "const") || !strcmp(word, "shared")) {
    enum ptx_space space = word[0] == 'g' ? PTX_GLOBAL : word[0] == 'c' ? PTX_CONST : PTX_SHARED;
    add_module_variable(reader, space, *extern_);
  } else if (!strcmp(word, "section")) {
    while (*reader->at && *reader->at != '{') reader->line += *reader->at++ == '\n';
    skip_braces(reader);
  } else {
    refuse(reader, "directive .%s is not known", word);
  }
  *extern_ = false;
}

static void read_module(struct reader *reader)
{
  bool extern_ = false;
  for (skip_space(reader); *reader->at; skip_space(reader)) {
    expect(reader, '.');
    read_module_directive(reader, &extern_);
  }
}

struct ptx_module *ptx_parse(const char *text, char *problem, size_t problem_bytes)
{
  struct reader *reader = calloc(1, sizeof *reader);
  reader->module = calloc(1, sizeof *reader->module);
  reader->module->text = strdup(text);
  reader->at = reader->module->text;
  reader->line = 1;
  reader->problem = problem;
  reader->problem_bytes = problem_bytes;
  if (setjmp(reader->give_up)) {
    ptx_free(reader->module);
    reader->module = NULL;
  } else {
    read_module(reader);
  }
  struct ptx_module *module = reader->module;
  free(reader->ranges);
  free(reader->labels);
  free(reader->references);
  free(reader->parents);
  free(reader);
  return module;
}

static void free_variables(struct ptx_variable *variables, int count)
{
  for (int i = 0; i < count; i++) {
    free(variables[i].name);
    free(variables[i].initial);
  }
  free(variables);
}

void ptx_free(struct ptx_module *module)
{
  for (int i = 0; i < module->kernel_count; i++) {
    struct ptx_kernel *kernel = &module->kernels[i];
    for (int k = 0; k < kernel->instruction_count; k++) free(kernel->instructions[k].name);
    free_variables(kernel->variables, kernel->variable_count);
    free(kernel->name);
    free(kernel->registers);
    free(kernel->instructions);
    free(kernel->operands);
    free(kernel->label_positions);
    free(kernel->targets);
    free(kernel->target_labels);
  }
  free(module->kernels);
  free_variables(module->variables, module->variable_count);
  free(module->text);
  free(module);
}

const char *ptx_line(const struct ptx_module *module, uint32_t line, int *length)
{
  const char *at = module->text;
  for (uint32_t i = 1; i < line && at; i++) {
    at = strchr(at, '\n');
    if (at) at++;
  }
  if (!at) at = "";
  while (isspace((unsigned char)*at) && *at != '\n') at++;
  *length = (int)strcspn(at, "\n");
  return at;
}
