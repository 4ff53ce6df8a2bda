// rank.c: one rank of the tests of the mpi transport; scripts/test-mpi starts it.
//
//   mpirun -n RANKS test_mpi_rank CASE RANKS [PLUGIN]
//
// Rank 1 is the one that misbehaves.  Prints a line per rank: `rank R: ok`, or what was wrong; the
// exit status says the same.  A case of faults ends well when every other rank gets the named
// error within the deadline, and the process goes on.
#include "../exchange.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { LARGE_BYTES = 3 << 20, SMALL_BYTES = 100 };
static const double deadline_s = 2;

static double now_s(void)
{
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

struct run {
  struct swathe_transport *transport;
  int rank, ranks;
  char *in, *out;  // LARGE_BYTES each, and as many behind them
  enum swathe_status status;
  char words[2048];  // of the status
  double seconds;    // until it was known
  char wrong[4096];  // "" or what was wrong
};

static void wrong(struct run *run, const char *what)
{
  if (!*run->wrong) snprintf(run->wrong, sizeof run->wrong, "%s", what);
}

static void took(struct run *run, enum swathe_status status, double begin_s)
{
  run->status = status;
  run->seconds = now_s() - begin_s;
  if (status) snprintf(run->words, sizeof run->words, "%s", swathe_error());
}

// Sends to the next rank and receives from the one before.
static enum swathe_status ring(struct run *run, size_t sent, size_t expected)
{
  const int next = (run->rank + 1) % run->ranks,
            previous = (run->rank + run->ranks - 1) % run->ranks;
  const struct swathe_transfer transfers[] = { { run->in, expected, previous, false },
                                               { run->out, sent, next, true } };
  return swathe_transport_exchange(run->transport, transfers, 2);
}

static void expect(struct run *run, enum swathe_status status, const char *part)
{
  char what[4096];
  if (run->status == status && strstr(run->words, part)) return;
  snprintf(what, sizeof what, "expected '%s' and \"%s\", got '%s': %s", swathe_status_text(status),
           part, swathe_status_text(run->status), run->words);
  wrong(run, what);
}

// Any failure that names rank 1, in time, and stays.
static void expect_rank_1_named(struct run *run)
{
  char byte = 0;
  if (run->status != SWATHE_TIMEOUT && run->status != SWATHE_TRANSPORT &&
      run->status != SWATHE_DISAGREE)
    expect(run, SWATHE_TIMEOUT, "rank 1");
  else expect(run, run->status, "rank 1");
  if (run->seconds > deadline_s + 2) wrong(run, "it took longer than the deadline allows");
  if (swathe_transport_gather(run->transport, &byte, 0, NULL) != run->status)
    wrong(run, "the failure did not stay");
}

// ---- Cases -------------------------------------------------------------------------------------

static void messages(struct run *run)
{
  for (uint64_t seed = 0; seed < 8 && !*run->wrong; seed++)
    exchange_randomly(run->transport, exchange_mix(seed), run->wrong, sizeof run->wrong);
}

static void thread(struct run *run)
{
  const enum swathe_status status =
      run->transport->operations->progress_thread(run->transport, 100);
  if (status) wrong(run, swathe_error());
  const double begin_s = now_s();
  // without a call of this rank, the helper alone gets them done
  const int next = (run->rank + 1) % run->ranks,
            previous = (run->rank + run->ranks - 1) % run->ranks;
  const struct sw_transport_message both[] = {
    { run->in, LARGE_BYTES, previous, false, NULL }, { run->out, LARGE_BYTES, next, true, NULL }
  };
  memset(run->out, 1 + run->rank, LARGE_BYTES);
  if (run->transport->operations->post(run->transport, both, 2)) wrong(run, swathe_error());
  const volatile char *last = run->in + LARGE_BYTES - 1;
  while (*last != 1 + previous && now_s() < begin_s + 10) usleep(1000);
  if (*last != 1 + previous) wrong(run, "the helper did not get the message done");
  if (run->transport->operations->wait(run->transport)) wrong(run, swathe_error());
  messages(run);
  if (run->transport->operations->progress_thread(run->transport, 0)) wrong(run, swathe_error());
  messages(run);
}

static void absent(struct run *run)
{
  const double begin_s = now_s();
  if (run->rank == 1) {
    usleep((useconds_t)(1e6 * deadline_s) + 500000);
    return;
  }
  took(run, ring(run, LARGE_BYTES, LARGE_BYTES), begin_s);
  expect_rank_1_named(run);
}

static void other_size(struct run *run)
{
  const double begin_s = now_s();
  memset(run->in, 0x77, 2 * LARGE_BYTES);
  const size_t sent = run->rank == 1 ? 2 * (size_t)LARGE_BYTES : LARGE_BYTES;
  took(run, ring(run, sent, LARGE_BYTES), begin_s);
  for (int i = LARGE_BYTES; i < 2 * LARGE_BYTES; i++)
    if (run->in[i] != 0x77) wrong(run, "bytes were written past the end of the buffer");
  if (run->rank == 1 || run->rank == 2 % run->ranks) {
    expect(run, SWATHE_DISAGREE, "rank 1 sends 6291456 bytes to rank");
    if (run->seconds > 1) wrong(run, "it took as long as a deadline");
  } else if (run->status) {
    expect_rank_1_named(run);
  }
}

static void small_other_size(struct run *run)
{
  const double begin_s = now_s();
  took(run, ring(run, SMALL_BYTES, run->rank == 1 ? SMALL_BYTES - 1 : SMALL_BYTES), begin_s);
  if (run->rank == 1) expect(run, SWATHE_DISAGREE, "rank 0 sends 100 bytes to rank 1");
  else if (run->status) expect_rank_1_named(run);
}

static void gather_other_size(struct run *run)
{
  const double begin_s = now_s();
  char mine[8] = { 0 }, all[8 * 64];
  took(run, swathe_transport_gather(run->transport, mine, run->rank == 1 ? 7 : 8, all), begin_s);
  if (run->status != SWATHE_TRANSPORT && run->status != SWATHE_DISAGREE)
    expect(run, SWATHE_DISAGREE, "gathers 7");
}

static void gather_absent(struct run *run)
{
  const double begin_s = now_s();
  char mine = 0, all[64];
  if (run->rank == 1) {
    usleep((useconds_t)(1e6 * deadline_s) + 500000);
    return;
  }
  took(run, swathe_transport_gather(run->transport, &mine, 1, all), begin_s);
  expect_rank_1_named(run);
}

static void gives_up(struct run *run)
{
  const double begin_s = now_s();
  if (run->rank == 1) {
    swathe_transport_abort(run->transport, "the dog ate it");
    took(run, ring(run, LARGE_BYTES, LARGE_BYTES), begin_s);
    expect(run, SWATHE_TRANSPORT, "the dog ate it");
    return;
  }
  took(run, ring(run, LARGE_BYTES, LARGE_BYTES), begin_s);
  expect(run, SWATHE_TRANSPORT, "the dog ate it");
  if (run->seconds > 1.5) wrong(run, "it took as long as a deadline");
}

// Rank 1 dies while its messages are under way.
static void dies(struct run *run)
{
  double begin_s = now_s();
  for (int i = 0; i < 4; i++)
    if (ring(run, LARGE_BYTES, LARGE_BYTES)) wrong(run, swathe_error());
  if (run->rank == 1) {
    const struct sw_transport_message both[] = {
      { run->in, LARGE_BYTES, 0, false, NULL },
      { run->out, LARGE_BYTES, 2 % run->ranks, true, NULL },
    };
    bool done = false;
    run->transport->operations->post(run->transport, both, 2);
    run->transport->operations->test(run->transport, &done);
    raise(SIGKILL);
  }
  begin_s = now_s();
  enum swathe_status status = SWATHE_OK;
  for (int i = 0; i < 3 && !status; i++) status = ring(run, LARGE_BYTES, LARGE_BYTES);
  took(run, status, begin_s);
  expect_rank_1_named(run);
}

static void stops(struct run *run)
{
  const double begin_s = now_s();
  if (run->rank == 1) {
    sleep(6);  // a host that hangs
    return;
  }
  took(run, ring(run, LARGE_BYTES, LARGE_BYTES), begin_s);
  expect_rank_1_named(run);
}

static const struct {
  const char *name;
  void (*run)(struct run *run);
  bool fails;  // afterwards the transport is unusable
} cases[] = {
  { "messages", messages, false },
  { "thread", thread, false },
  { "absent", absent, true },
  { "other-size", other_size, true },
  { "small-other-size", small_other_size, true },
  { "gather-other-size", gather_other_size, true },
  { "gather-absent", gather_absent, true },
  { "gives-up", gives_up, true },
  { "dies", dies, true },
  { "stops", stops, true },
};

static int play(struct run *run, const char *name)
{
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    if (!strcmp(cases[i].name, name)) {
      cases[i].run(run);
      const bool kept = run->transport->holds_memory;
      swathe_transport_destroy(run->transport);
      if (!kept) {
        free(run->in);
        free(run->out);
      }
      if (*run->wrong) fprintf(stderr, "rank %d: %s\n", run->rank, run->wrong);
      else
        printf("rank %d: ok%s%s\n", run->rank, run->status ? " after: " : "",
               run->status ? run->words : "");
      return *run->wrong != 0;
    }
  fprintf(stderr, "there is no case '%s'\n", name);
  return 2;
}

int main(int argc, char **argv)
{
  static struct run run;
  if (argc < 3) return 2;
  alarm(60);  // the watchdog
  const enum swathe_status status =
      swathe_mpi_create(NULL, argc > 3 ? argv[3] : NULL, atoi(argv[2]), deadline_s, &run.transport);
  if (status) {
    fprintf(stderr, "%s: %s\n", swathe_status_text(status), swathe_error());
    return 3;
  }
  run.rank = swathe_transport_rank(run.transport);
  run.ranks = swathe_transport_ranks(run.transport);
  run.in = calloc(2, LARGE_BYTES);
  run.out = calloc(2, LARGE_BYTES);
  return play(&run, argv[1]);
}
