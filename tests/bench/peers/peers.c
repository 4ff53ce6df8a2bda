// peers.c: swathe beside what else computes sliding-window attention on this machine: the same
// data in the same layout, in the same run.  Each peer is a process (see worker.h); within a case
// they take turns, one whole pass each, and the best pass counts, in CPU time.  Results are
// compared with attention in double on a few rows, and with swathe's everywhere; a peer that is
// wrong is called so and gets no ratio.
//
//   peers WORKERS [options]     WORKERS: the folder of the workers, which `run` builds
//   peers --help
#include <getopt.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "child.h"
#include "machine.h"
#include "oracle.h"

enum { PEERS = 12, MOST_VALUES = 16, START_LIMIT_S = 400, RUN_LIMIT_S = 300 };
enum task { FORWARD, BF16, BACKWARD, BACKWARD_BF16, TASKS };
static const char letters[TASKS + 1] = "fbgh";       // forward, bf16, gradients, half of their bits
static const char *const task_names[TASKS] = { "forward", "bf16", "backward", "backward-bf16" };
static const char *const task_titles[TASKS] = {
  "forward, fp32: useful GF/s (4 D flops per visible pair and head), and swathe over the peer",
  "forward, bf16: useful GF/s (4 D flops per visible pair and head), and swathe over the peer",
  "backward, fp32: useful GF/s (10 D flops per visible pair and head), and swathe over the peer",
  "backward, bf16: useful GF/s (10 D flops per visible pair and head), and swathe over the peer",
};

static struct peer {
  const char *name, *worker, *argument, *setting;   // setting: one variable of its environment
  const char *tasks;                                // letters of those it takes part in
  char words[TASKS][512];                           // what it said of itself, last
  bool present[TASKS];
  struct child child;
  double best_s, spent_s, error, distance;
  int runs;
  double log_sum[TASKS][2], least[TASKS][2];        // of ratios: window < 1024, >= 1024
  int ratios[TASKS][2];
} peers[PEERS] = {
  { .name = "swathe", .worker = "worker_swathe", .tasks = "fbgh" },
  { .name = "oneDNN", .worker = "worker_gemm", .argument = "libdnnl.so.2", .tasks = "f" },
  { .name = "oneDNN-2", .worker = "worker_gemm", .argument = "", .tasks = "f" },
  { .name = "OpenBLAS", .worker = "worker_gemm", .argument = "libopenblas.so.0", .tasks = "f",
    .setting = "-OPENBLAS_CORETYPE" },
  { .name = "O.BLAS-best", .worker = "worker_gemm", .argument = "libopenblas.so.0", .tasks = "f",
    .setting = "-OPENBLAS_CORETYPE" },
  { .name = "OpenBLAS-2", .worker = "worker_gemm", .argument = "", .tasks = "f",
    .setting = "-OPENBLAS_CORETYPE" },
  { .name = "ggml", .worker = "worker_ggml", .tasks = "f" },
  { .name = "torch-mask", .worker = "worker_torch.py", .argument = "mask", .tasks = "fb" },
  { .name = "torch-bmm", .worker = "worker_torch.py", .argument = "bmm", .tasks = "fbgh" },
  { .name = "torch-sdpa", .worker = "worker_torch.py", .argument = "sdpa", .tasks = "fbgh" },
  { .name = "torch-flex", .worker = "worker_torch.py", .argument = "flex", .tasks = "fbgh" },
};

static struct options {
  const char *workers;
  char directory[64];                 // data and results
  bool tasks[TASKS];
  long windows[MOST_VALUES], dims[MOST_VALUES], groups[MOST_VALUES];   // 0 ends
  long tokens, rounds, seconds;
  const char *only;                   // names of peers, or NULL: all
} options = {
  .windows = { 128, 1024, 4096 }, .dims = { 64, 128, 256 }, .groups = { 1, 8 },
  .tokens = 8192, .rounds = 7, .seconds = 5,
};

