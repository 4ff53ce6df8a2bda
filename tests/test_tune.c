// test_tune.c: the tuner against candidates that are wrong, crash, hang or do not compile;
// stopping, resuming, and being killed at any moment.
//
// The candidates come from the real generator with one more knob, `sabotage`, whose values spoil
// the forward kernel in one way each.  Every other knob keeps its default, so that a search is
// short.
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "lease.h"
#include "scratch.h"
#include "trial_tensors.h"

enum { WRONG = 1, CRASH, HANG, NO_COMPILE, SKIPS_TAIL, SLOW, GREEDY, EXITS, WAYS };

static const char *root;
static char generator[64];

static void write_file(const char *name, const char *mode, const char *text)
{
  char path[128];
  snprintf(path, sizeof path, "%s/%s", generator, name);
  FILE *file = fopen(path, mode);
  assert_non_null(file);
  assert_true(fputs(text, file) >= 0);
  assert_int_equal(fclose(file), 0);
}

// Every knob at its default, and the spoiling ones beside it.
static const char spaces[] =
    "local spaces = require 'spaces_real'\n"
    "for _, space in pairs(spaces.cpu) do\n"
    "  local default, knobs = space.default, {}\n"
    "  for i, knob in ipairs(space.tune) do knobs[i] = knob[1] end\n"
    "  table.insert(space.require, { 'only the default', function(c)\n"
    "    local wanted = default(c)\n"
    "    for _, name in ipairs(knobs) do if c[name] ~= wanted[name] then return false end end\n"
    "    return true\n"
    "  end })\n"
    "  table.insert(space.tune, { 'sabotage', { 0, 1, 2, 3, 4, 5, 6, 7, 8 }, 'how the kernel is "
    "spoilt' })\n"
    "  space.default = function(c) local d = default(c); d.sabotage = 0; return d end\n"
    "end\n"
    "return spaces\n";

static const char spoilt[] =
    "\n//@ if SABOTAGE ~= 0 then\n"
    "#undef forward\n"
    "#undef forward_workspace\n"
    "void _exit(int);\n"
    "void forward(const struct sw_attention_args *args, sw_int64 begin, sw_int64 end, void "
    "*workspace)\n"
    "{\n"
    "  if (SABOTAGE == 2) *(volatile int *)0 = 1;\n"
    "  if (SABOTAGE == 8) _exit(137);\n"
    "  while (SABOTAGE == 3) *(volatile char *)workspace = 1;\n"
    "//@ if SABOTAGE == 4 then\n"
    "  this does not compile;\n"
    "//@ end\n"
    "  if (SABOTAGE == 5 && begin == 0 && end == 1) return;\n"
    "  for (int i = 0; i < (SABOTAGE == 6 ? 3 : 1); i++) forward_real(args, begin, end, "
    "workspace);\n"
    "  if (SABOTAGE == 1) *(float *)args->lse.data += 1;\n"
    "}\n"
    "sw_int64 forward_workspace(sw_int64 max_keys)\n"
    "{\n"
    "  return forward_workspace_real(max_keys) + (SABOTAGE == 7 ? 1 << 30 : 0);\n"
    "}\n"
    "//@ end\n";

static int set_up(void **state)
{
  const char *source = getenv("TEST_SOURCE_DIR");
  (void)state;
  if (!source || !(root = scratch_make("tune"))) return -1;
  snprintf(generator, sizeof generator, "%s/gen", root);
  scratch_shell("mkdir %s && cp -r '%s/generator' '%s/templates' %s", generator, source, source,
                generator);
  scratch_shell("mv %s/generator/spaces.lua %s/generator/spaces_real.lua", generator, generator);
  write_file("generator/spaces.lua", "w", spaces);
  write_file("templates/cpu/renamed", "w",
             "//@ if SABOTAGE ~= 0 then\n#define forward forward_real\n"
             "#define forward_workspace forward_workspace_real\n//@ end\n");
  scratch_shell("cd %s/templates/cpu && cat renamed forward.c > spoilt && mv spoilt forward.c",
                generator);
  write_file("templates/cpu/forward.c", "a", spoilt);
  return 0;
}

