// test_ledger.c: what a search stores and takes up again: when a pick is the answer, what becomes
// of it, and which samples are marked.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "ledger.h"
#include "scratch.h"

static const char *root;
static struct swathe_context *context;
static struct swathe_problem problem;

static int set_up(void **state)
{
  (void)state;
  if (!(root = scratch_make("ledger"))) return -1;
  const struct swathe_options options = { .cache = root, .threads = 1, .database = "" };
  swathe_problem_init(&problem);
  problem.window_left = 127;
  problem.ranks = 2;
  return swathe_open(&options, &context) ? -1 : 0;
}

static int tear_down(void **state)
{
  swathe_close(context);
  return scratch_remove(state);
}

// One session over the exchange's space: the default and two more.
struct book {
  struct sw_ledger ledger;
  struct sw_search search;
  struct swathe_tuned tuned;
  struct sw_db_environment environment;
};

static void open_book(struct book *book, const char *name, double budget_s, const char *generator)
{
  char path[96], config[SW_CONFIG_TEXT];
  struct sw_gen_walk *walk = NULL;
  *book = (struct book){
    .environment = { .isa = "a", .processor = "b", .threads = 1, .generator = generator }
  };
  book->ledger = (struct sw_ledger){ .context = context,
                                     .request = { &problem, sw_exchange_kernel, context->isa },
                                     .environment = &book->environment,
                                     .tuned = &book->tuned };
  snprintf(path, sizeof path, "%s/%s.db", root, name);
  assert_int_equal(sw_db_open(path, SW_DB_WRITE, &book->ledger.db), SWATHE_OK);
  assert_int_equal(sw_db_session_begin(book->ledger.db, "a test", budget_s, &book->ledger.session),
                   SWATHE_OK);
  assert_int_equal(sw_gen_default(context->gen, &book->ledger.request, config), SWATHE_OK);
  assert_int_equal(sw_ledger_add(&book->ledger, config), SWATHE_OK);
  assert_int_equal(sw_gen_walk_begin(context->gen, &book->ledger.request, false, &walk), SWATHE_OK);
  while (book->ledger.count < 3) {
    assert_int_equal(sw_gen_walk_next(walk, config), SWATHE_OK);
    assert_int_equal(sw_ledger_add(&book->ledger, config), SWATHE_OK);
  }
  sw_gen_walk_end(walk);
}

static void close_book(struct book *book)
{
  sw_db_close(book->ledger.db);
  sw_ledger_free(&book->ledger);
}

static void note(struct book *book, int64_t candidate, double ratio, int32_t noisy)
{
  struct sw_search_runs runs = { .candidate = candidate, .runs = 4, .noisy = noisy,
                                 .ratio = ratio };
  for (int i = 0; i < 4; i++) runs.us[i] = 100 * ratio, runs.beside_us[i] = 100;
  assert_int_equal(sw_ledger_note(&book->ledger, &runs), SWATHE_OK);
}

static void end(struct book *book, int64_t best, double ratio, bool noisy)
{
  book->search.best = best;
  book->search.best_ratio = ratio;
  book->search.default_us = 100;
  book->search.noisy = noisy;
  assert_int_equal(sw_ledger_end(&book->ledger, &book->search, SWATHE_OK), SWATHE_OK);
}

static bool is_done(struct book *book, double budget_s)
{
  bool done;
  assert_int_equal(sw_ledger_recall_pick(&book->ledger, budget_s, &done), SWATHE_OK);
  assert_int_equal(book->tuned.reused, done);
  book->tuned.reused = false;
  return done;
}

