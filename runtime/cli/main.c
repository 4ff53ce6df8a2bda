// main.c: the `swathe` binary: finds the verb, reads its options, prints what failed.  Each verb is
// a file of its own here and sees the library through swathe.h only.
#include "args.h"
#include "ranks.h"
#include "report.h"

#include <string.h>

// In the order of `swathe --help`.
#define VERB_MAP(X) \
  X(models) X(emit) X(compile) X(plan) X(run) X(bench) X(tune) X(db_list) X(db_show) X(db_best)  \
  X(db_report) X(doctor)

#define DECLARE_VERB(name) extern const struct cli_verb cli_verb_##name;
VERB_MAP(DECLARE_VERB)
#undef DECLARE_VERB

static const struct cli_verb *const verbs[] = {
#define LIST_VERB(name) &cli_verb_##name,
  VERB_MAP(LIST_VERB)
#undef LIST_VERB
};
enum { VERB_COUNT = sizeof verbs / sizeof verbs[0] };

// Verbs whose name begins with the word `prefix`; all if it is NULL.
static void print_verbs(const char *prefix, FILE *file)
{
  const size_t length = prefix ? strlen(prefix) : 0;
  for (int i = 0; i < VERB_COUNT; i++) {
    const char *name = verbs[i]->name;
    if (!prefix || (!strncmp(name, prefix, length) && name[length] == ' '))
      fprintf(file, "  %-9s %s\n", name, verbs[i]->summary);
  }
}

static void print_help(FILE *file)
{
  fprintf(file, "usage: swathe VERB [options]\n\n"
                "Sliding-window attention under context parallelism: only the halo travels.\n\n");
  print_verbs(NULL, file);
  fprintf(file, "\n  swathe VERB --help   options and examples of a verb\n"
                "  swathe --version     the version\n\n"
                "Examples:\n"
                "  # what a layer of a known model moves over 8 ranks\n"
                "  swathe plan --model gpt-oss-20b --tokens 131072 --ranks 8\n"
                "  # run it on this machine and compare with the reference\n"
                "  swathe run --model gpt-oss-20b --tokens 4096 --ranks 4 --check\n"
                "  # find the fastest kernels for this machine and keep them\n"
                "  swathe tune --model gpt-oss-20b --tokens 4096 --ranks 4 --budget 60\n\n"
                "Exit status: 0 done, 1 failed, 2 the command line makes no sense.\n");
}

// The verb named by the first words, and how many words that took; NULL if there is none.
static const struct cli_verb *find_verb(int count, char *const *words, int *taken)
{
  for (int i = 0; i < VERB_COUNT; i++) {
    const char *name = verbs[i]->name, *blank = strchr(name, ' ');
    if (!blank) {
      *taken = 1;
      if (!strcmp(words[0], name)) return verbs[i];
      continue;
    }
    *taken = 2;
    if (count > 1 && strlen(words[0]) == (size_t)(blank - name) &&
        !strncmp(words[0], name, strlen(words[0])) && !strcmp(words[1], blank + 1))
      return verbs[i];
  }
  return NULL;
}

static bool is_first_of_two(const char *word)
{
  const size_t length = strlen(word);
  for (int i = 0; i < VERB_COUNT; i++)
    if (!strncmp(verbs[i]->name, word, length) && verbs[i]->name[length] == ' ') return true;
  return false;
}

// The words name no verb: help if that is what was asked for, else what was wrong.
static enum cli_exit without_verb(int count, char *const *words)
{
  const char *first = words[0];

  if (!strcmp(first, "--help") || !strcmp(first, "-h") || (!strcmp(first, "help") && count == 1)) {
    print_help(stdout);
    return CLI_OK;
  }
  if (!strcmp(first, "--version")) {
    puts("swathe " SWATHE_VERSION);
    return CLI_OK;
  }
  if (is_first_of_two(first)) {
    const bool asked = count > 1 && (!strcmp(words[1], "--help") || !strcmp(words[1], "-h"));
    if (!asked && count > 1) fprintf(stderr, "swathe: there is no verb '%s %s'\n", first, words[1]);
    if (!asked && count == 1) fprintf(stderr, "swathe: %s needs a second word\n", first);
    fprintf(asked ? stdout : stderr, "usage: swathe %s VERB [options]\n\n", first);
    print_verbs(first, asked ? stdout : stderr);
    return asked ? CLI_OK : CLI_BAD_USE;
  }
  fprintf(stderr, "swathe: there is no %s '%s'; see swathe --help\n",
          *first == '-' ? "option" : "verb", first);
  return CLI_BAD_USE;
}

static bool wants_json(int count, char *const *words)
{
  for (int i = 0; i < count; i++)
    if (!strcmp(words[i], "--json")) return true;
  return false;
}

static enum cli_exit run_verb(const struct cli_verb *verb, int count, char *const *words)
{
  struct cli_args args;
  enum cli_exit code = cli_args_parse(verb, count, words, &args);

  if (!code && args.value[CLI_HELP]) {
    cli_args_help(verb, stdout);
    return CLI_OK;
  }
  if (!code) code = verb->run(&args);
  if (!code) return code;
  fflush(stdout);
  if (!cli_ranks_speak(&args, code)) return code;
  fprintf(stderr, "swathe %s: %s\n", verb->name, cli_fail_words());
  if (code == CLI_BAD_USE) fprintf(stderr, "see swathe %s --help\n", verb->name);
  if (wants_json(count, words)) cli_report_json_failure(verb->name, code, cli_fail_words());
  return code;
}

int main(int argc, char **argv)
{
  enum cli_exit code = CLI_BAD_USE;
  int taken = 0;

  if (argc < 2) {
    print_help(stderr);
    return (int)code;
  }
  const struct cli_verb *verb = find_verb(argc - 1, argv + 1, &taken);
  if (verb) code = run_verb(verb, argc - 1 - taken, argv + 1 + taken);
  else code = without_verb(argc - 1, argv + 1);
  if (fflush(stdout) || ferror(stdout)) {
    fprintf(stderr, "swathe: stdout could not be written\n");
    if (!code) code = CLI_FAILED;
  }
  return (int)code;
}
