// test_property.c: random layers over random ranks: every result against the reference, poison,
// bytes on the wire, isolation of documents, bit-equality over threads.  Cases are drawn and made
// small in property.c.
//
//   test_property                            what CI runs: a fixed seed
//   test_property --seed N [--cases N]       longer, by hand
//   test_property --target cuda [...]        on the CUDA target: of what SWATHE_LIBCUDA names
//   test_property --case "gqa=4 ..."         one case again, as a failure printed it
//
// Compiling is what costs, so each kernel pair serves many shardings, and most are compiled without
// optimisation.  TEST_CACHE_DIR keeps compiled kernels between runs.
#include <inttypes.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "group.h"
#include "property.h"

enum {
  CASES_PER_KERNEL = 76,  // of a forward and a backward kernel
  CASES_PER_PROBLEM = 19,
  CI_CASES = 67 * CASES_PER_KERNEL,
  CI_SEED = 1,
  CUDA_CASES_PER_KERNEL = 12,  // emulated, a case takes much longer
  CI_CUDA_CASES = 10 * CUDA_CASES_PER_KERNEL,
  MOST_THREADS = 3,
  WORDS = 1536,
};

// ---- Contexts ----------------------------------------------------------------------------------

static char root[512];
static const char plain_compiler[] = "swathe-test-plain-cc";
static bool root_is_ours;
static struct swathe_context
    *contexts[PROPERTY_ISAS][2][MOST_THREADS];  // [isa][optimised][threads - 1]

// The usual compiler, with -O0 behind all its flags.  Left alone if there, for the caches' sake.
// Found through PATH: a compiler is words with spaces between them, and root may have one in it.
static bool write_plain_compiler(void)
{
  static const char script[] = "#!/bin/sh\nexec ${SWATHE_CC:-${CC:-cc}} \"$@\" -O0\n";
  char place[600], fresh[640], path[8192];
  const char *usual = getenv("PATH");
  const int length = snprintf(path, sizeof path, "%s:%s", root, usual ? usual : "/usr/bin:/bin");
  if (length >= (int)sizeof path || setenv("PATH", path, 1)) return false;
  snprintf(place, sizeof place, "%s/%s", root, plain_compiler);
  if (!access(place, X_OK)) return true;
  snprintf(fresh, sizeof fresh, "%s.%ld", place, (long)getpid());
  FILE *file = fopen(fresh, "w");
  if (!file) return false;
  fputs(script, file);
  return !fclose(file) && !chmod(fresh, 0755) && !rename(fresh, place);
}

static bool open_root(void)
{
  const char *given = getenv("TEST_CACHE_DIR");
  if (given && *given) {
    snprintf(root, sizeof root, "%s", given);
    mkdir(root, 0777);
  } else {
    snprintf(root, sizeof root, "/tmp/swathe-test-property-XXXXXX");
    if (!mkdtemp(root)) return false;
    root_is_ours = true;
  }
  return write_plain_compiler();
}

static void close_root(void)
{
  char command[600];
  struct swathe_context **const all = &contexts[0][0][0];
  for (size_t i = 0; i < sizeof contexts / sizeof *all; i++) {
    if (all[i]) swathe_close(all[i]);
    all[i] = NULL;
  }
  snprintf(command, sizeof command, "rm -rf %s", root);
  if (root_is_ours && system(command)) fprintf(stderr, "cannot remove %s\n", root);
}

// NULL: swathe_error() says why, such as an isa that this machine has not.
static struct swathe_context *context_of(int64_t isa, bool optimised, int threads)
{
  struct swathe_context **context = &contexts[isa][optimised][threads - 1];
  char cache[600], database[600];
  const struct swathe_options options = {
    .database = database,
    .cache = cache,
    .threads = threads,
    .isa = isa == PROPERTY_BEST ? NULL : property_isas[isa],
    .compiler = optimised ? NULL : plain_compiler,
  };
  snprintf(cache, sizeof cache, "%s/%s", root, optimised ? "o2" : "o0");
  snprintf(database, sizeof database, "%s/none.db", root);
  if (!*context && swathe_open(&options, context)) *context = NULL;
  return *context;
}

// Keeps one of the configs it is shown, each as likely as the others.
struct lottery {
  uint64_t state;
  int64_t shown;
  char config[512];
};

static bool show_config(void *arg, const char *config)
{
  struct lottery *lottery = arg;
  if (property_random(&lottery->state, ++lottery->shown) == 0)
    snprintf(lottery->config, sizeof lottery->config, "%s", config);
  return true;
}

