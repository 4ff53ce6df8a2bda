// jit_cuda.c: CUBIN and PTX of one compilation as one run of bytes, and what a CUBIN says about
// itself: its kernels, the registers and the stack they use, the initial values of its variables.
//
// A CUBIN is an ELF file.  What it says in sections of its own, ".nv.info", is not documented by
// its maker; the numbers below are checked against the compiler's log whenever something is packed.
#include "jit_cuda.h"

#include <assert.h>
#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
  ENTRY = 0x10,                     // st_other of a function that is a kernel
  WORD_VALUE = 4,                   // format of an attribute whose value follows it
  FRAME_SIZE = 0x11, REGISTERS = 0x2f, BARRIERS = 0x4c,  // attributes
  ALIGN = 16,                       // of the CUBIN within the packed bytes
};

// ---- ELF ---------------------------------------------------------------------------------------

struct section {
  const char *name;
  const unsigned char *bytes;       // NULL: the file holds none of its bytes
  size_t size;
  Elf64_Word type, link;
};

struct elf {
  const unsigned char *bytes;
  size_t size;
  Elf64_Ehdr head;
};

static bool within(const struct elf *elf, uint64_t offset, uint64_t size)
{
  return offset <= elf->size && size <= elf->size - offset;
}

static bool open_elf(struct elf *elf, const void *bytes, size_t size)
{
  *elf = (struct elf){ .bytes = bytes, .size = size };
  if (size < sizeof elf->head) return false;
  memcpy(&elf->head, bytes, sizeof elf->head);
  return !memcmp(elf->head.e_ident, ELFMAG, SELFMAG) &&
         elf->head.e_ident[EI_CLASS] == ELFCLASS64 && elf->head.e_shentsize == sizeof(Elf64_Shdr) &&
         within(elf, elf->head.e_shoff, (uint64_t)elf->head.e_shnum * sizeof(Elf64_Shdr));
}

static bool read_head(const struct elf *elf, unsigned index, Elf64_Shdr *head)
{
  if (index >= elf->head.e_shnum) return false;
  memcpy(head, elf->bytes + elf->head.e_shoff + index * sizeof *head, sizeof *head);
  return head->sh_type == SHT_NOBITS || within(elf, head->sh_offset, head->sh_size);
}

// A zero-terminated text of a string section, "" if there is none.
static const char *read_text(const struct elf *elf, unsigned index, uint64_t at)
{
  Elf64_Shdr head;
  if (!read_head(elf, index, &head) || head.sh_type == SHT_NOBITS || at >= head.sh_size) return "";
  const char *text = (const char *)elf->bytes + head.sh_offset + at;
  return memchr(text, 0, head.sh_size - at) ? text : "";
}

static bool read_section(const struct elf *elf, unsigned index, struct section *section)
{
  Elf64_Shdr head;
  if (!read_head(elf, index, &head)) return false;
  *section = (struct section){
    .name = read_text(elf, elf->head.e_shstrndx, head.sh_name),
    .bytes = head.sh_type == SHT_NOBITS ? NULL : elf->bytes + head.sh_offset,
    .size = head.sh_size,
    .type = head.sh_type,
    .link = head.sh_link,
  };
  return true;
}

static bool find_section(const struct elf *elf, const char *prefix, const char *name,
                         struct section *section)
{
  const size_t length = strlen(prefix);
  for (unsigned i = 0; i < elf->head.e_shnum; i++) {
    if (!read_section(elf, i, section) || !section->bytes) continue;
    if (!strncmp(section->name, prefix, length) && !strcmp(section->name + length, name))
      return true;
  }
  return false;
}

static bool read_symbol(const struct section *symbols, size_t index, Elf64_Sym *symbol)
{
  if (index >= symbols->size / sizeof *symbol) return false;
  memcpy(symbol, symbols->bytes + index * sizeof *symbol, sizeof *symbol);
  return true;
}

