// args.h: the command line as one table.  Parsing, --help and the words of refusals all read it, so
// they cannot disagree.  A verb names the options it takes by a set of bits.
#ifndef CLI_ARGS_H
#define CLI_ARGS_H

#include "fail.h"

#include <stdint.h>
#include <stdio.h>

// clang-format off: a table
// X(option, name, argument or NULL for a flag, section of the help, help)
#define CLI_OPTION_MAP(X)                                                                          \
  X(MODEL, "model", "NAME", PROBLEM, "a preset; 'swathe models' lists them")                       \
  X(PROBLEM, "problem", "NAME=VALUE,...", PROBLEM,                                                 \
    "fields of the problem, over the preset's if both are given; 'swathe models NAME' "            \
    "shows all fields")                                                                            \
  X(WINDOW, "window", "N", PROBLEM,                                                                \
    "keys a query sees, its own included, causal, as model cards print it: the same as "           \
    "--window-left N-1 --window-right 0")                                                          \
  X(WINDOW_LEFT, "window-left", "N|unlimited", PROBLEM, "keys seen before the query's own")        \
  X(WINDOW_RIGHT, "window-right", "N|unlimited", PROBLEM, "keys seen after the query's own")       \
  X(DTYPE, "dtype", "f32|bf16|f16", PROBLEM,                                                       \
    "of q, k, v, out and their gradients; sums are f32. cpu takes f32, bf16; cuda bf16, f16")      \
  X(SOFTCAP, "softcap", "X", PROBLEM, "scores become X * tanh(score / X); 0: off")                 \
  X(SCALE, "scale", "X", PROBLEM, "multiplies q.k; 0: 1/sqrt(head_dim_qk)")                        \
  X(HALO_GRADIENT, "halo-gradient", "f32|bf16",                                                    \
    PROBLEM, "in which the sums of the halo's dk and dv travel home; default f32")                 \
  X(TARGET, "target", "cpu|cuda", PROBLEM, "what kernels are made for; default cpu")               \
  X(RANKS, "ranks", "P", SEQUENCE, "context-parallel group size")                                  \
  X(TOKENS, "tokens", "N", SEQUENCE,                                                               \
    "tokens of the whole sequence; default the documents' sum, else ranks times the "              \
    "problem's tokens_per_rank")                                                                   \
  X(LAYOUT, "layout", "contiguous|zigzag|zigzag-doc", SEQUENCE,                                    \
    "which tokens a rank holds; zigzag cuts the whole row, zigzag-doc each document")              \
  X(DOCUMENTS, "documents", "N,N,...", SEQUENCE,                                                   \
    "lengths of the packed documents in tokens; what --tokens leaves over is padding")             \
  X(BATCH, "batch", "B", SEQUENCE, "rows of the batch; default 1")                                 \
  X(ISA, "isa", "NAME", CONTEXT,                                                                   \
    "instruction set of CPU kernels: avx512bf16, avx512, avx2, neon, generic; default the best "   \
    "here")                                                                                        \
  X(ARCH, "arch", "sm_NN", CONTEXT,                                                                \
    "architecture of CUDA kernels: sm_80, sm_90a, ...; default $SWATHE_ARCH, else the device's")   \
  X(DATABASE, "database", "FILE", CONTEXT,                                                         \
    "tuning database; default $SWATHE_DB, else tuning.db in the cache directory")                  \
  X(CACHE, "cache", "DIR", CONTEXT,                                                                \
    "directory of compiled kernels; default $SWATHE_CACHE_DIR, else the user's cache "             \
    "directory")                                                                                   \
  X(THREADS, "threads", "N", CONTEXT,                                                              \
    "compute threads of each rank; default all processors, shared by the ranks of a run")          \
  X(CONFIG, "config", "TEXT", VERB,                                                                \
    "a point of the kernel's space, NAME=VALUE,...; default what a layer would use")               \
  X(SPACE, "space", NULL, VERB, "every config of the kernel's space")                              \
  X(MOST, "most", "N", VERB, "at most N configs of each space, the first ones")                    \
  X(OUTPUT, "output", "FILE", VERB, "write to FILE instead of stdout")                             \
  X(MESSAGES, "messages", NULL, VERB, "also list every message of the exchange")                   \
  X(Q, "q", "FILE", VERB,                                                                          \
    "queries: float32 .npy, [tokens, heads, dim] or [batch, tokens, heads, dim]; heads and "       \
    "dims come from the files")                                                                    \
  X(K, "k", "FILE", VERB, "keys, likewise")                                                        \
  X(V, "v", "FILE", VERB, "values, likewise")                                                      \
  X(SINK, "sink", "FILE", VERB, "sink logits: float32 .npy, [query heads]")                        \
  X(DOUT, "dout", "FILE", VERB, "gradient of out; without it files run forward only")              \
  X(OUT, "out", "DIR", VERB,                                                                       \
    "write out.npy, lse.npy, dq.npy, dk.npy, dv.npy, dsink.npy there, in sequence order")          \
  X(CHECK, "check", NULL, VERB,                                                                    \
    "compare with the reference; exit 1 if any error is above its limit")                          \
  X(SEED, "seed", "N", VERB, "of the random data and of the tokens checked; default 1")            \
  X(REPEAT, "repeat", "N", VERB, "run N times; best and median times are shown; default 1")        \
  X(LINK, "link", "GB/s,us[;intra:...]", VERB,                                                     \
    "also the times on paper over links of that bandwidth and latency; \";intra:GB/s,us,RANKS\" "  \
    "are those within nodes of so many ranks")                                                     \
  X(ATTENTION_US, "attention-us", "US", VERB,                                                      \
    "with --link: how long attention forward takes on a rank's share")                             \
  X(TFLOPS, "tflops", "X", VERB, "with --link: how fast a rank computes attention instead")        \
  X(STRATEGIES, "strategies", "NAME,...", VERB,                                                    \
    "of halo, all_gather, a2a, ring, ring_all; default all")                                       \
  X(ROUNDS, "rounds", "N", VERB, "measure N times, in turns; default 5")                           \
  X(HTML, "html", "FILE", VERB, "also write a page with a picture")                                \
  X(TRANSPORT, "transport", "threads|mpi|nccl", VERB,                                              \
    "how the ranks reach each other: threads of one process (the default); one process per rank, " \
    "started by mpirun or srun; or, of 'run', GPUs, one per rank, with mpirun or without")         \
  X(DEADLINE, "deadline", "SECONDS", VERB,                                                         \
    "longest wait of a rank for another; default 600")                                             \
  X(EXCHANGE, "exchange", "TEXT", VERB,                                                            \
    "how the halo travels, NAME=VALUE,...; default what a layer would use")                        \
  X(BUDGET, "budget", "SECONDS", VERB, "wall time for the whole call; default 60")                 \
  X(EXHAUSTIVE, "exhaustive", NULL, VERB, "also try what is thought unlikely to win")              \
  X(AGAIN, "again", NULL, VERB, "measure even what the database already has")                      \
  X(VERBOSE, "verbose", NULL, VERB, "also list the rules that turned candidates away")             \
  X(FORWARD, "forward", NULL, VERB, "only the forward pass")                                       \
  X(BACKWARD, "backward", NULL, VERB, "only the backward pass")                                    \
  X(JSON, "json", NULL, COMMON, "print one JSON document on stdout")                               \
  X(HELP, "help", NULL, COMMON, "print this")