// [2] configs of the case's kernels, good until the next call for other kernels.  NULL:
// swathe_error().
static const char *const *configs_of(const struct property *property)
{
  static struct property last;  // what a kernel is made from
  static struct lottery lotteries[2];
  static const char *configs[2];  // NULL where a space prefers no point: the default
  struct property kernel = { 0 };
  const struct swathe_problem problem = property_problem(property);

  memcpy(&kernel, property, offsetof(struct property, kv_heads));
  if (!memcmp(&last, &kernel, sizeof last)) return configs;
  last = (struct property){ 0 };
  for (int d = 0; d < 2; d++) {
    lotteries[d] = (struct lottery){ .state = (uint64_t)(2 * property->config + d) };
    if (swathe_configs(context_of(property->isa, property->optimised, 1), &problem,
                       (enum swathe_direction)d, NULL, false, show_config, NULL, &lotteries[d]))
      return NULL;
    configs[d] = lotteries[d].shown ? lotteries[d].config : NULL;
  }
  last = kernel;
  return configs;
}

// How the halo of the case travels; NULL: as its layer likes.
static const char *exchange_of(const struct property *property)
{
  static const char *const exchanges[] = {
    NULL,
    "overlap=0,chunks=1,together=0,order=0,poll=1,progress=0",
    "overlap=1,chunks=2,together=1,order=1,poll=4,progress=0",
    "overlap=2,chunks=1,together=1,order=0,poll=1,progress=0",
    "overlap=2,chunks=4,together=0,order=1,poll=1,progress=0",
    "overlap=2,chunks=8,together=1,order=0,poll=4,progress=50",
  };
  const uint64_t which = (uint64_t)property->seed % (sizeof exchanges / sizeof *exchanges);
  return property->cuda ? NULL : exchanges[which];
}

// ---- One case ----------------------------------------------------------------------------------

struct trial {
  const struct property *property;
  struct swathe_problem problem;
  struct property_sharding *sharding, *before;
  struct sequence *sequence;
  struct group_case group;
};

static double uniform(uint64_t *state)
{
  return (double)property_random(state, 1 << 30) / (1 << 30);
}

static void set_up_trial(struct trial *trial, const struct property *property)
{
  uint64_t state = (uint64_t)property->seed;
  trial->property = property;
  trial->problem = property_problem(property);
  trial->sharding = property_sharding_make(property);
  struct property other = *property;
  other.layout = property->layout == SWATHE_CONTIGUOUS ? SWATHE_ZIGZAG : SWATHE_CONTIGUOUS;
  trial->before = property_sharding_make(&other);
  trial->sequence = sequence_make(&trial->problem, &trial->sharding->view, (uint64_t)property->seed,
                                  (double)property->gain);
  for (int h = 0; trial->problem.sinks && h < trial->problem.q_heads; h++)
    trial->sequence->sink[h] = (float)((2 * uniform(&state) - 1) * (double)property->sink);
  trial->group = (struct group_case){
    .problem = &trial->problem,
    .sharding = &trial->sharding->view,
    .before = property->before ? &trial->before->view : NULL,
    .form = { .head_major = property->head_major != 0, .gap = property->gap },
    .script = property_scripts[property->script],
    .keep_halo = property->keep_halo != 0,
  };
}

static void tear_down_trial(struct trial *trial)
{
  sequence_free(trial->sequence);
  property_sharding_free(trial->sharding);
  property_sharding_free(trial->before);
}

// The limits of `swathe run --check`, where scores are large grown with them: in fp32 their
// rounding goes into the softmax, in bf16 an out that falls to the other side of a tie goes into
// dk by scale * q.
static struct sequence_tolerance tolerance_of(const struct property *property)
{
  const double usual = 1 / sqrt((double)property->dim_qk);
  const double scale = property->scale ? fabs((double)property->scale) / 1000 : usual;
  const double gain = fmax(1, (double)property->gain * scale / usual);
  const double tie = fmax(1, (double)property->gain * scale * 8);
  struct sequence_tolerance tolerance = { 2e-5 * gain, 2e-5 * gain, 1e-4 * gain };
  if (property->bf16 || property->cuda)
    tolerance = (struct sequence_tolerance){ 2e-2, 1e-3, 2e-2 * tie };
  if (property->narrow_home)
    tolerance.gradient = 4e-2 * tie;  // each rank's sum is rounded once more
  return tolerance;
}

// Where every token of the packed row lives and how far its document reaches; owner -1: padding.
struct home {
  int64_t owner, begin, end;
};