// A search that its budget ended is an answer to whoever would not give it more; one of other
// kernel texts, and one that had no time for anything beside the default, is none.
static void a_pick_answers_whoever_gives_no_more_time(void **state)
{
  struct book book;
  (void)state;
  open_book(&book, "budget", 5, "g");
  assert_false(is_done(&book, 1));
  note(&book, 0, 1, 0);
  end(&book, 0, 1, false);
  assert_false(is_done(&book, 1));
  note(&book, 1, 0.8, 0);
  end(&book, 1, 0.8, false);
  assert_true(is_done(&book, 1));
  assert_true(is_done(&book, 5));
  assert_string_equal(book.tuned.config, book.ledger.candidates[1].config);
  assert_false(is_done(&book, 6));
  assert_false(is_done(&book, INFINITY));
  close_book(&book);

  open_book(&book, "budget", 5, "other texts");
  assert_false(is_done(&book, 1));
  sw_ledger_start(&book.ledger, &book.search);
  assert_int_equal(book.search.holder, 1);  // but to be beaten by whoever is to replace it
  assert_false(book.search.holder_quiet);
  close_book(&book);
}

// What a session tried is known to the next, the default aside; a default is timed in each.
static void a_session_takes_up_the_last_ones_verdicts(void **state)
{
  struct book book;
  (void)state;
  open_book(&book, "resume", 5, "g");
  note(&book, 0, 1, 0);
  note(&book, 2, 0.9, 0);
  note(&book, 2, 0.8, 0);
  assert_int_equal(sw_ledger_put_failure(&book.ledger, 1, SW_VERDICT_WRONG, "why"), SWATHE_OK);
  assert_int_equal(book.tuned.tried, 3);
  assert_int_equal(book.tuned.rejected, 1);
  close_book(&book);

  open_book(&book, "resume", 5, "g");
  assert_int_equal(sw_ledger_recall(&book.ledger), SWATHE_OK);
  assert_int_equal(book.ledger.tried, 2);
  assert_int_equal(book.ledger.candidates[0].verdict, SW_VERDICT_UNTRIED);
  assert_int_equal(book.ledger.candidates[1].verdict, SW_VERDICT_WRONG);
  assert_int_equal(book.ledger.candidates[2].verdict, SW_VERDICT_OK);
  assert_true(book.ledger.candidates[2].ratio == 0.8);  // the newest
  assert_int_equal(book.tuned.tried, 0);
  close_book(&book);
}

struct seen {
  int samples, noisy;
};

static void see(void *arg, const struct swathe_sample *sample)
{
  struct seen *seen = arg;
  seen->samples++;
  seen->noisy += sample->noisy;
}

// B28: samples say whether most of their runs were disturbed; a pick of quiet ones is not replaced
// by what noise says of it, and until a search is over nothing replaces a finished pick.
static void noise_is_marked_and_replaces_nothing(void **state)
{
  struct book book;
  struct seen seen = { 0, 0 };
  (void)state;
  open_book(&book, "noise", 5, "g");
  note(&book, 0, 1, 2);
  note(&book, 1, 0.8, 0);
  end(&book, 1, 0.8, false);
  note(&book, 2, 0.7, 3);
  assert_int_equal(sw_db_samples(book.ledger.db, &problem, see, &seen), SWATHE_OK);
  assert_int_equal(seen.samples, 3);
  assert_int_equal(seen.noisy, 1);
  close_book(&book);

  open_book(&book, "noise", 10, "g");
  assert_false(is_done(&book, 10));
  sw_ledger_start(&book.ledger, &book.search);
  assert_int_equal(book.search.holder, 1);
  assert_true(book.search.holder_quiet);
  note(&book, 0, 1, 4);
  note(&book, 1, 0.5, 4);
  book.search.best = 2;
  assert_int_equal(sw_ledger_lead(&book.ledger, &book.search), SWATHE_OK);
  end(&book, 1, 0.5, true);
  assert_true(is_done(&book, 5));
  assert_true(book.ledger.held.ratio == 0.8);
  assert_string_equal(book.ledger.held.config, book.ledger.candidates[1].config);
  assert_false(is_done(&book, 10));  // so a search of its budget has yet to be
  close_book(&book);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(a_pick_answers_whoever_gives_no_more_time),
    cmocka_unit_test(a_session_takes_up_the_last_ones_verdicts),
    cmocka_unit_test(noise_is_marked_and_replaces_nothing),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