const void *sw_jit_cuda_variable(const struct sw_jit_cuda_parts *parts, const char *name,
                                 size_t *bytes)
{
  struct elf elf;
  struct section symbols, home;
  Elf64_Sym symbol;
  if (!open_elf(&elf, parts->cubin, parts->cubin_bytes) ||
      !find_section(&elf, ".symtab", "", &symbols))
    return NULL;
  for (size_t i = 0; read_symbol(&symbols, i, &symbol); i++) {
    if (ELF64_ST_TYPE(symbol.st_info) != STT_OBJECT ||
        strcmp(read_text(&elf, symbols.link, symbol.st_name), name) ||
        !read_section(&elf, symbol.st_shndx, &home) || !home.bytes)
      continue;
    // in a CUBIN a symbol's value counts from the start of its section
    if (symbol.st_value > home.size || symbol.st_size > home.size - symbol.st_value) continue;
    *bytes = (size_t)symbol.st_size;
    return home.bytes + symbol.st_value;
  }
  return NULL;
}

// ---- What kernels use --------------------------------------------------------------------------

// The next attribute of an ".nv.info" section: its value, whose words follow it or are part of it.
struct attribute {
  unsigned id;
  uint32_t words[2];
};

static bool read_attribute(const struct section *info, size_t *at, struct attribute *attribute)
{
  if (*at + 4 > info->size) return false;
  const unsigned char *bytes = info->bytes + *at;
  const size_t value = bytes[2] | (size_t)bytes[3] << 8;
  *attribute = (struct attribute){ .id = bytes[1], .words = { (uint32_t)value } };
  *at += 4;
  if (bytes[0] != WORD_VALUE) return true;
  if (value > info->size - *at) return false;
  memcpy(attribute->words, bytes + 4,
         value < sizeof attribute->words ? value : sizeof attribute->words);
  *at += value;
  return true;
}

static void read_use(const struct elf *elf, size_t symbol, struct sw_jit_resources *kernel)
{
  struct section info;
  struct attribute attribute;
  if (find_section(elf, ".nv.info", "", &info))
    for (size_t at = 0; read_attribute(&info, &at, &attribute);) {
      if (attribute.words[0] != symbol) continue;
      if (attribute.id == REGISTERS) kernel->registers = (int32_t)attribute.words[1];
      if (attribute.id == FRAME_SIZE) kernel->stack_bytes = (int32_t)attribute.words[1];
    }
  if (find_section(elf, ".nv.info.", kernel->kernel, &info))
    for (size_t at = 0; read_attribute(&info, &at, &attribute);)
      if (attribute.id == BARRIERS) kernel->barriers = (int32_t)(attribute.words[0] & 0xff);
}

// The kernels of a CUBIN, in the order of its symbols; how many.
static int32_t read_kernels(const struct elf *elf, struct sw_jit_resources *kernels)
{
  struct section symbols;
  Elf64_Sym symbol;
  int32_t count = 0;
  if (!find_section(elf, ".symtab", "", &symbols)) return 0;
  for (size_t i = 0; read_symbol(&symbols, i, &symbol) && count < SW_JIT_KERNELS; i++) {
    if (ELF64_ST_TYPE(symbol.st_info) != STT_FUNC || !(symbol.st_other & ENTRY)) continue;
    struct sw_jit_resources *kernel = &kernels[count++];
    *kernel = (struct sw_jit_resources){ .spill_bytes = -1 };
    snprintf(kernel->kernel, sizeof kernel->kernel, "%s",
             read_text(elf, symbols.link, symbol.st_name));
    read_use(elf, i, kernel);
  }
  return count;
}

// ---- What the log says -------------------------------------------------------------------------

// The number before `words` in [text, end), -1 if those are not there: "656 bytes spill stores".
static int32_t number_before(const char *text, const char *end, const char *words)
{
  const char *at = strstr(text, words);
  if (!at || at >= end) return -1;
  while (at > text && at[-1] >= '0' && at[-1] <= '9') at--;
  return (int32_t)strtol(at, NULL, 10);
}

// The part of the log about one kernel, up to the next.
static const char *find_log(const char *log, const char *kernel, const char **end)
{
  static const char title[] = "Compiling entry function '";
  const size_t length = strlen(kernel);
  for (const char *at = log; (at = strstr(at, title)) != NULL;) {
    at += sizeof title - 1;
    if (strncmp(at, kernel, length) || at[length] != '\'') continue;
    *end = strstr(at, title);
    if (!*end) *end = at + strlen(at);
    return at;
  }
  return NULL;
}