static bool find_homes(const struct trial *trial, struct home *homes)
{
  const struct property *p = trial->property;
  const int64_t tokens = property_tokens(p), documents = p->documents ? p->documents : 1;
  struct swathe_span *spans = calloc((size_t)(tokens + 1), sizeof *spans);
  bool found = true;

  for (int64_t t = 0; t < tokens; t++) homes[t] = (struct home){ .owner = -1 };
  for (int32_t rank = 0; rank < p->ranks && found; rank++) {
    int64_t count = 0;
    found = !swathe_sharding_spans(&trial->sharding->view, rank, spans, tokens, &count);
    for (int64_t s = 0; s < count && found; s++)
      for (int64_t i = 0; i < spans[s].tokens; i++) homes[spans[s].token + i].owner = rank;
  }
  for (int64_t d = 0; d < documents; d++) {
    const int64_t begin = trial->sharding->padded[d];
    const int64_t end = p->documents ? begin + p->lengths[d] : tokens;
    for (int64_t t = begin; t < end; t++) homes[t].begin = begin, homes[t].end = end;
  }
  free(spans);
  return found;
}

// The halo by its definition: every key of another rank that some query of the rank sees, once.
static void count_halo(const struct property *p, const struct home *homes, int64_t *received,
                       int64_t *sent)
{
  const int64_t tokens = property_tokens(p);
  for (int64_t key = 0; key < tokens; key++) {
    bool seen[PROPERTY_RANKS] = { false };
    if (homes[key].owner < 0) continue;
    for (int64_t query = homes[key].begin; query < homes[key].end; query++)
      if ((p->left < 0 || query - key <= p->left) && (p->right < 0 || key - query <= p->right))
        seen[homes[query].owner] = true;
    for (int64_t rank = 0; rank < p->ranks; rank++)
      if (seen[rank] && rank != homes[key].owner) {
        received[rank]++;
        sent[homes[key].owner]++;
      }
  }
}

static bool plan_is_exact(const struct trial *trial, const struct swathe_traffic *traffic,
                          char *words, size_t size)
{
  const struct property *p = trial->property;
  struct home *homes = calloc((size_t)property_tokens(p) + 1, sizeof *homes);
  int64_t received[PROPERTY_RANKS] = { 0 }, sent[PROPERTY_RANKS] = { 0 };
  const bool found = find_homes(trial, homes);

  if (found) count_halo(p, homes, received, sent);
  free(homes);
  if (!found) snprintf(words, size, "no spans: %s", swathe_error());
  for (int64_t r = 0; r < p->ranks && found; r++)
    if (traffic[r].halo_tokens != received[r] || traffic[r].send_tokens != sent[r]) {
      snprintf(words, size,
               "rank %" PRId64 " plans to receive %" PRId64 " and send %" PRId64
               " tokens, not %" PRId64 " and %" PRId64,
               r, traffic[r].halo_tokens, traffic[r].send_tokens, received[r], sent[r]);
      return false;
    }
  return found;
}

// Forward moves the halo; backward the gradients of its keys in fp32, or as the problem says, and
// the halo again if it was not kept.
static bool moves_the_halo(const struct trial *trial, const int64_t *moved, char *words,
                           size_t size)
{
  const struct swathe_problem *p = &trial->problem;
  const int64_t elems =
      (int64_t)p->kv_heads * (p->head_dim_qk + p->head_dim_v) * trial->property->batch;
  struct swathe_traffic traffic[PROPERTY_RANKS];
  int64_t forwards = 0, backwards = 0;

  for (const char *step = trial->group.script; *step; step++) {
    forwards += *step == 'f';
    backwards += *step == 'b';
  }
  if (swathe_plan(p, &trial->sharding->view, NULL, NULL, traffic)) {
    snprintf(words, size, "no plan: %s", swathe_error());
    return false;
  }
  if (!plan_is_exact(trial, traffic, words, size)) return false;
  for (int64_t r = 0; r < trial->property->ranks; r++) {
    const int64_t halo = traffic[r].halo_tokens * elems * (p->dtype == SWATHE_F32 ? 4 : 2);
    const int64_t home = traffic[r].send_tokens * elems * (p->halo_gradient == SWATHE_BF16 ? 2 : 4);
    const int64_t want =
        forwards * halo + backwards * (home + (trial->property->keep_halo ? 0 : halo));
    if (traffic[r].receive_bytes == halo && moved[r] == want) continue;
    snprintf(words, size, "rank %" PRId64 " received %" PRId64 " bytes, not %" PRId64, r, moved[r],
             want);
    return false;
  }
  return true;
}

static bool equals_the_reference(struct trial *trial, char *words, size_t size)
{
  int64_t moved[PROPERTY_RANKS] = { 0 };
  sequence_solve_rounded(trial->sequence);
  return !group_run(&trial->group, trial->sequence, moved, words, size) &&
         sequence_compare(trial->sequence, true, tolerance_of(trial->property), words, size) &&
         moves_the_halo(trial, moved, words, size);
}