static const char help[] =
  "peers WORKERS [options]: swathe beside other sliding-window attention on this processor\n"
  "  --task LIST     of forward, bf16, backward,\n"
  "                  backward-bf16                       all\n"
  "  --window LIST   keys a query sees, its own included 128,1024,4096\n"
  "  --dim LIST      head dims                           64,128,256\n"
  "  --gqa LIST      query heads of a key head           1,8\n"
  "                  (1: 4 heads of each kind, else one key head)\n"
  "  --peers LIST    names as in the table; swathe always takes part\n"
  "  --tokens N      8192\n"
  "  --rounds N      passes of each peer at most, in turns                       7\n"
  "  --seconds S     a peer whose passes took this long, together, is done       5\n";

static void read_list(const char *text, long values[MOST_VALUES])
{
  char *end;
  for (int i = 0; i < MOST_VALUES - 1; i++, text = end + 1) {
    values[i] = strtol(text, &end, 10);
    values[i + 1] = 0;
    if (values[i] < 1 || (*end && *end != ',')) {
      fprintf(stderr, "a list of numbers was expected, not \"%s\"\n", text);
      exit(2);
    }
    if (!*end) return;
  }
}

// Is `name` one of the words of a list?
static bool lists(const char *list, const char *name)
{
  const size_t length = strlen(name);
  for (const char *at = list; (at = strstr(at, name)); at += length)
    if ((at == list || at[-1] == ',') && (!at[length] || at[length] == ',')) return true;
  return false;
}

static void read_options(int argc, char **argv)
{
  static const struct option known[] = {
    { "task", 1, 0, 't' }, { "window", 1, 0, 'w' }, { "dim", 1, 0, 'd' }, { "gqa", 1, 0, 'g' },
    { "peers", 1, 0, 'p' }, { "tokens", 1, 0, 'n' }, { "rounds", 1, 0, 'r' },
    { "seconds", 1, 0, 's' }, { "help", 0, 0, 'h' }, { 0, 0, 0, 0 } };
  bool chosen = false;
  for (int letter; (letter = getopt_long(argc, argv, "", known, NULL)) != -1;) {
    long one[MOST_VALUES] = { 0 };
    switch (letter) {
      case 't':
        chosen = true;
        for (int t = 0; t < TASKS; t++) options.tasks[t] |= lists(optarg, task_names[t]);
        break;
      case 'w': read_list(optarg, options.windows); break;
      case 'd': read_list(optarg, options.dims); break;
      case 'g': read_list(optarg, options.groups); break;
      case 'p': options.only = optarg; break;
      case 'n': read_list(optarg, one); options.tokens = one[0]; break;
      case 'r': read_list(optarg, one); options.rounds = one[0]; break;
      case 's': read_list(optarg, one); options.seconds = one[0]; break;
      case 'h': fputs(help, stdout); exit(0);
      default: fputs(help, stderr); exit(2);
    }
  }
  if (optind + 1 != argc) {
    fputs(help, stderr);
    exit(2);
  }
  options.workers = argv[optind];
  for (int t = 0; t < TASKS && !chosen; t++) options.tasks[t] = true;
}

// Every worker gets these: one thread, swathe's kernels in the run's own cache, memory kept by
// malloc between passes rather than mapped anew (what PyTorch gains most from; the others
// allocate nothing).
static bool start(struct child *child, const struct peer *peer, char *const *arguments)
{
  char cache[96];
  const char *settings[] = { "OMP_NUM_THREADS=1", "OPENBLAS_NUM_THREADS=1", "MKL_NUM_THREADS=1",
                             "MALLOC_MMAP_MAX_=0", "MALLOC_TRIM_THRESHOLD_=68719476736", cache,
                             peer->setting, NULL };
  snprintf(cache, sizeof cache, "SWATHE_CACHE_DIR=%s/cache", options.directory);
  return child_start(child, arguments, settings);
}