static void read_log(const char *log, struct sw_jit_resources *kernel)
{
  const char *end = NULL, *text = find_log(log, kernel->kernel, &end);
  if (!text) return;
  const int32_t stores = number_before(text, end, " bytes spill stores");
  const int32_t loads = number_before(text, end, " bytes spill loads");
  const int32_t registers = number_before(text, end, " registers");
  const int32_t shared = number_before(text, end, " bytes smem");
  if (stores >= 0 && loads >= 0) kernel->spill_bytes = stores + loads;
  if (shared > 0) kernel->static_shared_bytes = shared;  // the CUBIN's count has a reserve in it
  if (registers >= 0 && registers != kernel->registers)
    sw_warn("%s: the CUDA compiler's log says %d registers, its binary %d; going by the log",
            kernel->kernel, registers, kernel->registers);
  if (registers >= 0) kernel->registers = registers;
}

// ---- Packing -----------------------------------------------------------------------------------

static const char magic[8] = "swcuda1";

// Then the CUBIN, then the PTX with its final zero.
struct head {
  char magic[8];
  uint64_t head_bytes, cubin_bytes, ptx_bytes;
  int32_t kernel_count, unused;
  struct sw_jit_resources kernels[SW_JIT_KERNELS];
};

static size_t align(size_t size) { return (size + ALIGN - 1) / ALIGN * ALIGN; }

enum swathe_status sw_jit_cuda_pack(const void *cubin, size_t cubin_bytes, const char *ptx,
                                    const char *log, unsigned char **bytes, size_t *size)
{
  struct elf elf;
  struct head head;
  memset(&head, 0, sizeof head);
  memcpy(head.magic, magic, sizeof magic);
  head.head_bytes = align(sizeof head);
  head.cubin_bytes = cubin_bytes;
  head.ptx_bytes = strlen(ptx) + 1;
  if (open_elf(&elf, cubin, cubin_bytes)) head.kernel_count = read_kernels(&elf, head.kernels);
  if (head.kernel_count == 0)
    return sw_fail(SWATHE_COMPILE, "the CUDA compiler left no kernel in its %zu bytes",
                   cubin_bytes);
  for (int32_t i = 0; i < head.kernel_count; i++) read_log(log, &head.kernels[i]);

  *size = head.head_bytes + cubin_bytes + head.ptx_bytes;
  *bytes = calloc(1, *size);
  if (!*bytes)
    return sw_fail(SWATHE_NO_MEMORY, "no memory for a compiled kernel of %zu bytes", *size);
  memcpy(*bytes, &head, sizeof head);
  memcpy(*bytes + head.head_bytes, cubin, cubin_bytes);
  memcpy(*bytes + head.head_bytes + cubin_bytes, ptx, head.ptx_bytes);
  return SWATHE_OK;
}

bool sw_jit_cuda_unpack(const unsigned char *bytes, size_t size, struct sw_jit_cuda_parts *parts)
{
  struct head head;
  struct elf elf;
  if (size < align(sizeof head)) return false;
  memcpy(&head, bytes, sizeof head);
  const size_t rest = size - align(sizeof head);
  if (memcmp(head.magic, magic, sizeof magic) || head.head_bytes != align(sizeof head) ||
      head.cubin_bytes > rest || head.ptx_bytes != rest - head.cubin_bytes || !head.ptx_bytes ||
      bytes[size - 1] || head.kernel_count < 1 || head.kernel_count > SW_JIT_KERNELS)
    return false;
  for (int32_t i = 0; i < head.kernel_count; i++)
    if (!memchr(head.kernels[i].kernel, 0, sizeof head.kernels[i].kernel)) return false;
  *parts = (struct sw_jit_cuda_parts){
    .cubin = bytes + head.head_bytes,
    .cubin_bytes = head.cubin_bytes,
    .ptx = (const char *)bytes + head.head_bytes + head.cubin_bytes,
    .kernel_count = head.kernel_count,
  };
  memcpy(parts->kernels, head.kernels, sizeof head.kernels);
  return open_elf(&elf, parts->cubin, parts->cubin_bytes);
}