static struct swathe_context *open_context(const char *database)
{
  char cache[64], path[96];
  struct swathe_context *context = NULL;
  snprintf(cache, sizeof cache, "%s/cache", root);
  snprintf(path, sizeof path, "%s/%s", root, database);
  const struct swathe_options options = {
    .database = path, .cache = cache, .threads = 1, .generator = generator
  };
  if (swathe_open(&options, &context)) fail_msg("%s", swathe_error());
  return context;
}

static struct swathe_problem small_problem(void)
{
  struct swathe_problem problem;
  swathe_problem_init(&problem);
  assert_int_equal(swathe_problem_parse("q_heads=2,kv_heads=1,head_dim_qk=16,head_dim_v=16,"
                                        "window_left=15,tokens_per_rank=256,ranks=2,sinks=1",
                                        &problem),
                   SWATHE_OK);
  return problem;
}

// ---- Verdicts ---------------------------------------------------------------------------------

struct verdicts {
  char of[WAYS][16], words[WAYS][256];
  int64_t samples;
};

static void note_verdict(void *arg, const struct swathe_sample *sample)
{
  struct verdicts *verdicts = arg;
  const char *knob = strstr(sample->config, "sabotage=");
  assert_non_null(knob);
  const int way = knob[9] - '0';
  assert_in_range(way, 0, WAYS - 1);
  verdicts->samples++;
  snprintf(verdicts->of[way], sizeof verdicts->of[way], "%s", sample->verdict);
  snprintf(verdicts->words[way], sizeof verdicts->words[way], "%s", sample->words);
}

// B15, B30, B31
static void spoilt_candidates_never_win(void **state)
{
  const struct swathe_problem problem = small_problem();
  const struct swathe_tune_options options = {
    .budget_s = 300, .trial_s = 2, .memory_bytes = 512 << 20, .forward = true
  };
  struct swathe_context *context = open_context("verdicts.db");
  struct verdicts verdicts = { .samples = 0 };
  struct swathe_tuned tuned[2];
  char config[512], why[512];
  (void)state;

  if (swathe_tune(context, &problem, &options, tuned)) fail_msg("%s", swathe_error());
  assert_int_equal(swathe_db_show(context, &problem, note_verdict, &verdicts), SWATHE_OK);
  assert_string_equal(verdicts.of[0], "ok");
  assert_string_equal(verdicts.of[WRONG], "wrong");
  assert_non_null(strstr(verdicts.words[WRONG], "lse of token 0"));
  assert_string_equal(verdicts.of[CRASH], "crash");
  assert_non_null(strstr(verdicts.words[CRASH], "signal 11"));
  assert_string_equal(verdicts.of[EXITS], "crash");
  assert_string_equal(verdicts.of[HANG], "timeout");
  assert_string_equal(verdicts.of[NO_COMPILE], "compile");
  assert_non_null(strstr(verdicts.words[NO_COMPILE], "templates/cpu/forward.c:"));
  assert_string_equal(verdicts.of[SKIPS_TAIL], "wrong");
  assert_string_equal(verdicts.of[SLOW], "ok");
  assert_string_equal(verdicts.of[GREEDY], "oom");
  assert_non_null(strstr(verdicts.words[GREEDY], "workspace"));
  assert_int_equal(tuned[0].rejected, 2);
  assert_int_equal(tuned[0].failed, 5);
  assert_non_null(strstr(tuned[0].config, "sabotage=0"));
  assert_true(tuned[0].default_us > 0);
  const double share = tuned[0].limit_share;
  assert_true(share > 0 && share < 2);  // of a peak that was measured at another moment

  // a layer finds it; a second tuning finds it and measures nothing
  assert_int_equal(
      swathe_db_best(context, &problem, SWATHE_FORWARD, config, sizeof config, why, sizeof why),
      SWATHE_OK);
  assert_string_equal(config, tuned[0].config);
  assert_non_null(strstr(why, "exact pick"));
  if (swathe_tune(context, &problem, &options, tuned)) fail_msg("%s", swathe_error());
  assert_true(tuned[0].reused);
  assert_int_equal(tuned[0].tried, 0);
  assert_true(tuned[0].limit_share > 0.999 * share && tuned[0].limit_share < 1.001 * share);
  swathe_close(context);
}