// ---- Probes ------------------------------------------------------------------------------------

// What a run computed, to compare bits with another's.
struct bits {
  float *got[SEQUENCE_ARRAYS];
  double *dsink;
};

static struct bits keep_bits(const struct sequence *sequence)
{
  const size_t rows = (size_t)(sequence->view.batch * sequence->view.tokens);
  const size_t sinks = (size_t)sequence->problem.q_heads * sizeof(double);
  struct bits bits = { .dsink = malloc(sinks) };
  memcpy(bits.dsink, sequence->got_dsink, sinks);
  for (enum sequence_array a = SEQUENCE_OUT; a < SEQUENCE_ARRAYS; a++) {
    size_t elems;
    sequence_row(sequence, a, 0, 0, &elems);
    bits.got[a] = malloc(rows * elems * sizeof(float) + 1);
    memcpy(bits.got[a], sequence->got[a], rows * elems * sizeof(float));
  }
  return bits;
}

static void free_bits(struct bits *bits)
{
  for (enum sequence_array a = SEQUENCE_OUT; a < SEQUENCE_ARRAYS; a++) free(bits->got[a]);
  free(bits->dsink);
}

// Every token but those of [begin, end) has the same bits as before.
static bool same_bits(const struct sequence *sequence, const struct bits *bits, int64_t begin,
                      int64_t end, const char *why, char *words, size_t size)
{
  for (enum sequence_array a = SEQUENCE_OUT; a < SEQUENCE_ARRAYS; a++)
    for (int64_t batch = 0; batch < sequence->view.batch; batch++)
      for (int64_t token = 0; token < sequence->view.tokens; token++) {
        size_t elems;
        const size_t row = sequence_row(sequence, a, batch, token, &elems);
        if (token >= begin && token < end) continue;
        if (!memcmp(bits->got[a] + row, sequence->got[a] + row, elems * sizeof(float))) continue;
        snprintf(words, size,
                 "%s at batch %" PRId64 ", token %" PRId64 " is not bit-equal after %s",
                 sequence_array_name(a), batch, token, why);
        return false;
      }
  return true;
}

// One document's inputs become something else: NaN, infinite or just other values.
static void spoil(struct trial *trial, int64_t begin, int64_t end)
{
  const struct sequence *sequence = trial->sequence;
  uint64_t state = (uint64_t)trial->property->seed;
  const int64_t kind = property_random(&state, 3);
  for (enum sequence_array a = SEQUENCE_Q; a <= SEQUENCE_DOUT; a++)
    for (int64_t batch = 0; batch < sequence->view.batch; batch++)
      for (int64_t token = begin; token < end; token++) {
        size_t elems;
        float *row = sequence->given[a] + sequence_row(sequence, a, batch, token, &elems);
        for (size_t i = 0; i < elems; i++)
          row[i] = kind == 0 ? NAN : kind == 1 ? INFINITY : (float)property_random(&state, 64) - 31;
      }
}

static bool documents_are_isolated(struct trial *trial, char *words, size_t size)
{
  const struct property *p = trial->property;
  for (int64_t i = 0; i < p->documents; i++) {
    const int64_t d = (p->seed + i) % p->documents;
    const int64_t begin = trial->sharding->padded[d], end = begin + p->lengths[d];
    char why[64];
    if (!p->lengths[d]) continue;
    struct bits bits = keep_bits(trial->sequence);
    spoil(trial, begin, end);
    snprintf(why, sizeof why, "a change of document %" PRId64, d);
    const bool right = !group_run(&trial->group, trial->sequence, NULL, words, size) &&
                       same_bits(trial->sequence, &bits, begin, end, why, words, size);
    free_bits(&bits);
    return right;
  }
  return true;
}

static bool threads_change_nothing(struct trial *trial, char *words, size_t size)
{
  struct bits bits = keep_bits(trial->sequence);
  const size_t sinks = (size_t)trial->problem.q_heads * sizeof(double);
  bool right = true;
  for (int threads = 2; threads <= MOST_THREADS && right; threads++) {
    char why[64];
    snprintf(why, sizeof why, "a run with %d threads", threads);
    trial->group.context = context_of(trial->property->isa, trial->property->optimised, threads);
    right = !group_run(&trial->group, trial->sequence, NULL, words, size) &&
            same_bits(trial->sequence, &bits, 0, 0, why, words, size);
    if (!right || !memcmp(bits.dsink, trial->sequence->got_dsink, sinks)) continue;
    snprintf(words, size, "dsink is not bit-equal after %s", why);
    right = false;
  }
  free_bits(&bits);
  return right;
}