static void worker_path(const struct peer *peer, char path[512])
{
  snprintf(path, 512, "%s/%s", options.workers, peer->worker);
}

// Libraries named by the environment, and the core type with which OpenBLAS multiplies fastest.
// A type that the processor is not is quietly replaced by another, which OpenBLAS then names: such
// a probe is no news of the type that was asked for.
static void choose_libraries(void)
{
  static const struct { const char *peer, *variable; } named[] = {
    { "oneDNN", "PEERS_ONEDNN" }, { "oneDNN-2", "PEERS_ONEDNN_2" },
    { "OpenBLAS", "PEERS_OPENBLAS" },
    { "O.BLAS-best", "PEERS_OPENBLAS" }, { "OpenBLAS-2", "PEERS_OPENBLAS_2" } };
  static const char *const types[] = {
    "OPENBLAS_CORETYPE=Haswell", "OPENBLAS_CORETYPE=Zen", "OPENBLAS_CORETYPE=SkylakeX",
    "OPENBLAS_CORETYPE=Cooperlake", "OPENBLAS_CORETYPE=SapphireRapids" };
  double best = 0;
  for (size_t i = 0; i < sizeof named / sizeof *named; i++)
    for (struct peer *peer = peers; peer < peers + PEERS; peer++)
      if (peer->name && !strcmp(peer->name, named[i].peer) && getenv(named[i].variable))
        peer->argument = getenv(named[i].variable);
  for (struct peer *peer = peers; peer < peers + PEERS; peer++) {
    if (!peer->name || strcmp(peer->name, "O.BLAS-best")) continue;
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
      char path[512], *arguments[] = { path, "probe", (char *)(uintptr_t)peer->argument, NULL };
      struct peer tried = { .setting = types[i] };
      worker_path(peer, path);
      if (!start(&tried.child, &tried, arguments)) continue;
      if (child_ask(&tried.child, NULL, 60) && atof(tried.child.words) > best &&
          strstr(tried.child.words, strchr(types[i], '=') + 1)) {
        best = atof(tried.child.words);
        peer->setting = types[i];
      }
      child_stop(&tried.child);
    }
  }
}

static bool takes_part(const struct peer *peer, enum task task)
{
  if (!peer->name || !strchr(peer->tasks, letters[task])) return false;
  if (!options.only || peer == peers) return true;
  return lists(options.only, peer->name);
}

static void enter(struct peer *peer, enum task task, const struct peers_case *given)
{
  char path[512], data[96], results[96], numbers[5][24];
  const long long values[5] = {
    given->tokens, given->window, given->dim, given->q_heads, given->kv_heads };
  const char *python = getenv("PEERS_PYTHON") ? getenv("PEERS_PYTHON") : "python3";
  char *arguments[16] = { 0 };
  int count = 0;
  peer->best_s = INFINITY, peer->spent_s = 0, peer->runs = 0;
  worker_path(peer, path);
  if (access(path, R_OK)) {
    snprintf(peer->words[task], sizeof peer->words[task], "absent: was not built here");
    return;
  }
  if (strstr(peer->worker, ".py")) arguments[count++] = (char *)(uintptr_t)python;
  arguments[count++] = path;
  arguments[count++] = given->backward ? "backward" : "forward";
  arguments[count++] = given->bf16 ? "bf16" : "f32";
  for (int i = 0; i < 5; i++) {
    snprintf(numbers[i], sizeof numbers[i], "%lld", values[i]);
    arguments[count++] = numbers[i];
  }
  snprintf(data, sizeof data, "%s/data", options.directory);
  snprintf(results, sizeof results, "%s/results", options.directory);
  arguments[count++] = data;
  arguments[count++] = results;
  arguments[count++] = (char *)(uintptr_t)peer->argument;
  const bool started =
    start(&peer->child, peer, arguments) && child_ask(&peer->child, NULL, START_LIMIT_S);
  const bool ready = started && !strncmp(peer->child.words, "ready ", 6);
  if (ready) peer->present[task] = true;
  else child_stop(&peer->child);
  const char *after = started ? strchr(peer->child.words, ' ') : NULL;
  if (ready || !peer->present[task])
    snprintf(peer->words[task], sizeof peer->words[task], "%s%s", ready ? "" : "absent: ",
             after ? after + 1 : peer->child.words);
}