// clang-format on

#define CLI_OPTION_NAME(option, name, argument, section, help) CLI_##option,
enum cli_option { CLI_OPTION_MAP(CLI_OPTION_NAME) CLI_OPTION_COUNT };
#undef CLI_OPTION_NAME

// A set of options.
#define CLI_BIT(option) (UINT64_C(1) << CLI_##option)
#define CLI_COMMON_OPTIONS (CLI_BIT(JSON) | CLI_BIT(HELP))
#define CLI_STORE_OPTIONS (CLI_BIT(DATABASE) | CLI_BIT(CACHE))
#define CLI_CONTEXT_OPTIONS                                                                        \
  (CLI_STORE_OPTIONS | CLI_BIT(ISA) | CLI_BIT(ARCH) | CLI_BIT(THREADS))
#define CLI_PROBLEM_OPTIONS                                                                  \
  (CLI_BIT(MODEL) | CLI_BIT(PROBLEM) | CLI_BIT(WINDOW) | CLI_BIT(WINDOW_LEFT) |              \
   CLI_BIT(WINDOW_RIGHT) | CLI_BIT(DTYPE) | CLI_BIT(SOFTCAP) | CLI_BIT(SCALE) |              \
   CLI_BIT(HALO_GRADIENT) | CLI_BIT(TARGET) | CLI_BIT(RANKS) | CLI_BIT(TOKENS) |             \
   CLI_BIT(LAYOUT) | CLI_BIT(DOCUMENTS) | CLI_BIT(BATCH))

struct cli_args;

// One verb.  Each lives in the file of its name; main.c lists them.
struct cli_verb {
  const char *name;      // may be two words: "db list"
  const char *operands;  // as usage prints them; "" for none
  int least_operands, most_operands;
  const char *summary;   // one line, for the list of verbs
  const char *details;   // paragraphs for --help, or NULL
  uint64_t options;
  const char *examples[10];  // what it does, the command, and so on; NULL ends
  enum cli_exit (*run)(const struct cli_args *args);
};

// What was typed.  Strings are borrowed from argv.
struct cli_args {
  const struct cli_verb *verb;
  const char *value[CLI_OPTION_COUNT];  // NULL: not given; "" for a flag that was
  const char *operand[2];
  int operands;
};

// Reads the words after the verb.  An unknown, repeated or incomplete option is CLI_BAD_USE.
enum cli_exit cli_args_parse(const struct cli_verb *verb, int count, char *const *words,
                             struct cli_args *args);

// Name of an option with its dashes: "--window-left".
const char *cli_args_name(enum cli_option option);

// Typed values; `value` keeps what it held when the option was not given.  The words name the
// option.
enum cli_exit cli_args_integer(const struct cli_args *args, enum cli_option option, int64_t least,
                               int64_t most, int64_t *value);
enum cli_exit cli_args_real(const struct cli_args *args, enum cli_option option, double *value);

// A whole number at the start of `text`, all digits; sets `end` behind it.  False if there is none.
bool cli_args_number(const char *text, int64_t *value, const char **end);

// CLI_BAD_USE if both were given; `why` ends the sentence.
enum cli_exit cli_args_exclude(const struct cli_args *args, enum cli_option one,
                               enum cli_option other, const char *why);

// "forward" or "backward" as an operand.
enum cli_exit cli_args_direction(const char *word, enum swathe_direction *direction);

// The help of a verb, made from the same table.
void cli_args_help(const struct cli_verb *verb, FILE *file);

#endif