// The sum of out * dout, by the reference's forward alone.
static double loss_of(const struct trial *trial)
{
  const struct swathe_sequence *view = &trial->sequence->view;
  const int32_t heads = trial->problem.q_heads;
  double *out = malloc((size_t)(heads * (trial->problem.head_dim_v + 2)) * sizeof *out), loss = 0;
  double *lse = out + heads * trial->problem.head_dim_v, *delta = lse + heads;
  for (int64_t batch = 0; batch < view->batch; batch++)
    for (int64_t token = 0; token < view->tokens; token++) {
      swathe_reference_query(&trial->problem, view, batch, token, out, lse, delta);
      for (int h = 0; h < heads; h++) loss += delta[h];
    }
  free(out);
  return loss;
}

static bool slope_is(const struct trial *trial, float *input, double want, const char *name,
                     char *words, size_t size)
{
  const float kept = *input, step = 0x1p-16f;
  double losses[2];
  float inputs[2];
  for (int side = 0; side < 2; side++) {
    *input = inputs[side] = side ? kept + step : kept - step;
    losses[side] = loss_of(trial);
  }
  *input = kept;
  const double slope = (losses[1] - losses[0]) / ((double)inputs[1] - (double)inputs[0]);
  if (fabs(slope - want) <= 1e-4 * fmax(1, fabs(want))) return true;
  snprintf(words, size, "the reference's own d%s is %.9g, its finite difference %.9g", name, want,
           slope);
  return false;
}

static bool differences_agree(struct trial *trial, char *words, size_t size)
{
  static const enum sequence_array inputs[] = { SEQUENCE_Q, SEQUENCE_K, SEQUENCE_V };
  static const enum sequence_array slopes[] = { SEQUENCE_DQ, SEQUENCE_DK, SEQUENCE_DV };
  struct sequence *sequence = trial->sequence;
  uint64_t state = (uint64_t)trial->property->seed;
  bool right = true;
  for (int i = 0; i < 6 && sequence->view.tokens && right; i++) {
    size_t elems;
    const int64_t batch = property_random(&state, sequence->view.batch);
    const int64_t token = property_random(&state, sequence->view.tokens);
    size_t at = sequence_row(sequence, inputs[i % 3], batch, token, &elems);
    at += (size_t)property_random(&state, (int64_t)elems);
    if (isnan(sequence->given[inputs[i % 3]][at])) continue;  // padding
    right = slope_is(trial, &sequence->given[inputs[i % 3]][at], sequence->want[slopes[i % 3]][at],
                     sequence_array_name(inputs[i % 3]), words, size);
  }
  if (right && trial->problem.sinks)
    right = slope_is(trial, &sequence->sink[0], sequence->want_dsink[0], "sink", words, size);
  return right;
}

// ---- Judging -----------------------------------------------------------------------------------

static char line[PROPERTY_TEXT + 64];  // of the case that runs, for a crash to print

static bool is_right(const struct property *property, char *words, size_t size)
{
  struct trial trial;
  char text[PROPERTY_TEXT];
  bool right;

  property_format(property, text, sizeof text);
  snprintf(line, sizeof line, "test_property --case \"%s\"\n", text);
  set_up_trial(&trial, property);
  trial.group.context = context_of(property->isa, property->optimised, 1);
  trial.group.exchange = exchange_of(property);
  if (trial.group.context && property->config) trial.group.configs = configs_of(property);
  if (!trial.group.context || (property->config && !trial.group.configs)) {
    snprintf(words, size, "no context or config: %s", swathe_error());
    tear_down_trial(&trial);
    return false;
  }
  right = equals_the_reference(&trial, words, size);
  if (right && property->probe == PROPERTY_ISOLATE)
    right = documents_are_isolated(&trial, words, size);
  if (right && property->probe == PROPERTY_THREADS)
    right = threads_change_nothing(&trial, words, size);
  if (right && property->probe == PROPERTY_DIFFERENCES)
    right = differences_agree(&trial, words, size);
  tear_down_trial(&trial);
  return right;
}

static bool is_wrong(void *words, const struct property *property)
{
  return !is_right(property, words, WORDS);
}

// Makes the failure small and prints it.
static void report_failure(const struct property *property, const char *words)
{
  char text[PROPERTY_TEXT], again[WORDS] = "";
  struct property smaller = *property;

  property_format(property, text, sizeof text);
  fprintf(stderr, "FAILED  %s\n  test_property --case \"%s\"\n", words, text);
  const int asked = property_shrink(&smaller, is_wrong, again, 400);
  property_format(&smaller, text, sizeof text);
  if (is_right(&smaller, again, sizeof again))
    snprintf(again, sizeof again, "(it passes when run again)");
  fprintf(stderr, "smaller, after %d tries:  %s\n  test_property --case \"%s\"\n", asked, again,
          text);
}