static void take_turns(double *peak)
{
  for (long round = 0; round < options.rounds; round++) {
    const double now = machine_peak_gflops();
    if (now > *peak) *peak = now;
    for (struct peer *peer = peers; peer < peers + PEERS; peer++) {
      if (!peer->child.process || peer->spent_s > (double)options.seconds) continue;
      if (!child_ask(&peer->child, "run\n", RUN_LIMIT_S)) {
        child_stop(&peer->child);
        continue;
      }
      const double seconds = atof(peer->child.words);
      if (seconds < peer->best_s) peer->best_s = seconds;
      peer->spent_s += seconds;
      peer->runs++;
    }
  }
}

// Results of the last pass, or NULL.  free() them.
static float *fetch(struct peer *peer, const struct peers_case *given)
{
  char path[96];
  const size_t count = oracle_result_count(given);
  float *results = malloc(count * sizeof *results);
  snprintf(path, sizeof path, "%s/results", options.directory);
  if (results && child_ask(&peer->child, "save\n", RUN_LIMIT_S)) {
    FILE *file = fopen(path, "rb");
    const size_t read = file ? fread(results, sizeof *results, count, file) : 0;
    if (file) fclose(file);
    unlink(path);
    if (read == count) return results;
  }
  free(results);
  return NULL;
}

static void compare(const struct peers_case *given, const float *data)
{
  float *ours = NULL;
  for (struct peer *peer = peers; peer < peers + PEERS; peer++) {
    peer->error = peer->distance = INFINITY;
    if (!peer->child.process) continue;
    float *results = fetch(peer, given);
    if (!results) continue;
    peer->error = oracle_error(given, data, results);
    peer->distance = ours ? oracle_distance(given, results, ours) : 0;
    if (peer == peers) ours = results;
    else free(results);
  }
  free(ours);
}

static void print_result(struct peer *peer, enum task task, const struct peers_case *given,
                         double flops)
{
  // bf16: 2^-8 of rounding each way, and weights rounded before the second product
  const double limit = given->bf16 ? 2e-2 : 2e-4;
  const int wide = given->window >= 1024;
  const bool wrong = !(peer->error <= limit) || !(peer->distance <= 2 * limit);
  char text[32] = "-";
  const double ratio = peer->best_s / peers[0].best_s;
  if (peer->runs && wrong) {
    snprintf(text, sizeof text, "WRONG %.0e", fmax(peer->error, peer->distance));
  } else if (peer->runs) {
    snprintf(text, sizeof text, "%.1f %5.2f", flops / peer->best_s * 1e-9, ratio);
    if (!peer->ratios[task][wide] || ratio < peer->least[task][wide])
      peer->least[task][wide] = ratio;
    peer->log_sum[task][wide] += log(ratio);
    peer->ratios[task][wide]++;
  }
  printf(" %13s", text);
}