// B39: another process, through the public face, finds what was tuned here.
static void a_fresh_process_finds_what_was_tuned(void **state)
{
  const struct swathe_problem problem = small_problem();
  struct swathe_context *context = open_context("verdicts.db");
  const struct swathe_tune_options options = {
    .budget_s = 300, .trial_s = 2, .memory_bytes = 512 << 20, .forward = true
  };
  const char *command = getenv("TEST_COMMAND");
  struct swathe_tuned tuned[2];
  char text[512], path[64];
  (void)state;

  assert_non_null(command);
  if (swathe_tune(context, &problem, &options, tuned)) fail_msg("%s", swathe_error());
  swathe_close(context);
  swathe_problem_format(&problem, text, sizeof text);
  scratch_shell("SWATHE_GENERATOR_DIR=%s '%s' db best forward --problem %s --threads 1 --json "
                "--database %s/verdicts.db --cache %s/cache >%s/best.json",
                generator, command, text, root, root, root);
  snprintf(path, sizeof path, "%s/best.json", root);
  char *found = scratch_read(path);
  assert_non_null(strstr(found, tuned[0].config));
  assert_non_null(strstr(found, "exact pick"));
  free(found);
}

// ---- Stop and resume --------------------------------------------------------------------------

struct stopper {
  volatile int stop;
  int64_t after;
};

static void stop_after(void *arg, const struct swathe_progress *progress)
{
  struct stopper *stopper = arg;
  assert_int_equal(progress->total, WAYS);
  assert_true(progress->refused > 0);
  assert_true(progress->tried >= 0 && progress->tried <= progress->total);
  assert_true(progress->budget_s > 299 && progress->budget_s <= 300);
  assert_true(progress->elapsed_s >= 0 && progress->elapsed_s + progress->left_s <= 301);
  if (progress->tried >= stopper->after) stopper->stop = 1;
}

// B37
static void a_stopped_search_resumes(void **state)
{
  const struct swathe_problem problem = small_problem();
  struct swathe_context *context = open_context("resume.db");
  struct stopper stopper = { .after = 3 };
  struct swathe_tune_options options = { .budget_s = 300,
                                         .trial_s = 2,
                                         .memory_bytes = 512 << 20,
                                         .forward = true,
                                         .progress = stop_after,
                                         .arg = &stopper,
                                         .stop = &stopper.stop };
  struct swathe_tuned tuned[2];
  struct verdicts verdicts = { .samples = 0 };
  char config[512], why[512];
  (void)state;

  assert_int_equal(swathe_tune(context, &problem, &options, tuned), SWATHE_INTERRUPTED);
  const int64_t tried_first = tuned[0].tried;
  assert_in_range(tried_first, 3, WAYS - 1);
  assert_int_equal(
      swathe_db_best(context, &problem, SWATHE_FORWARD, config, sizeof config, why, sizeof why),
      SWATHE_OK);
  assert_non_null(strstr(why, "search not finished"));

  options.stop = NULL;
  options.progress = NULL;
  if (swathe_tune(context, &problem, &options, tuned)) fail_msg("%s", swathe_error());
  // the default is timed anew in every session, nothing else is tried twice
  assert_int_equal(tried_first + tuned[0].tried, WAYS + 1);
  assert_int_equal(swathe_db_show(context, &problem, note_verdict, &verdicts), SWATHE_OK);
  for (int way = 0; way < WAYS; way++) assert_true(*verdicts.of[way]);
  swathe_close(context);
}

