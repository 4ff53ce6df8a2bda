// allocate.h: places for a kernel's registers.
#ifndef EMULATOR_ALLOCATE_H
#define EMULATOR_ALLOCATE_H
#include "code.h"

// What an entry of code->operands is before places are given.
enum allocate_role { ALLOCATE_FIXED, ALLOCATE_USE, ALLOCATE_DEFINITION, ALLOCATE_BOTH };

// Registers (of 32 bits and less, or of 64) get places from `first_word` on.  Registers whose
// lifetimes do not meet share one, so that a warp's registers stay in a core's nearest cache.
//   roles        of each operand; those that are not fixed hold a register's number
//   apart        of each register: keeps its place to itself (written while nobody looks)
void allocate_places(struct code *code, const uint8_t *roles, const bool *apart,
                     uint32_t first_word);

#endif