static bool measure(enum task task, const struct peers_case *given)
{
  const size_t count = 2 * oracle_q_count(given) + 2 * oracle_kv_count(given);
  const double flops = oracle_pairs(given) * given->dim * (given->backward ? 10 : 4);
  char path[96];
  double peak = 0;
  float *data = oracle_data(given);
  snprintf(path, sizeof path, "%s/data", options.directory);
  FILE *file = fopen(path, "wb");
  const bool written = data && file && fwrite(data, sizeof *data, count, file) == count;
  if (file && fclose(file)) return false;
  if (!written) return false;
  for (struct peer *peer = peers; peer < peers + PEERS; peer++) {
    peer->child.process = 0;
    if (takes_part(peer, task)) enter(peer, task, given);
  }
  take_turns(&peak);
  compare(given, data);
  free(data);
  if (!peers[0].child.process) {
    printf("swathe failed: %s\n", peers[0].words[task]);
    return false;
  }
  printf("%5lld %4d %3d %6.1f %4.2f", (long long)given->window, given->dim,
         given->q_heads / given->kv_heads, peak, flops / peers[0].best_s * 1e-9 / peak);
  for (struct peer *peer = peers; peer < peers + PEERS; peer++)
    if (takes_part(peer, task)) print_result(peer, task, given, flops);
  printf("   runs");
  for (struct peer *peer = peers; peer < peers + PEERS; peer++) {
    if (takes_part(peer, task)) printf(" %d", peer->runs);
    child_stop(&peer->child);
  }
  putchar('\n');
  fflush(stdout);
  return true;
}

static void summarise(enum task task)
{
  static const char *const widths[2] = { "window < 1024", "window >= 1024" };
  putchar('\n');
  for (struct peer *peer = peers; peer < peers + PEERS; peer++) {
    if (!takes_part(peer, task)) continue;
    printf("  %-12s", peer->name);
    for (int wide = 0; wide < 2 && peer > peers; wide++)
      if (peer->ratios[task][wide])
        printf("%s: least %.2f, mean %.2f;  ", widths[wide], peer->least[task][wide],
               exp(peer->log_sum[task][wide] / peer->ratios[task][wide]));
    printf("%s%s%s\n", peer->words[task], peer->setting && *peer->setting != '-' ? ", " : "",
           peer->setting && *peer->setting != '-' ? peer->setting : "");
  }
  putchar('\n');
}

static bool print_table(enum task task)
{
  printf("%s\n%5s %4s %3s %6s %4s", task_titles[task], "W", "D", "GQA", "peak", "of");
  for (struct peer *peer = peers; peer < peers + PEERS; peer++)
    if (takes_part(peer, task)) printf(" %13s", peer->name);
  putchar('\n');
  fflush(stdout);
  for (const long *window = options.windows; *window; window++)
    for (const long *dim = options.dims; *dim; dim++)
      for (const long *group = options.groups; *group; group++) {
        const struct peers_case given = {
          .backward = task == BACKWARD || task == BACKWARD_BF16,
          .bf16 = task == BF16 || task == BACKWARD_BF16,
          .tokens = options.tokens, .window = *window, .dim = (int)*dim,
          .q_heads = *group == 1 ? 4 : (int)*group, .kv_heads = *group == 1 ? 4 : 1 };
        if (!measure(task, &given)) return false;
      }
  summarise(task);
  return true;
}

int main(int argc, char **argv)
{
  bool fine = true;
  read_options(argc, argv);
  snprintf(options.directory, sizeof options.directory, "%s/swathe_peers_XXXXXX",
           access("/dev/shm", W_OK | X_OK) ? "/tmp" : "/dev/shm");
  if (!mkdtemp(options.directory)) {
    perror(options.directory);
    return 1;
  }
  machine_print();
  choose_libraries();
  printf("%ld tokens, one thread, best of at most %ld passes in turns, CPU time\n"
         "peak: Gflop/s of fp32 multiply-adds; of: swathe's share of that\n\n",
         options.tokens, options.rounds);
  for (enum task task = FORWARD; task < TASKS && fine; task++)
    if (options.tasks[task]) fine = print_table(task);
  char *const clean[] = { "rm", "-rf", options.directory, NULL };
  struct child remover;
  const char *const nothing[] = { NULL };
  if (child_start(&remover, clean, nothing)) child_ask(&remover, NULL, 20);
  child_stop(&remover);
  machine_print();
  return !fine;
}