static void a_budget_is_kept(void **state)
{
  const struct swathe_problem problem = small_problem();
  struct swathe_context *context = open_context("budget.db");
  const struct swathe_tune_options options = {
    .budget_s = 1, .trial_s = 2, .memory_bytes = 512 << 20, .forward = true
  };
  struct swathe_tuned tuned[2];
  (void)state;
  const time_t begin = time(NULL);
  if (swathe_tune(context, &problem, &options, tuned)) fail_msg("%s", swathe_error());
  assert_true(time(NULL) - begin <
              120);  // one hanging trial and a compile batch at most, on a slow machine
  assert_non_null(strstr(tuned[0].config, "sabotage=0"));
  swathe_close(context);
}

static void stop_at_once(void *arg, const struct swathe_progress *progress)
{
  struct stopper *stopper = arg;
  if (progress->default_us > 0) stopper->stop = 1;
}

// B37: what does not compile within the budget is not waited for, and is no failure.
static void a_budget_ends_compilers_too(void **state)
{
  const struct swathe_problem problem = small_problem();
  const struct swathe_tune_options wishes = { .budget_s = 2, .forward = true };
  struct verdicts verdicts = { .samples = 0 };
  struct swathe_tuned tuned[2];
  char path[96];
  (void)state;

  snprintf(path, sizeof path, "%s/slow", root);
  FILE *script = fopen(path, "w");
  assert_non_null(script);
  fputs("#!/bin/sh\n[ -f forward.c ] && ! grep -q 'SABOTAGE *= *0,' forward.c && sleep 1000\n"
        "exec cc \"$@\"\n", script);
  assert_int_equal(fclose(script), 0);
  assert_int_equal(chmod(path, 0700), 0);
  setenv("SWATHE_CC", path, 1);
  struct swathe_context *context = open_context("slow.db");
  const time_t begin = time(NULL);
  if (swathe_tune(context, &problem, &wishes, tuned)) fail_msg("%s", swathe_error());
  assert_true(time(NULL) - begin < 45);
  assert_int_equal(swathe_db_show(context, &problem, note_verdict, &verdicts), SWATHE_OK);
  assert_true(verdicts.samples > 0);
  for (int way = 0; way < WAYS; way++) assert_string_not_equal(verdicts.of[way], "compile");
  unsetenv("SWATHE_CC");
  swathe_close(context);
}

static volatile int alarmed;

static void on_alarm(int signal_number)
{
  (void)signal_number;
  alarmed = 1;
}

// B31, B37: not even a compiler that hangs over the default keeps a caller who wants to stop.
static void stopping_does_not_wait_for_a_compiler(void **state)
{
  const struct swathe_problem problem = small_problem();
  char compiler[96], path[96], cache[96];
  struct swathe_context *context = NULL;
  const struct swathe_options options = {
    .database = path, .cache = cache, .threads = 1, .compiler = compiler
  };
  const struct swathe_tune_options wishes = { .budget_s = 1, .forward = true, .stop = &alarmed };
  struct swathe_tuned tuned[2];
  (void)state;

  snprintf(path, sizeof path, "%s/hang.db", root);
  snprintf(cache, sizeof cache, "%s/hang_cache", root);
  snprintf(compiler, sizeof compiler, "%s/hang", root);
  scratch_shell("printf '#!/bin/sh\\ncase $1 in --version|-d*) echo 1;; *) sleep 1000;; esac\\n' "
                ">%s && chmod +x %s", compiler, compiler);
  assert_int_equal(swathe_open(&options, &context), SWATHE_OK);
  signal(SIGALRM, on_alarm);
  alarm(1);
  const time_t begin = time(NULL);
  assert_int_equal(swathe_tune(context, &problem, &wishes, tuned), SWATHE_INTERRUPTED);
  assert_true(time(NULL) - begin < 60);
  assert_non_null(strstr(swathe_error(), "stopped while"));
  signal(SIGALRM, SIG_DFL);
  swathe_close(context);
}

