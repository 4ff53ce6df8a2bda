// bench_lookup.c: what a layer pays for asking a tuning database of 10 000 picks.
//
//   bench_lookup [PICKS]
//
// Times are of the thread's CPU, the best of several rounds.  find: one answer taken (exact,
// nearest), or all of a family walked; open + find: what a process pays once.
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "../../tuning_db/db.h"

static const struct sw_db_environment here = { "avx512", "A processor", 16, "0123456789abcdef" };

static double cpu_us(void)
{
  struct timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return 1e6 * (double)now.tv_sec + 1e-3 * (double)now.tv_nsec;
}

static void check(enum swathe_status status)
{
  if (!status) return;
  fprintf(stderr, "%s\n", swathe_error());
  exit(1);
}

// Pick i: families of 100 problems (10 shares x 10 numbers of ranks) each.
static struct swathe_problem problem_of(int i)
{
  struct swathe_problem problem;
  swathe_problem_init(&problem);
  problem.window_left = i / 100;
  problem.tokens_per_rank = 512LL << i / 10 % 10;
  problem.ranks = 1 << i % 10;
  return problem;
}

static void fill(const char *path, int picks)
{
  struct sw_db *db;
  int64_t session;
  check(sw_db_open(path, SW_DB_WRITE, &db));
  check(sw_db_session_begin(db, "bench_lookup", 0, &session));
  for (int i = 0; i < picks; i++) {
    const struct swathe_problem problem = problem_of(i);
    const struct sw_db_row row = { &problem, "forward", &here,
                                   "tile_q=16,tile_k=64,pack=8,unroll=4,slots=2" };
    const struct sw_db_pick pick = { 80, 100, 0.8, .complete = true };
    check(sw_db_put_pick(db, session, &row, &pick));
  }
  sw_db_close(db);
}

struct answers {
  int most, seen;
};

static bool take(void *arg, const struct sw_db_found *found)
{
  struct answers *answers = arg;
  (void)found;
  return ++answers->seen < answers->most;
}

// Mean microseconds of a question among `questions` spread over the database; best of 5 rounds.
static double find_us(struct sw_db *db, int picks, bool stored, int most, int *seen)
{
  enum { QUESTIONS = 100, ROUNDS = 5 };
  double best = 1e30;
  for (int round = 0; round < ROUNDS; round++) {
    struct answers answers = { most, 0 };
    const double begin = cpu_us();
    for (int i = 0; i < QUESTIONS; i++) {
      struct swathe_problem problem = problem_of((int)((int64_t)i * picks / QUESTIONS));
      if (!stored) problem.tokens_per_rank += 17;
      answers.seen = 0;
      check(sw_db_find(db, &problem, "forward", &here, take, &answers));
    }
    const double mean = (cpu_us() - begin) / QUESTIONS;
    if (mean < best) best = mean;
    *seen = answers.seen;
  }
  return best;
}

static double open_and_find_us(const char *path)
{
  double best = 1e30;
  for (int round = 0; round < 20; round++) {
    struct sw_db *db;
    struct answers answers = { 1, 0 };
    const struct swathe_problem problem = problem_of(50);
    const double begin = cpu_us();
    check(sw_db_open(path, SW_DB_READ, &db));
    check(sw_db_find(db, &problem, "forward", &here, take, &answers));
    const double took = cpu_us() - begin;
    sw_db_close(db);
    if (took < best) best = took;
  }
  return best;
}

int main(int argc, char **argv)
{
  const int picks = argc > 1 ? atoi(argv[1]) : 10000;
  // In memory if there is such a place: each put of the filling waits for the disk otherwise.
  char in_memory[] = "/dev/shm/bench_lookup_XXXXXX", on_disk[] = "/tmp/bench_lookup_XXXXXX",
       side[64];
  char *path = access("/dev/shm", W_OK | X_OK) ? on_disk : in_memory;
  struct sw_db *db;
  int seen = 0;

  close(mkstemp(path));
  fill(path, picks);
  check(sw_db_open(path, SW_DB_READ, &db));
  printf("picks                  %10d\n", picks);
  printf("find, exact            %10.1f us\n", find_us(db, picks, true, 1, &seen));
  printf("find, nearest          %10.1f us\n", find_us(db, picks, false, 1, &seen));
  printf("find, whole family     %10.1f us", find_us(db, picks, false, 1 << 30, &seen));
  printf("   %d answers\n", seen);
  sw_db_close(db);
  printf("open + find            %10.1f us\n", open_and_find_us(path));
  unlink(path);
  for (int i = 0; i < 2; i++) {
    snprintf(side, sizeof side, "%s%s", path, i ? "-shm" : "-wal");
    unlink(side);
  }
  return 0;
}