// A crash in the library names its case before it ends the test.
static void print_line(int number)
{
  static const char words[] = "\nCRASHED while running\n  ";
  if (write(2, words, sizeof words - 1) < 0 || write(2, line, strlen(line)) < 0) _exit(3);
  signal(number, SIG_DFL);
  raise(number);
}

static void watch_crashes(void)
{
  static const int numbers[] = { SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT };
  for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) signal(numbers[i], print_line);
}

// ---- What was covered --------------------------------------------------------------------------

#define FEATURES(X)                                                                \
  X("f32", !p->bf16)                                                               \
  X("bf16", p->bf16)                                                               \
  X("grouped heads", p->gqa > 1)                                                   \
  X("64 query heads", p->gqa * p->kv_heads == 64)                                  \
  X("unequal dims", p->dim_qk != p->dim_v)                                         \
  X("dims over 128", p->dim_qk > 128 || p->dim_v > 128)                            \
  X("two-sided", p->right != 0)                                                    \
  X("unlimited left", p->left < 0)                                                 \
  X("unlimited right", p->right < 0)                                               \
  X("window over a share", p->left > 0 && p->left * p->ranks > property_tokens(p)) \
  X("sinks", p->sinks)                                                             \
  X("softcap", p->softcap)                                                         \
  X("softcap with gain", p->softcap && p->gain > 3)                                \
  X("scale of its own", p->scale)                                                  \
  X("batch", p->batch > 1)                                                         \
  X("documents", p->documents > 1)                                                 \
  X("padding between", p->documents && p->paddings[0])                             \
  X("padding behind", p->documents && p->tail)                                     \
  X("contiguous", p->layout == SWATHE_CONTIGUOUS)                                  \
  X("zigzag", p->layout == SWATHE_ZIGZAG)                                          \
  X("zigzag-doc", p->layout == SWATHE_ZIGZAG_DOCUMENT)                             \
  X("spans", p->layout == SWATHE_SPANS)                                            \
  X("spans with row gaps", p->layout == SWATHE_SPANS && p->row_gap)                \
  X("one rank", p->ranks == 1)                                                     \
  X("five ranks and more", p->ranks > 4)                                           \
  X("fewer tokens than ranks", property_tokens(p) < p->ranks)                      \
  X("over 1000 tokens", property_tokens(p) > 1000)                                 \
  X("head-major", p->head_major)                                                   \
  X("gaps between heads", p->gap)                                                  \
  X("halo kept", p->keep_halo)                                                     \
  X("replayed forward", p->script == 1)                                            \
  X("ran before", p->before)                                                       \
  X("sharded anew", p->script == 2)                                                \
  X("isa best", p->isa == PROPERTY_BEST)                                           \
  X("isa avx2", p->isa == PROPERTY_AVX2)                                           \
  X("isa generic", p->isa == PROPERTY_GENERIC)                                     \
  X("narrow gradients", p->narrow_home && p->ranks > 1)                            \
  X("config of its own", p->config)                                                \
  X("optimised", p->optimised)                                                     \
  X("isolation", p->probe == PROPERTY_ISOLATE)                                     \
  X("threads", p->probe == PROPERTY_THREADS)                                       \
  X("differences", p->probe == PROPERTY_DIFFERENCES)

#define FEATURE_NAME(name, condition) name,
#define FEATURE_HELD(name, condition) (condition) != 0,
static const char *const feature_names[] = { FEATURES(FEATURE_NAME) };
enum { FEATURE_COUNT = sizeof feature_names / sizeof *feature_names };

struct coverage {
  int64_t cases, features[FEATURE_COUNT];
  int64_t kernels[PROPERTY_ISAS];  // different ones
  struct property *drawn;          // [drawn_count]
  int64_t drawn_count;
};

// A forward and a backward kernel, unless they were there before.
static void count_kernels(struct coverage *coverage, const struct property *kernel)
{
  for (int64_t i = 0; i < coverage->drawn_count; i++)
    if (!memcmp(&coverage->drawn[i], kernel, sizeof *kernel)) return;
  coverage->drawn = realloc(coverage->drawn, (size_t)(coverage->drawn_count + 1) * sizeof *kernel);
  coverage->drawn[coverage->drawn_count++] = *kernel;
  coverage->kernels[kernel->isa] += 2;
}