static void wishes_that_make_no_sense_are_refused(void **state)
{
  static const struct {
    struct swathe_tune_options options;
    const char *words;
  } rows[] = { { { .budget_s = -1 }, "budget_s of -1" },
               { { .budget_s = NAN }, "budget_s of" },
               { { .budget_s = INFINITY }, "budget_s of inf" },
               { { .wait_s = -1 }, "wait_s" },
               { { .trial_s = -0.5 }, "trial_s" },
               { { .memory_bytes = -1 }, "memory_bytes" } };
  const struct swathe_problem problem = small_problem();
  struct swathe_context *context = open_context("wishes.db");
  struct swathe_tuned tuned[2];
  char path[96];
  (void)state;
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    assert_int_equal(swathe_tune(context, &problem, &rows[i].options, tuned), SWATHE_BAD_USE);
    if (!strstr(swathe_error(), rows[i].words)) fail_msg("%s", swathe_error());
  }
  snprintf(path, sizeof path, "%s/wishes.db", root);
  assert_int_not_equal(access(path, F_OK), 0);
  swathe_close(context);
}

// Measuring anew can only replace a finished pick by a better one, and only at its end.
static void a_finished_pick_outlives_a_stopped_search(void **state)
{
  const struct swathe_problem problem = small_problem();
  struct swathe_context *context = open_context("verdicts.db");
  struct stopper stopper = { .stop = 0 };
  struct swathe_tune_options options = { .budget_s = 300,
                                         .forward = true,
                                         .again = true,
                                         .trial_s = 2,
                                         .progress = stop_at_once,
                                         .arg = &stopper,
                                         .stop = &stopper.stop };
  struct swathe_tuned tuned[2];
  char before[512], config[512], why[512];
  (void)state;

  // measured here if the test before did not
  const struct swathe_tune_options finish = {
    .budget_s = 300, .trial_s = 2, .forward = true, .memory_bytes = 512 << 20
  };
  if (swathe_tune(context, &problem, &finish, tuned)) fail_msg("%s", swathe_error());
  assert_string_equal(swathe_database_path(context) + strlen(root), "/verdicts.db");
  if (swathe_db_best(context, &problem, SWATHE_FORWARD, before, sizeof before, why, sizeof why))
    fail_msg("%s", swathe_error());
  assert_non_null(strstr(why, "exact pick"));
  assert_int_equal(swathe_tune(context, &problem, &options, tuned), SWATHE_INTERRUPTED);
  if (swathe_db_best(context, &problem, SWATHE_FORWARD, config, sizeof config, why, sizeof why))
    fail_msg("%s", swathe_error());
  assert_string_equal(config, before);
  assert_null(strstr(why, "not finished"));
  swathe_close(context);
}

// B28
static void one_process_tunes_at_a_time(void **state)
{
  const struct swathe_problem problem = small_problem();
  struct swathe_context *context = open_context("leased.db");
  struct swathe_tune_options options = {
    .budget_s = 1, .wait_s = 0.2, .trial_s = 2, .forward = true
  };
  struct swathe_tuned tuned[2];
  char path[96], owner[64];
  int ready[2];
  (void)state;

  snprintf(path, sizeof path, "%s/leased.db", root);
  assert_int_equal(pipe(ready), 0);
  const pid_t pid = fork();
  assert_true(pid >= 0);
  if (pid == 0) {
    struct sw_lease lease = { .file = -1 };
    if (sw_lease_take(path, 0, NULL, &lease) || write(ready[1], "x", 1) != 1) _exit(1);
    for (;;) pause();
  }
  assert_int_equal(read(ready[0], owner, 1), 1);
  assert_int_equal(swathe_tune(context, &problem, &options, tuned), SWATHE_TIMEOUT);
  snprintf(owner, sizeof owner, "process %ld is tuning", (long)pid);
  assert_non_null(strstr(swathe_error(), owner));
  const volatile int stop = 1;
  options.stop = &stop;
  options.wait_s = 100;
  assert_int_equal(swathe_tune(context, &problem, &options, tuned), SWATHE_INTERRUPTED);

  // the lease ends with its owner, however that ends
  options.stop = NULL;
  kill(pid, SIGKILL);
  assert_int_equal(waitpid(pid, NULL, 0), pid);
  if (swathe_tune(context, &problem, &options, tuned)) fail_msg("%s", swathe_error());
  close(ready[0]);
  close(ready[1]);
  swathe_close(context);
}

