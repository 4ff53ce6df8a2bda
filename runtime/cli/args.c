// args.c: reads a command line by the table in args.h and prints that table as help.
#include "args.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum section { PROBLEM, SEQUENCE, CONTEXT, VERB, COMMON, SECTION_COUNT };

static const char *const section_titles[] = {
  [PROBLEM] = "The problem",   [SEQUENCE] = "The sequence and who holds it",
  [CONTEXT] = "Where and how", [VERB] = "This verb",
  [COMMON] = "Every verb",
};
// In the order of the help: what is particular to the verb first.
static const enum section section_order[] = { VERB, PROBLEM, SEQUENCE, CONTEXT, COMMON };

static const struct option {
  const char *name, *dashed, *argument, *help;
  enum section section;
} options[] = {
#define OPTION(option, name, argument, section, help) { name, "--" name, argument, help, section },
  CLI_OPTION_MAP(OPTION)
#undef OPTION
};

_Static_assert((int)CLI_OPTION_COUNT <= 64, "a set of options is 64 bits");

// Largest argument of the options is shown beside its name; help texts begin at this column.
enum { HELP_COLUMN = 26, HELP_WIDTH = 80 };

const char *cli_args_name(enum cli_option option)
{
  return options[option].dashed;
}

static bool takes(const struct cli_verb *verb, int option)
{
  return verb->options >> option & 1;
}

// Index of the option called by the first `length` bytes of `name`; -1 if there is none.
static int find_option(const char *name, size_t length)
{
  for (int i = 0; i < CLI_OPTION_COUNT; i++)
    if (strlen(options[i].name) == length && !memcmp(options[i].name, name, length)) return i;
  return -1;
}

// Reads the option at words[*at] and its argument, and moves *at behind them.
static enum cli_exit parse_option(struct cli_args *args, int count, char *const *words, int *at)
{
  const struct cli_verb *verb = args->verb;
  const char *word = words[(*at)++];
  const char *name = word + 2, *equals = strchr(name, '=');
  const size_t length = equals ? (size_t)(equals - name) : strlen(name);
  const int option = find_option(name, length);

  if (option < 0)
    return cli_fail(CLI_BAD_USE, "there is no option --%.*s", (int)length, name);
  if (!takes(verb, option))
    return cli_fail(CLI_BAD_USE, "--%.*s is an option of other verbs, not of %s", (int)length, name,
                    verb->name);
  if (args->value[option])
    return cli_fail(CLI_BAD_USE, "%s is given twice", options[option].dashed);
  if (!options[option].argument) {
    if (equals) return cli_fail(CLI_BAD_USE, "%s takes no value", options[option].dashed);
    args->value[option] = "";
    return CLI_OK;
  }
  if (equals) {
    args->value[option] = equals + 1;
  } else if (*at < count && strncmp(words[*at], "--", 2)) {
    args->value[option] = words[(*at)++];
  } else {
    return cli_fail(CLI_BAD_USE, "%s needs a value: %s %s", options[option].dashed,
                    options[option].dashed, options[option].argument);
  }
  if (!*args->value[option])
    return cli_fail(CLI_BAD_USE, "%s is given an empty value", options[option].dashed);
  return CLI_OK;
}

static enum cli_exit take_operand(struct cli_args *args, const char *word)
{
  if (args->operands == args->verb->most_operands)
    return cli_fail(CLI_BAD_USE, "'%s' is one word too many", word);
  args->operand[args->operands++] = word;
  return CLI_OK;
}

enum cli_exit cli_args_parse(const struct cli_verb *verb, int count, char *const *words,
                             struct cli_args *args)
{
  enum cli_exit code = CLI_OK;
  bool options_ended = false;

  *args = (struct cli_args){ .verb = verb };
  for (int at = 0; at < count && !code;) {
    const char *word = words[at];
    if (!options_ended && !strcmp(word, "--")) {
      options_ended = true;
      at++;
    } else if (!options_ended && !strcmp(word, "-h")) {
      args->value[CLI_HELP] = "";
      at++;
    } else if (!options_ended && word[0] == '-' && word[1] && word[1] != '-') {
      code = cli_fail(CLI_BAD_USE, "there is no option %s", word);
    } else if (!options_ended && !strncmp(word, "--", 2)) {
      code = parse_option(args, count, words, &at);
    } else {
      code = take_operand(args, word);
      at++;
    }
  }
  if (!code && !args->value[CLI_HELP] && args->operands < verb->least_operands)
    return cli_fail(CLI_BAD_USE, "%s is missing", verb->operands);
  return code;
}

