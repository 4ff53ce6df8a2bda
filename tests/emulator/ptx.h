// ptx.h: the text of a PTX module as statements, nothing yet of what they mean.
#ifndef EMULATOR_PTX_H
#define EMULATOR_PTX_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum ptx_space { PTX_GENERIC, PTX_PARAM, PTX_CONST, PTX_GLOBAL, PTX_SHARED, PTX_LOCAL };

// A named piece of memory.  Of a kernel's parameters and of shared and local memory `offset` is
// where it lies; a module's own memory is found from `offset` on in an allocation of the module.
struct ptx_variable {
  char *name;
  enum ptx_space space;
  uint64_t bytes, alignment, offset;
  unsigned char *initial;   // NULL: zeros
  bool dynamic;             // .extern .shared x[]: what the launch asks for
};

enum ptx_kind { PTX_REG, PTX_NUMBER, PTX_SYMBOL, PTX_LABEL, PTX_NOTHING, PTX_SPECIAL };

struct ptx_operand {
  enum ptx_kind kind;
  bool negated;             // !p
  bool address;             // [..]
  int group;                // operands of one { } or of d|p share a group
  int index;                // register, variable of kernel or module, label
  bool of_module;           // the variable is the module's
  int64_t offset;           // [base + offset]
  uint64_t value;           // a number's bits: as written, an integer is not narrowed
  char special[24];         // %tid.x without the %
};

struct ptx_instruction {
  uint32_t line, source_line;
  int guard;                // register, or -1
  bool guard_negated;
  char *name;               // with all its dots
  uint32_t first, count;    // operands
};

struct ptx_register { uint8_t bits; };  // 1 (predicate), 8, 16, 32, 64 or 128

// $L: .branchtargets a, b, c;
struct ptx_targets { int label; uint32_t first, count; };

struct ptx_kernel {
  char *name;
  struct ptx_variable *variables;     // parameters first
  int variable_count, param_count;
  uint64_t param_bytes, shared_bytes, local_bytes;  // shared: without the dynamic part
  int max_threads;                    // .maxntid or .reqntid; 0: none given
  struct ptx_register *registers;
  int register_count;
  struct ptx_instruction *instructions;
  int instruction_count;
  struct ptx_operand *operands;
  uint32_t operand_count;
  int *label_positions;               // instruction that each label stands before
  int label_count;
  struct ptx_targets *targets;
  int target_count;
  int *target_labels, target_label_count;
};

struct ptx_module {
  char *text;
  int version, arch;                  // 90 for 9.0; 80 for sm_80
  char target[16];
  struct ptx_variable *variables;     // .global, .const and module-scope .shared
  int variable_count;
  uint64_t global_bytes;
  struct ptx_kernel *kernels;
  int kernel_count;
};

// Reads the text.  NULL and words in `problem` where it cannot.
struct ptx_module *ptx_parse(const char *text, char *problem, size_t problem_bytes);
void ptx_free(struct ptx_module *module);
// The text's line, without its end; for messages.
const char *ptx_line(const struct ptx_module *module, uint32_t line, int *length);

#endif