// ---- Killed at any moment ---------------------------------------------------------------------

static void count_pick(void *arg, const struct swathe_pick *pick)
{
  (void)pick;
  ++*(int64_t *)arg;
}

// A child tunes one problem after the other, without end.
static void tune_for_ever(int64_t tokens)
{
  struct swathe_context *context = open_context("killed.db");
  const struct swathe_tune_options options = { .budget_s = 0.5, .forward = true, .again = true };
  struct swathe_tuned tuned[2];
  for (;; tokens += 16) {
    struct swathe_problem problem = small_problem();
    problem.tokens_per_rank = tokens;
    if (swathe_tune(context, &problem, &options, tuned)) _exit(1);
  }
}

static void killed_tuning_loses_nothing(void **state)
{
  int64_t before = 0;
  const char *times = getenv("TEST_KILLS");
  const int kills = times ? atoi(times) : 8;
  (void)state;

  srand(1);
  for (int i = 0; i < kills; i++) {
    const pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
      tune_for_ever(64 * (i + 1));
      _exit(0);
    }
    const long us = 50000 + rand() % 1500000;
    nanosleep(&(struct timespec){ us / 1000000, us % 1000000 * 1000 }, NULL);
    assert_int_equal(waitpid(pid, NULL, WNOHANG), 0);
    kill(pid, SIGKILL);
    assert_int_equal(waitpid(pid, NULL, 0), pid);

    int64_t picks = 0;
    struct swathe_context *context = open_context("killed.db");
    if (swathe_db_list(context, count_pick, &picks))
      fail_msg("after kill %d: %s", i, swathe_error());
    assert_true(picks >= before);
    before = picks;
    swathe_close(context);
  }
  print_message("killed %d times, %lld picks are there\n", kills, (long long)before);
}

// Some kernels write whole cache lines past the cache where heads start them, as those of trainers'
// tensors do: a trial on others would not see what that is worth.
static void trials_run_on_tensors_as_trainers_have_them(void **state)
{
  struct swathe_problem problem;
  (void)state;
  swathe_problem_init(&problem);
  for (int64_t rows = 1; rows <= 4096; rows *= 64) {
    struct sw_trial_tensors t;
    assert_int_equal(sw_trial_tensors_make(&t, &problem, rows), SWATHE_OK);
    const void *const all[] = { t.q, t.k, t.v, t.out, t.dout, t.dq, t.dk, t.dv, t.lse };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
      assert_int_equal((uintptr_t)all[i] % 64, 0);
    sw_trial_tensors_free(&t);
  }
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(spoilt_candidates_never_win),
    cmocka_unit_test(a_fresh_process_finds_what_was_tuned),
    cmocka_unit_test(a_stopped_search_resumes),
    cmocka_unit_test(a_finished_pick_outlives_a_stopped_search),
    cmocka_unit_test(a_budget_is_kept),
    cmocka_unit_test(a_budget_ends_compilers_too),
    cmocka_unit_test(stopping_does_not_wait_for_a_compiler),
    cmocka_unit_test(wishes_that_make_no_sense_are_refused),
    cmocka_unit_test(one_process_tunes_at_a_time),
    cmocka_unit_test(killed_tuning_loses_nothing),
    cmocka_unit_test(trials_run_on_tensors_as_trainers_have_them),
  };
  return cmocka_run_group_tests(tests, set_up, scratch_remove);
}