// ---- Typed values -------------------------------------------------------------------------------

bool cli_args_number(const char *text, int64_t *value, const char **end)
{
  const char *digits = text + (*text == '-');
  char *after;

  if (*digits < '0' || *digits > '9') return false;
  errno = 0;
  const long long parsed = strtoll(text, &after, 10);
  if (errno) return false;
  *value = parsed;
  *end = after;
  return true;
}

enum cli_exit cli_args_integer(const struct cli_args *args, enum cli_option option, int64_t least,
                               int64_t most, int64_t *value)
{
  const char *text = args->value[option], *end = "";
  int64_t parsed = 0;

  if (!text) return CLI_OK;
  if (!cli_args_number(text, &parsed, &end) || *end)
    return cli_fail(CLI_BAD_USE, "%s %s: not a whole number", cli_args_name(option), text);
  if (parsed < least)
    return cli_fail(CLI_BAD_USE, "%s %s: at least %" PRId64, cli_args_name(option), text, least);
  if (parsed > most)
    return cli_fail(CLI_BAD_USE, "%s %s: at most %" PRId64, cli_args_name(option), text, most);
  *value = parsed;
  return CLI_OK;
}

enum cli_exit cli_args_real(const struct cli_args *args, enum cli_option option, double *value)
{
  const char *text = args->value[option];
  char *end;

  if (!text) return CLI_OK;
  const double parsed = strtod(text, &end);
  if (end == text || *end || !isfinite(parsed))
    return cli_fail(CLI_BAD_USE, "%s %s: not a finite number", cli_args_name(option), text);
  *value = parsed;
  return CLI_OK;
}

enum cli_exit cli_args_exclude(const struct cli_args *args, enum cli_option one,
                               enum cli_option other, const char *why)
{
  if (!args->value[one] || !args->value[other]) return CLI_OK;
  return cli_fail(CLI_BAD_USE, "%s and %s do not go together: %s", cli_args_name(one),
                  cli_args_name(other), why);
}

enum cli_exit cli_args_direction(const char *word, enum swathe_direction *direction)
{
  if (!strcmp(word, "forward")) *direction = SWATHE_FORWARD;
  else if (!strcmp(word, "backward")) *direction = SWATHE_BACKWARD;
  else return cli_fail(CLI_BAD_USE, "'%s' is neither forward nor backward", word);
  return CLI_OK;
}

// ---- Help ---------------------------------------------------------------------------------------

// Prints words from column `column` on, broken before HELP_WIDTH; the cursor stands at `at`.
static void print_wrapped(FILE *file, const char *text, int at, int column)
{
  if (at > 0 && at >= column) {
    fputc('\n', file);
    at = 0;
  }
  fprintf(file, "%*s", column - at, "");
  at = column;
  while (*text) {
    const int length = (int)strcspn(text, " ");
    if (at > column && at + 1 + length > HELP_WIDTH) {
      fprintf(file, "\n%*s", column, "");
      at = column;
    } else if (at > column) {
      fputc(' ', file);
      at++;
    }
    fprintf(file, "%.*s", length, text);
    at += length;
    text += length;
    text += strspn(text, " ");
  }
  fputc('\n', file);
}

static void print_section(const struct cli_verb *verb, enum section section, FILE *file)
{
  bool titled = false;

  for (int i = 0; i < CLI_OPTION_COUNT; i++) {
    if (!takes(verb, i) || options[i].section != section) continue;
    if (!titled) fprintf(file, "\n%s:\n", section_titles[section]);
    titled = true;
    const int at = fprintf(file, "  %s%s%s", options[i].dashed, options[i].argument ? " " : "",
                           options[i].argument ? options[i].argument : "");
    print_wrapped(file, options[i].help, at, HELP_COLUMN);
  }
}

void cli_args_help(const struct cli_verb *verb, FILE *file)
{
  fprintf(file, "usage: swathe %s%s%s [options]\n\n", verb->name, *verb->operands ? " " : "",
          verb->operands);
  print_wrapped(file, verb->summary, 0, 0);
  if (verb->details) {
    fputc('\n', file);
    print_wrapped(file, verb->details, 0, 0);
  }
  for (size_t i = 0; i < sizeof section_order / sizeof section_order[0]; i++)
    print_section(verb, section_order[i], file);
  fprintf(file, "\nExamples:\n");
  for (int i = 0; verb->examples[i]; i += 2)
    fprintf(file, "  # %s\n  %s\n", verb->examples[i], verb->examples[i + 1]);
  fprintf(file, "\nExit status: 0 done, 1 failed, 2 the command line makes no sense.\n");
}