static void count_case(struct coverage *coverage, const struct property *p)
{
  const bool held[] = { FEATURES(FEATURE_HELD) };
  coverage->cases++;
  for (int f = 0; f < FEATURE_COUNT; f++) coverage->features[f] += held[f];
}

static void print_coverage(const struct coverage *coverage)
{
  print_message("%" PRId64 " cases;", coverage->cases);
  for (int isa = 0; isa < PROPERTY_ISAS; isa++)
    print_message(" %" PRId64 " kernels of isa %s%s", coverage->kernels[isa], property_isas[isa],
                  isa + 1 < PROPERTY_ISAS ? "," : "\n");
  for (int f = 0; f < FEATURE_COUNT; f++)
    print_message("%6" PRId64 "  %-24s%s", coverage->features[f], feature_names[f],
                  f % 3 == 2 || f + 1 == FEATURE_COUNT ? "\n" : "");
}

// One kernel pair in nine is for AVX2, one for plain vectors; one in eight is compiled as users'
// kernels are, one in four has a config that is not the default.
static void draw_kernel(uint64_t *state, int64_t index, struct property *kernel)
{
  property_draw_kernel(state, kernel);
  kernel->isa = index % 9 == 3 ? PROPERTY_AVX2 : index % 9 == 7 ? PROPERTY_GENERIC : PROPERTY_BEST;
  kernel->optimised = index % 8 == 0;
  if (index % 4 == 1) kernel->config = 1 + property_random(state, 999);
  if (!context_of(kernel->isa, kernel->optimised, 1)) kernel->isa = PROPERTY_GENERIC;
}

// Half the kernel pairs of the CUDA target have a config that is not the default.
static void draw_cuda_kernel(uint64_t *state, int64_t index, struct property *kernel)
{
  property_draw_kernel(state, kernel);
  kernel->cuda = 1;
  if (index % 2 == 1) kernel->config = 1 + property_random(state, 999);
}

static bool sweep(bool cuda, uint64_t seed, int64_t cases, struct coverage *coverage)
{
  const int per_kernel = cuda ? CUDA_CASES_PER_KERNEL : CASES_PER_KERNEL;
  for (int64_t index = 0; coverage->cases < cases; index++) {
    uint64_t state = seed * 1000003 + (uint64_t)index;
    struct property kernel, problem;
    if (cuda) draw_cuda_kernel(&state, index, &kernel);
    else draw_kernel(&state, index, &kernel);
    count_kernels(coverage, &kernel);
    for (int i = 0; i < per_kernel && coverage->cases < cases; i++) {
      if (i % CASES_PER_PROBLEM == 0) {
        problem = kernel;
        property_draw_problem(&state, &problem);
      }
      struct property property = problem;
      char words[WORDS] = "";
      property_draw_data(&state, &property);
      if (cuda && property.ranks > 4) property.ranks -= 4;
      if (cuda && property.probe != PROPERTY_ISOLATE) property.probe = PROPERTY_PLAIN;
      if (!is_right(&property, words, sizeof words)) {
        report_failure(&property, words);
        return false;
      }
      count_case(coverage, &property);
    }
  }
  print_coverage(coverage);
  return true;
}

// ---- Tests -------------------------------------------------------------------------------------

static int set_up(void **state)
{
  (void)state;
  return open_root() ? 0 : -1;
}

static int tear_down(void **state)
{
  (void)state;
  close_root();
  return 0;
}

static void random_cases_are_right(void **state)
{
  struct coverage coverage = { 0 };
  (void)state;
  watch_crashes();
  if (!sweep(false, CI_SEED, CI_CASES, &coverage)) fail_msg("a case failed; see above");
  assert_true(coverage.cases >= 5000);
  free(coverage.drawn);
  int64_t kernels = 0;
  for (int isa = 0; isa < PROPERTY_ISAS; isa++) {
    kernels += coverage.kernels[isa];
    if (context_of(isa, false, 1)) assert_true(coverage.kernels[isa] >= 10);
  }
  assert_true(kernels >= 80);
  for (int f = 0; f < FEATURE_COUNT; f++)
    if (coverage.features[f] < 20 && strcmp(feature_names[f], "isa avx2"))
      fail_msg("'%s' was drawn %" PRId64 " times only", feature_names[f], coverage.features[f]);
}

static void note_compiler(void *arg, const struct swathe_finding *finding)
{
  if (!strcmp(finding->what, "cuda compiler")) *(bool *)arg = finding->health == SWATHE_HEALTHY;
}

