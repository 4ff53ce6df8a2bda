// db_rows.h: what reading and writing of rows must agree on.
#ifndef SW_DB_ROWS_H
#define SW_DB_ROWS_H

#include "db_sql.h"

// Most bytes of a text, without its final zero.
enum {
  SW_DB_CONFIG_BYTES = 511,
  SW_DB_KERNEL_BYTES = 63,
  SW_DB_ISA_BYTES = 31,
  SW_DB_PROCESSOR_BYTES = 127,
  SW_DB_ENVIRONMENT_BYTES = 255,
  SW_DB_GENERATOR_BYTES = 127,
  SW_DB_WORDS_BYTES = 2000,
};

// An environment as it is stored: no NULLs, its texts in printable ASCII without commas.
struct sw_db_rows_environment {
  char text[SW_DB_ENVIRONMENT_BYTES + 1];
  char isa[SW_DB_ISA_BYTES + 1], processor[SW_DB_PROCESSOR_BYTES + 1];
  char generator[SW_DB_GENERATOR_BYTES + 1];
  int64_t threads;
};
enum swathe_status sw_db_rows_environment(const struct sw_db_environment *environment,
                                          struct sw_db_rows_environment *stored);

// A problem's text, and that of its family: the same at fixed tokens_per_rank, ranks and layout.
struct sw_db_rows_problem {
  char text[SW_PROBLEM_TEXT], family[SW_PROBLEM_TEXT];
};
enum swathe_status sw_db_rows_problem(const struct swathe_problem *problem,
                                      struct sw_db_rows_problem *stored);

#endif