static void random_cases_are_right_on_cuda(void **state)
{
  const char *driver = getenv("TEST_LIBCUDA");
  struct coverage coverage = { 0 };
  bool compiler = false;
  (void)state;
  if (context_of(PROPERTY_BEST, false, 1))
    swathe_doctor(context_of(PROPERTY_BEST, false, 1), note_compiler, &compiler);
  if (!driver || !compiler) skip();
  setenv("SWATHE_LIBCUDA", driver, 1);
  watch_crashes();
  if (!sweep(true, CI_SEED, CI_CUDA_CASES, &coverage)) fail_msg("a case failed; see above");
  free(coverage.drawn);
}

static void a_line_is_the_case(void **state)
{
  uint64_t random = 5;
  (void)state;
  for (int i = 0; i < 1000; i++) {
    struct property property, again;
    char text[PROPERTY_TEXT], words[WORDS] = "";
    property_draw_kernel(&random, &property);
    property_draw_problem(&random, &property);
    property_draw_data(&random, &property);
    property_format(&property, text, sizeof text);
    if (!property_parse(text, &again, words, sizeof words)) fail_msg("%s: %s", text, words);
    assert_memory_equal(&property, &again, sizeof property);
  }
  static const char *const senseless[] = {
    "gqa",          "gqa=",     "gqa=x",       "colour=3",
    "layout=round", "ranks=0",  "documents=9", "lengths=1,2,3,4,5,6,7,8,9",
    "gqa=1,2",      "ranks=65", "tail=-1"
  };
  for (size_t i = 0; i < sizeof senseless / sizeof *senseless; i++) {
    struct property property;
    char words[WORDS] = "";
    if (property_parse(senseless[i], &property, words, sizeof words))
      fail_msg("%s was taken", senseless[i]);
    assert_true(*words);
  }
}

// A made-up bug: zigzag, at least two ranks, a second document of three tokens or more, a window
// of five.
static bool fails_for_shrinking(void *asked, const struct property *p)
{
  ++*(int *)asked;
  return p->layout == SWATHE_ZIGZAG && p->ranks >= 2 && p->left >= 5 && p->documents >= 2 &&
         p->lengths[1] >= 3;
}

static void failures_shrink_to_their_cause(void **state)
{
  uint64_t random = 11;
  int found = 0, asked = 0;
  (void)state;
  while (found < 20) {
    struct property property;
    char text[PROPERTY_TEXT], want[PROPERTY_TEXT];
    property_draw_kernel(&random, &property);
    property_draw_problem(&random, &property);
    property_draw_data(&random, &property);
    if (!fails_for_shrinking(&asked, &property)) continue;
    found++;
    property_shrink(&property, fails_for_shrinking, &asked, 1000);
    property_format(&property, text, sizeof text);
    snprintf(want, sizeof want,
             "layout=zigzag ranks=2 documents=2 lengths=0,3 left=5 seed=%" PRId64, property.seed);
    assert_string_equal(text, want);
  }
}

// ---- By hand -----------------------------------------------------------------------------------

static int run_one(const char *text)
{
  struct property property;
  char words[WORDS] = "";
  if (!property_parse(text, &property, words, sizeof words)) {
    fprintf(stderr, "%s\n", words);
    return 2;
  }
  const bool right = is_right(&property, words, sizeof words);
  printf("%s%s\n", right ? "right" : "WRONG  ", right ? "" : words);
  return right ? 0 : 1;
}

static int by_hand(int argc, char **argv)
{
  struct coverage coverage = { 0 };
  uint64_t seed = CI_SEED;
  int64_t cases = CI_CASES;
  const char *one = NULL;
  bool cuda = false;
  for (int i = 1; i < argc; i += 2) {
    const char *value = i + 1 < argc ? argv[i + 1] : NULL;
    if (value && !strcmp(argv[i], "--case")) one = value;
    else if (value && !strcmp(argv[i], "--seed")) seed = strtoull(value, NULL, 10);
    else if (value && !strcmp(argv[i], "--cases")) cases = strtoll(value, NULL, 10);
    else if (value && !strcmp(argv[i], "--target")) cuda = !strcmp(value, "cuda");
    else {
      fprintf(stderr,
              "usage: test_property [--target cuda] [--seed N] [--cases N] | --case \"...\"\n");
      return 2;
    }
  }
  if (!open_root()) return 2;
  watch_crashes();
  const int result = one ? run_one(one) : sweep(cuda, seed, cases, &coverage) ? 0 : 1;
  free(coverage.drawn);
  close_root();
  return result;
}

int main(int argc, char **argv)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(a_line_is_the_case),
    cmocka_unit_test(failures_shrink_to_their_cause),
    cmocka_unit_test(random_cases_are_right),
    cmocka_unit_test(random_cases_are_right_on_cuda),
  };
  if (argc > 1) return by_hand(argc, argv);
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
