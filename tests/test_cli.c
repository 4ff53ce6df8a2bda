// test_cli.c: the `swathe` binary from outside: exit statuses, words, one JSON document, files.
// The binary is $TEST_COMMAND.
#include "../runtime/cli/fail.c"
#include "../runtime/cli/npy.c"

#include <ctype.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/wait.h>

#include <cmocka.h>

#include "scratch.h"

static const char *binary;

static int make_directory(void **state)
{
  (void)state;
  binary = scratch_home("cli");
  return binary ? 0 : -1;
}

// ---- Running it ---------------------------------------------------------------------------------

struct outcome {
  int status;
  char *out, *err;
};

// `prefix` goes before the binary: variables, or a command that runs it.
static struct outcome run_prefixed(const char *prefix, const char *words)
{
  char command[8192];
  snprintf(command, sizeof command, "%s '%s' %s >stdout 2>stderr", prefix, binary, words);
  const int status = system(command);
  if (!WIFEXITED(status)) fail_msg("swathe %s: ended by signal %d", words, WTERMSIG(status));
  return (struct outcome){ WEXITSTATUS(status), scratch_read("stdout"), scratch_read("stderr") };
}

static void release(struct outcome *outcome)
{
  free(outcome->out);
  free(outcome->err);
}

// Runs it and expects a status and words (NULL: none) on stdout and stderr.
static void expect(const char *words, int status, const char *out, const char *err)
{
  struct outcome outcome = run_prefixed("", words);
  if (outcome.status != status)
    fail_msg("swathe %s: exit %d, not %d\n%s", words, outcome.status, status, outcome.err);
  if (out && !strstr(outcome.out, out))
    fail_msg("swathe %s: no '%s' in:\n%s", words, out, outcome.out);
  if (err && !strstr(outcome.err, err))
    fail_msg("swathe %s: no '%s' in:\n%s", words, err, outcome.err);
  if (!err && *outcome.err) fail_msg("swathe %s: stderr says:\n%s", words, outcome.err);
  release(&outcome);
}

// ---- The command line ---------------------------------------------------------------------------

static void answers_without_a_verb(void **state)
{
  (void)state;
  expect("--help", 0, "usage: swathe VERB", NULL);
  expect("help", 0, "usage: swathe VERB", NULL);
  expect("--version", 0, "swathe " SWATHE_VERSION "\n", NULL);
  expect("", 2, NULL, "usage: swathe VERB");
  expect("conquer", 2, NULL, "there is no verb 'conquer'; see swathe --help");
  expect("--conquer", 2, NULL, "there is no option '--conquer'");
  expect("db", 2, NULL, "db needs a second word");
  expect("db conquer", 2, NULL, "there is no verb 'db conquer'");
  expect("db --help", 0, "db best", NULL);
}

static void every_verb_has_help_with_examples(void **state)
{
  (void)state;
  static const char *const verbs[] = { "models", "emit", "compile", "plan", "run", "bench", "tune",
                                       "db list", "db show", "db best", "db report", "doctor" };
  for (size_t i = 0; i < sizeof verbs / sizeof verbs[0]; i++) {
    char words[64], usage[64];
    snprintf(words, sizeof words, "%s --help", verbs[i]);
    snprintf(usage, sizeof usage, "usage: swathe %s", verbs[i]);
    expect(words, 0, usage, NULL);
    expect(words, 0, "Examples:", NULL);
    expect(words, 0, "--json", NULL);
  }
}

// Options are refused with exit 2, words that name them, and the way to the help.
static void refuses_bad_use(void **state)
{
  (void)state;
  static const struct { const char *words, *err;
  } rows[] = {
    { "plan --conquer", "there is no option --conquer\nsee swathe plan --help" },
    { "plan --rank 2", "there is no option --rank\n" },
    { "plan -r", "there is no option -r" },
    { "plan --budget 3", "--budget is an option of other verbs, not of plan" },
    { "plan extra", "'extra' is one word too many" },
    { "plan -- --ranks", "'--ranks' is one word too many" },
    { "plan --ranks", "--ranks needs a value: --ranks P" },
    { "plan --ranks --json", "--ranks needs a value" },
    { "plan --ranks ''", "--ranks is given an empty value" },
    { "plan --ranks 2 --ranks=2", "--ranks is given twice" },
    { "plan --json=yes", "--json takes no value" },
    { "plan --ranks two", "--ranks two: not a whole number" },
    { "plan --ranks 2.5", "--ranks 2.5: not a whole number" },
    { "plan --ranks ' 2'", "not a whole number" },
    { "plan --ranks 0", "--ranks 0: at least 1" },
    { "plan --ranks -3", "--ranks -3: at least 1" },
    { "plan --ranks 99999999999999999999", "not a whole number" },
    { "plan --ranks 70000", "--ranks 70000: at most 65536" },
    { "plan --window 0", "--window 0: at least 1" },
    { "plan --window-left -1", "--window-left -1: at least 0" },
    { "plan --window-left all", "--window-left all: not a whole number" },
    { "plan --window 8 --window-left 7", "--window and --window-left do not go together" },
    { "plan --window 8 --window-right 0", "--window and --window-right do not go together" },
    { "plan --window 8 --problem window_left=7",
      "--problem sets window_left, and so does --window" },
    { "plan --ranks 2 --problem q_heads=2,ranks=2", "--problem sets ranks, and so does --ranks" },
    { "plan --tokens 9 --problem tokens_per_rank=9", "--problem sets tokens_per_rank" },
    { "plan --problem q_heads=2,q_heads=4", "--problem sets q_heads twice" },
    { "plan --problem heads=2", "a problem has no field 'heads'" },
    { "plan --problem q_heads", "'q_heads' in the problem is not name=value" },
    { "plan --problem q_heads=3,kv_heads=2", "3 query heads cannot share 2 key heads evenly" },
    { "plan --documents 5,x", "--documents 5,x: the 2. length is not a whole number" },
    { "plan --documents 5,", "the 2. length is not a whole number" },
    { "plan --documents 5,-1", "the 2. length is out of range" },
    { "plan --documents 5,6 --tokens 10",
      "--documents are 11 tokens together, but the sequence has 10" },
    { "plan --documents 0", "the sequence has no tokens" },
    { "plan --tokens 0", "--tokens 0: at least 1" },
    { "plan --layout spans", "the layout 'spans' needs a list of spans" },
    { "plan --layout spiral", "--layout spiral\n  no layout is called 'spiral'" },
    { "plan --dtype f8", "--dtype f8\n  no dtype is called 'f8'" },
    { "plan --halo-gradient f64", "--halo-gradient f64\n  no dtype" },
    { "plan --softcap much", "--softcap much: not a finite number" },
    { "plan --softcap -1", "softcap -1" },
    { "plan --scale inf", "--scale inf: not a finite number" },
    { "plan --model gpt-oss", "--model gpt-oss\n" },
    { "models gpt-oss", "no preset 'gpt-oss'" },
    { "emit", "forward|backward is missing" },
    { "emit sideways", "'sideways' is neither forward nor backward" },
    { "compile --config tile=1", "say forward or backward" },
    { "compile forward --space --config tile=1", "--space and --config do not go together" },
    { "compile forward --most 3", "--most is for --space" },
    { "compile forward --budget 3", "--budget is for --space" },
    { "compile --space --budget 0", "--budget: more than 0 seconds" },
    { "compile --space --most 0", "--most 0: at least 1" },
    { "compile --arch sm_80", "--arch says nothing of the cpu target; there it is --isa" },
    { "compile --target cuda --dtype bf16 --isa avx2", "there it is --arch" },
    { "compile --target cuda --dtype bf16 --arch sm_80,", "--arch sm_80,: a name is empty" },
    { "compile --target cuda --dtype bf16 --arch sm_75",
      "no architecture of the cuda target is called 'sm_75'; there are " },
    { "emit forward --config tile=1", "the forward kernel cannot be emitted\n" },
    { "run --k k.npy", "--k needs --q too" },
    { "run --q q.npy --k k.npy", "--q needs --v too" },
    { "run --sink s.npy", "--sink needs --q too" },
    { "run --forward --dout d.npy", "--forward and --dout do not go together" },
    { "run --repeat 0", "--repeat 0: at least 1" },
    { "db report --documents 9", "--documents is an option of other verbs" },
    { "tune --budget 0", "--budget 0: more than 0 seconds" },
    { "tune --budget soon", "--budget soon: not a finite number" },
  };
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
    expect(rows[i].words, 2, NULL, rows[i].err);
}

static void fails_when_stdout_is_full(void **state)
{
  (void)state;
  char command[8192];
  snprintf(command, sizeof command, "'%s' models >/dev/full 2>stderr", binary);
  const int status = system(command);
  char *err = scratch_read("stderr");
  assert_int_equal(WEXITSTATUS(status), 1);
  assert_non_null(strstr(err, "stdout could not be written"));
  free(err);
}

// ---- JSON ---------------------------------------------------------------------------------------

static const char *skip_json_blanks(const char *at)
{
  return at + strspn(at, " \t\r\n");
}

static const char *skip_json_string(const char *at)
{
  if (*at++ != '"') return NULL;
  for (; *at && *at != '"'; at++) {
    if ((unsigned char)*at < ' ') return NULL;
    if (*at == '\\' && !*++at) return NULL;
  }
  return *at ? at + 1 : NULL;
}

// Behind one JSON value, or NULL if there is none.
static const char *skip_json(const char *at)
{
  at = skip_json_blanks(at);
  if (*at == '"') return skip_json_string(at);
  if (*at != '{' && *at != '[') {
    static const char *const names[] = { "true", "false", "null" };
    for (int i = 0; i < 3; i++)
      if (!strncmp(at, names[i], strlen(names[i]))) return at + strlen(names[i]);
    char *end;
    (void)strtod(at, &end);
    return (*at == '-' || isdigit((unsigned char)*at)) ? end : NULL;
  }
  const char close = *at == '{' ? '}' : ']';
  at = skip_json_blanks(at + 1);
  while (*at != close) {
    if (close == '}') {
      at = skip_json_string(at);
      if (!at || *(at = skip_json_blanks(at)) != ':') return NULL;
      at++;
    }
    at = skip_json(at);
    if (!at) return NULL;
    at = skip_json_blanks(at);
    if (*at == ',') at = skip_json_blanks(at + 1);
    else if (*at != close) return NULL;
  }
  return at + 1;
}

static void expect_json(const char *words, int status, const char *out)
{
  struct outcome outcome = run_prefixed("", words);
  const char *end = skip_json(outcome.out);
  if (outcome.status != status)
    fail_msg("swathe %s: exit %d, not %d\n%s", words, outcome.status, status, outcome.err);
  if (!end || *skip_json_blanks(end))
    fail_msg("swathe %s: not one JSON document:\n%s", words, outcome.out);
  if (!strstr(outcome.out, out)) fail_msg("swathe %s: no '%s' in:\n%s", words, out, outcome.out);
  release(&outcome);
}

#define TINY "--problem q_heads=4,kv_heads=2,head_dim_qk=16,head_dim_v=16 --window 24 --tokens 300 "

static void prints_one_json_document(void **state)
{
  (void)state;
  static const struct { const char *words; int status; const char *out; } rows[] = {
    { "models --json", 0, "\"name\": \"gpt-oss-20b\"" },
    { "models gpt-oss-20b --json", 0, "\"window_left\": 127" },
    { "plan --json " TINY "--ranks 3", 0, "\"halo_tokens\": 46" },
    { "plan --json --messages " TINY "--ranks 3", 0, "\"position\": 77" },
    { "plan --json --window-left unlimited " TINY, 2, "\"error\": " },
    { "plan --json --ranks", 2, "\"error\": \"--ranks needs a value: --ranks P\"" },
    { "plan --json --window-left unlimited --tokens 9", 0, "\"window_left\": \"unlimited\"" },
    { "emit forward --json " TINY, 0, "\"source\": \"" },
    { "emit forward --json --config tile=1 " TINY, 2, "\"error\": " },
    { "compile --json " TINY, 0, "\"cached\": false" },
    { "compile --json " TINY, 0, "\"cached\": true" },
    { "compile forward --json --space --most 2 " TINY, 0, "\"fit\": 2" },
    { "compile --json --space --budget 1e-9 --most 2 " TINY, 0, "\"untried\": 4" },
    { "run --json --check --ranks 3 " TINY, 0, "\"passed\": true" },
    // 46 halo tokens * 2 heads * (16 + 16) * 4 bytes, and half of that homewards
    { "run --json --check --halo-gradient bf16 --ranks 3 " TINY, 0, "\"gradient_bytes\": 5888" },
    { "run --json --target cuda " TINY, 1, "\"error\": " },
    { "db list --json", 0, "\"picks\": []" },
    { "db show --json " TINY, 0, "\"samples\": []" },
    { "db best --json " TINY, 0, "\"kernel\": \"backward\"" },
    { "doctor --json", 0, "\"broken\": 0" },
    { "doctor --json", 0, " MiB, of at most 512" },
  };
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
    expect_json(rows[i].words, rows[i].status, rows[i].out);
}

// Halo bytes of a published model, worked out by hand: 127 tokens * 8 heads * (64 + 64) * 2 bytes.
static void plans_a_known_model(void **state)
{
  (void)state;
  expect_json("plan --json --model gpt-oss-20b --tokens 131072 --ranks 8", 0,
              "\"receive_bytes\": 260096");
  expect("plan --model gpt-oss-20b --tokens 131072 --ranks 8", 0, "260096 (254.0 KiB)", NULL);
  expect("plan --model gpt-oss-20b --tokens 131072 --ranks 3", 0,
         "heads do not divide by the ranks", NULL);
  // --problem goes over the preset, and the window over both.
  expect_json(
      "plan --json --model gpt-oss-20b --problem kv_heads=4 --window 65 --tokens 4096 --ranks 2", 0,
      "\"receive_bytes\": 65536");
  // The whole sequence: documents and padding behind them.
  expect_json("plan --json --documents 100,0,50 --tokens 200 --ranks 2 --window 11", 0,
              "\"tokens\": 200");
  expect_json("plan --json --tokens 100 --ranks 3 --batch 4", 0, "\"tokens_per_rank\": 136");
}

// ---- Kernels ------------------------------------------------------------------------------------

// The banner of a kernel holds the command that makes it again, byte for byte.
static void the_banner_makes_the_same_source(void **state)
{
  (void)state;
  struct outcome first = run_prefixed("", "emit backward --model gpt-oss-20b --isa avx2");
  const char *banner = strstr(first.out, "swathe emit ");
  assert_int_equal(first.status, 0);
  assert_non_null(banner);
  char words[1024];
  snprintf(words, sizeof words, "%.*s", (int)strcspn(banner, "\n") - 7, banner + 7);
  struct outcome second = run_prefixed("", words);
  assert_int_equal(second.status, 0);
  assert_string_equal(first.out, second.out);
  release(&second);

  expect("emit backward --model gpt-oss-20b --isa avx2 --output kernel.c", 0, "", NULL);
  char *written = scratch_read("kernel.c");
  assert_string_equal(first.out, written);
  free(written);
  release(&first);
  expect("emit forward --output missing/kernel.c", 1, NULL, "missing/kernel.c cannot be written");
}

// A source may be for any processor; only running asks for one that this machine has.
static void kernels_are_emitted_for_other_processors(void **state)
{
  (void)state;
  static const char *const isas[] = { "avx512", "avx2", "neon", "generic" };
  char command[160], banner[64];
  for (size_t i = 0; i < sizeof isas / sizeof isas[0]; i++) {
    snprintf(command, sizeof command, "emit forward --isa %s " TINY, isas[i]);
    snprintf(banner, sizeof banner, "--isa %s --problem ", isas[i]);
    expect(command, 0, banner, NULL);
  }
  expect("emit forward --isa pdp11 " TINY, 2, NULL, "'pdp11'");
}

// A number of a JSON text, by its name.
static double number_of(const char *json, const char *name)
{
  char wanted[64];
  snprintf(wanted, sizeof wanted, "\"%s\": ", name);
  const char *at = strstr(json, wanted);
  if (!at) fail_msg("no %s in:\n%s", wanted, json);
  return strtod(at + strlen(wanted), NULL);
}

static void need_nvrtc(const char *test)
{
  struct outcome doctor = run_prefixed("", "doctor");
  const char *compiler = strstr(doctor.out, "cuda compiler ");
  assert_non_null(compiler);
  const bool absent = strspn(compiler + strlen("cuda compiler "), " ") ==
                      strcspn(compiler + strlen("cuda compiler "), "a");
  release(&doctor);
  if (!absent) return;
  print_message("%s: skipped, there is no NVRTC\n", test);
  skip();
}

// Without a driver or a GPU: what kernels use, and how much more they do than is asked for.
static void kernels_are_compiled_for_gpus(void **state)
{
  static const struct { const char *kernel; double most_work; } rows[] = {
    { "forward", 1.2 }, { "backward", 1.3 },
  };
  char words[256];
  (void)state;
  need_nvrtc("kernels_are_compiled_for_gpus");
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    snprintf(words, sizeof words,
             "compile %s --json --target cuda --arch sm_90a --model gpt-oss-20b", rows[i].kernel);
    for (int again = 0; again < 2; again++) {
      expect_json(words, 0, again ? "\"cached\": true" : "\"cached\": false");
      struct outcome outcome = run_prefixed("", words);
      const double work = number_of(outcome.out, "counted_ratio");
      assert_true(work >= 1 && work <= rows[i].most_work);
      assert_in_range(number_of(outcome.out, "registers"), 16, 255);
      assert_in_range(number_of(outcome.out, "threads"), 32, 1024);
      assert_true(number_of(outcome.out, "spill_bytes") == 0);
      assert_non_null(strstr(outcome.out, "\"refused\": null"));
      release(&outcome);
    }
  }
  // all that a layer needs: forward, backward and its copies
  expect("compile --target cuda --dtype bf16 --arch sm_86 --cache gpu", 0, "dkv ", NULL);
  scratch_shell("test $(find gpu -name '*.swk' | wc -l) = 3");
  // so that a machine with a GPU (emulated here) needs no NVRTC
  if (getenv("TEST_LIBCUDA")) {
    struct outcome run = run_prefixed(
        "SWATHE_LIBNVRTC=/none SWATHE_LIBCUDA=$TEST_LIBCUDA EMULATOR_ARCH=sm_86",
        "run --check --target cuda --dtype bf16 --cache gpu --tokens 40 --ranks 2");
    if (run.status || !strstr(run.out, "0 compiled, 3 loaded from the cache"))
      fail_msg("not from the cache alone: exit %d\n%s%s", run.status, run.out, run.err);
    if (!strstr(run.out, "swathe emulated sm_86, not a GPU"))
      fail_msg("what ran emulated does not say so:\n%s", run.out);
    release(&run);
  }
  expect("compile forward --target cuda --dtype bf16 --arch sm_80,sm_100 --window 128", 0,
         "forward for sm_100\n", NULL);
  expect("compile forward --space --most 1 --target cuda --dtype bf16 --arch sm_80,sm_100 "
         "--window 128", 0, "\n2 fit, 0 refused, 0 failed, 0 not compiled", NULL);
  expect_json("compile --target cuda --arch sm_80 --dtype f32 --json", 1, "\"error\": ");
  expect("emit backward --target cuda --arch sm_103 --dtype f16", 0, "--arch sm_103 ", NULL);

  // a mistake in a template comes back with the template's own line
  scratch_shell("mkdir texts && cp -r '%s'/generator '%s'/templates texts && "
                "sed -i '1i int mistake = nowhere;' texts/templates/cuda/forward.cu",
                getenv("TEST_SOURCE_DIR"), getenv("TEST_SOURCE_DIR"));
  struct outcome outcome = run_prefixed("SWATHE_GENERATOR_DIR=texts",
                                        "compile forward --target cuda --arch sm_80 --dtype bf16");
  assert_int_equal(outcome.status, 1);
  assert_non_null(strstr(outcome.err, "templates/cuda/forward.cu:1: error: "));
  assert_non_null(strstr(outcome.err, "identifier \"nowhere\" is undefined"));
  release(&outcome);
}

// Candidates that a tuner would not try, and why, out of a space that has one of each.
static void what_does_not_fit_a_gpu_is_refused_by_name(void **state)
{
  static const char *const words[] = {
    "\n1 fit, 3 refused, 0 failed", "forward spills ",
    "forward wants 1048576 bytes of shared memory of 166912",
    " registers a block of 65536",
  };
  (void)state;
  need_nvrtc("what_does_not_fit_a_gpu_is_refused_by_name");
  scratch_shell("mkdir spilling && cd '%s' && cp -r generator templates tests/fixtures/spilling/* "
                "\"$OLDPWD\"/spilling", getenv("TEST_SOURCE_DIR"));
  for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
    struct outcome outcome =
        run_prefixed("SWATHE_GENERATOR_DIR=spilling",
                     "compile forward --space --target cuda --dtype bf16 --arch sm_80");
    assert_int_equal(outcome.status, 0);
    if (!strstr(outcome.out, words[i])) fail_msg("no '%s' in:\n%s", words[i], outcome.out);
    release(&outcome);
  }
}

// ---- Files --------------------------------------------------------------------------------------

// An array of the given shape (zeros end it) with numbers from -1 to 1 that look random.
static void put_array(const char *path, int axes, const int64_t *shape)
{
  struct cli_npy array = { .axes = axes, .elements = 1 };
  for (int i = 0; i < axes; i++) {
    array.shape[i] = shape[i];
    array.elements *= shape[i];
  }
  array.data = calloc((size_t)array.elements, sizeof *array.data);
  for (int64_t i = 0; i < array.elements; i++)
    array.data[i] = (float)sin(12.9898 * (double)i + (double)path[0]);
  assert_int_equal(cli_npy_write(path, &array), CLI_OK);
  free(array.data);
}

static struct cli_npy get_array(const char *path, const char *shape)
{
  struct cli_npy array;
  if (cli_npy_read(path, &array)) fail_msg("%s", cli_fail_words());
  assert_string_equal(cli_npy_shape(&array).text, shape);
  return array;
}

static void expect_close(const char *one_path, const char *other_path, const char *shape)
{
  struct cli_npy one = get_array(one_path, shape), other = get_array(other_path, shape);
  for (int64_t i = 0; i < one.elements; i++)
    if (!(fabsf(one.data[i] - other.data[i]) <= 2e-5f))
      fail_msg("%s[%lld]: %g, but %g in %s", one_path, (long long)i, (double)one.data[i],
               (double)other.data[i], other_path);
  free(one.data);
  free(other.data);
}

static void put_inputs(void)
{
  put_array("q.npy", 4, (const int64_t[]){ 2, 70, 4, 8 });
  put_array("k.npy", 4, (const int64_t[]){ 2, 70, 2, 8 });
  put_array("v.npy", 4, (const int64_t[]){ 2, 70, 2, 6 });
  put_array("d.npy", 4, (const int64_t[]){ 2, 70, 4, 6 });
  put_array("s.npy", 1, (const int64_t[]){ 4 });
}

#define FILES "--q q.npy --k k.npy --v v.npy "

static void replays_files_over_any_ranks(void **state)
{
  (void)state;
  static const struct { const char *file, *shape; } results[] = {
    { "out.npy", "[2, 70, 4, 6]" }, { "lse.npy", "[2, 70, 4]" },   { "dq.npy", "[2, 70, 4, 8]" },
    { "dk.npy", "[2, 70, 2, 8]" },  { "dv.npy", "[2, 70, 2, 6]" }, { "dsink.npy", "[4]" },
  };
  put_inputs();
  expect("run " FILES "--dout d.npy --sink s.npy --window 9 --out one --check", 0, "written to one",
         NULL);
  expect("run " FILES "--dout d.npy --sink s.npy --window-left 8 --window-right 0 --ranks 3 "
         "--layout zigzag --out three --check", 0, "written to three", NULL);
  expect("run " FILES "--dout d.npy --sink s.npy --window 9 --out one --check", 0, NULL, NULL);
  for (size_t i = 0; i < sizeof results / sizeof results[0]; i++) {
    char one[64], three[64];
    snprintf(one, sizeof one, "one/%s", results[i].file);
    snprintf(three, sizeof three, "three/%s", results[i].file);
    expect_close(one, three, results[i].shape);
  }

  expect("run " FILES "--window 9 --out forward --dtype bf16 --check", 0, NULL, NULL);
  assert_int_equal(access("forward/out.npy", F_OK), 0);
  assert_int_equal(access("forward/dq.npy", F_OK), -1);
  assert_int_equal(system("ls -A one three forward | grep tmp"), 1 << 8);  // nothing half-written
}

// Three axes in, three axes out; documents cut the window.
static void keeps_the_number_of_axes(void **state)
{
  (void)state;
  put_array("q3.npy", 3, (const int64_t[]){ 20, 2, 4 });
  put_array("k3.npy", 3, (const int64_t[]){ 20, 1, 4 });
  put_array("v3.npy", 3, (const int64_t[]){ 20, 1, 4 });
  expect("run --q q3.npy --k k3.npy --v v3.npy --documents 7,1,9 --ranks 2 --out axes --check", 0,
         NULL, NULL);
  free(get_array("axes/out.npy", "[20, 2, 4]").data);
  struct cli_npy lse = get_array("axes/lse.npy", "[20, 2]");
  // Of 20 tokens the last 3 are padding, and a document of one token sees itself alone.
  struct cli_npy v = get_array("v3.npy", "[20, 1, 4]"),
                 out = get_array("axes/out.npy", "[20, 2, 4]");
  for (int i = 17 * 2; i < 20 * 2; i++) assert_true(isinf(lse.data[i]) && lse.data[i] < 0);
  for (int i = 17 * 8; i < 20 * 8; i++) assert_true(out.data[i] == 0);
  for (int d = 0; d < 4; d++) assert_true(fabsf(out.data[7 * 8 + d] - v.data[7 * 4 + d]) < 1e-6f);
  free(lse.data);
  free(v.data);
  free(out.data);
}

static void refuses_files_that_do_not_fit(void **state)
{
  (void)state;
  put_inputs();
  put_array("k_tokens.npy", 4, (const int64_t[]){ 2, 71, 2, 8 });
  put_array("k_batch.npy", 4, (const int64_t[]){ 1, 70, 2, 8 });
  put_array("k_dim.npy", 4, (const int64_t[]){ 2, 70, 2, 9 });
  put_array("k_heads.npy", 4, (const int64_t[]){ 2, 70, 3, 8 });
  put_array("v_heads.npy", 4, (const int64_t[]){ 2, 70, 3, 6 });
  put_array("d_dim.npy", 4, (const int64_t[]){ 2, 70, 4, 8 });
  put_array("d_heads.npy", 4, (const int64_t[]){ 2, 70, 2, 6 });
  put_array("s_heads.npy", 1, (const int64_t[]){ 2 });
  put_array("q2.npy", 2, (const int64_t[]){ 70, 8 });
  put_array("k3.npy", 3, (const int64_t[]){ 70, 2, 8 });
  static const struct { const char *words; int status; const char *err; } rows[] = {
    { "--q q.npy --k k_tokens.npy --v v.npy", 1,
      "k_tokens.npy [2, 71, 2, 8] and q.npy [2, 70, 4, 8] do not fit together: the tokens differ" },
    { "--q q.npy --k k_batch.npy --v v.npy", 1, "the batches differ" },
    { "--q q.npy --k k_dim.npy --v v.npy", 1, "their head dims differ" },
    { "--q q.npy --k k_heads.npy --v v_heads.npy", 1, "cannot share the key heads evenly" },
    { "--q q.npy --k k.npy --v v_heads.npy", 1, "their heads differ" },
    { FILES "--dout d_dim.npy", 1, "d_dim.npy [2, 70, 4, 8] and v.npy" },
    { FILES "--dout d_heads.npy", 1, "their heads differ" },
    { FILES "--sink s_heads.npy", 1, "a sink is one number per query head" },
    { "--q q2.npy --k k.npy --v v.npy", 1, "q2.npy has the shape [70, 8]" },
    { "--q q.npy --k k3.npy --v v.npy", 1, "one has a batch axis" },
    { "--q q.npy --k nowhere.npy --v v.npy", 1, "nowhere.npy cannot be opened" },
    { FILES "--tokens 70", 2, "--q and --tokens do not go together" },
    { FILES "--batch 2", 2, "--q and --batch do not go together" },
    { FILES "--problem q_heads=4", 2, "--problem sets q_heads, and so do the files" },
    { FILES "--model gpt-oss-20b", 2, "gpt-oss-20b has sinks" },
    { FILES "--sink s.npy --problem sinks=0", 2, "--problem sets sinks, and so does --sink" },
    { FILES "--documents 71", 2, "--documents are 71 tokens together, but the sequence has 70" },
    { FILES "--out q.npy/results", 1, "the directory q.npy/results cannot be made" },
    { "--transport pigeons --tokens 9", 2, "--transport pigeons: there is 'threads'" },
    { "--transport mpi --tokens 9", 1, "no launcher of MPI started this process" },
    { "--transport nccl --tokens 9", 2, "--transport nccl is for --target cuda" },
    { "--deadline 0 --tokens 9", 2, "--deadline 0: more than 0 seconds" },
  };
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    char words[512];
    snprintf(words, sizeof words, "run %s", rows[i].words);
    expect(words, rows[i].status, NULL, rows[i].err);
  }
}

// ---- Failing together ---------------------------------------------------------------------------

// Each rank a device of its own, over what stands in for NCCL.
static void ranks_are_devices(void)
{
  const char *nccl = getenv("TEST_LIBNCCL");
  const char *const words = "run --target cuda --transport nccl --dtype bf16 --window 30 --tokens "
                            "200 --layout zigzag --deadline 60 --check --ranks 3";
  setenv("EMULATOR_DEVICES", "3", 1);
  setenv("SWATHE_LIBNCCL", "/nowhere/libnccl.so.2", 1);
  expect(words, 1, NULL, "no NCCL here");
  if (nccl) {
    setenv("SWATHE_LIBNCCL", nccl, 1);
    setenv("EMULATOR_DEVICES", "2", 1);
    expect(words, 1, NULL, "there is no CUDA device 2; the driver has 2");
    setenv("EMULATOR_DEVICES", "3", 1);
    expect(words, 0, "streams wait for the wire, which is not measured", NULL);
    expect("doctor", 0, "NCCL 2.28.9", NULL);
    // the others hear of it at once
    setenv("EMULATOR_NCCL_FAIL", "ncclGroupEnd:20=3", 1);
    expect(words, 1, NULL, "internal error (3)");
    unsetenv("EMULATOR_NCCL_FAIL");
    expect("bench --transport nccl", 2, NULL, "--transport nccl is for 'swathe run' only");
  }
  unsetenv("SWATHE_LIBNCCL");
  unsetenv("EMULATOR_DEVICES");
}

// On the emulated driver: random data against the reference, and files.
static void runs_on_the_cuda_target(void **state)
{
  const char *driver = getenv("TEST_LIBCUDA");
  (void)state;
  setenv("SWATHE_LIBCUDA", "/nowhere/libcuda.so.1", 1);
  expect("run --target cuda --dtype bf16 --tokens 64", 1, NULL, "no CUDA driver here");
  unsetenv("SWATHE_LIBCUDA");
  need_nvrtc("runs_on_the_cuda_target");
  if (!driver) skip();
  setenv("SWATHE_LIBCUDA", driver, 1);
  expect("doctor", 0, "emulated, not a GPU", NULL);
  expect("run --target cuda --dtype bf16 --window 100 --tokens 300 --ranks 3 --layout zigzag "
         "--problem q_heads=4,kv_heads=2,sinks=1 --check --repeat 2", 0, "  dsink ", NULL);
  expect_json("run --target cuda --dtype f16 --documents 70,130 --window-left 40 "
              "--window-right 9 --ranks 2 --check --json", 0, "\"forward_exact\": true");
  expect("run --target cuda --arch sm_99 --dtype bf16", 1, NULL,
         "no architecture of the cuda target is called 'sm_99'; there are ");
  expect("run --target cuda --dtype f32 --tokens 64", 1, NULL, "f32");

  ranks_are_devices();
  put_array("gq.npy", 3, (const int64_t[]){ 70, 4, 16 });
  put_array("gk.npy", 3, (const int64_t[]){ 70, 2, 16 });
  put_array("gv.npy", 3, (const int64_t[]){ 70, 2, 16 });
  put_array("gdo.npy", 3, (const int64_t[]){ 70, 4, 16 });
  expect("run --target cuda --dtype bf16 --q gq.npy --k gk.npy --v gv.npy --dout gdo.npy "
         "--window 20 --ranks 2 --check --out gpu", 0, "written to gpu", NULL);
  struct cli_npy array = get_array("gpu/dk.npy", "[70, 2, 16]");
  free(array.data);

  // children try the kernels; a layer finds what was picked
  expect("tune --forward --target cuda --dtype bf16 --window 40 --tokens 256 --budget 8 "
         "--database gpu.db", 0, "limit     not known: the peaks of a GPU are not measured", "");
  expect("run --target cuda --dtype bf16 --window 40 --tokens 256 --forward --database gpu.db", 0,
         "exact pick of ", NULL);
  unsetenv("SWATHE_LIBCUDA");
}

// No compiler: every rank fails, none waits for another, and the first cause is what is printed.
static void a_failing_rank_ends_the_run(void **state)
{
  (void)state;
  struct outcome outcome =
      run_prefixed("timeout 60 env SWATHE_CC=/nowhere/cc", "run --cache fresh --ranks 4 " TINY);
  assert_int_equal(outcome.status, 1);
  assert_non_null(strstr(outcome.err, "failed to make its layer"));
  assert_non_null(strstr(outcome.err, "/nowhere/cc"));
  release(&outcome);
}

// Only some of the ranks get a thread: those that did must not wait for the others.
static void a_missing_rank_ends_the_run(void **state)
{
  (void)state;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  skip();  // sanitizers need more address space than the limit below leaves
#endif
  struct outcome outcome =
      run_prefixed("ulimit -v 1000000; timeout 60", "run --forward --tokens 400 --ranks 200");
  assert_int_equal(outcome.status, 1);
  assert_non_null(strstr(outcome.err, "gets no thread"));
  release(&outcome);
}

// A NaN that comes in goes out, and is no success: exit 1, one document that says so.
static void a_failed_check_is_a_failure(void **state)
{
  (void)state;
  struct cli_npy q;
  put_inputs();
  assert_int_equal(cli_npy_read("q.npy", &q), CLI_OK);
  q.data[1234] = NAN;
  assert_int_equal(cli_npy_write("q_nan.npy", &q), CLI_OK);
  free(q.data);
  expect("run --q q_nan.npy --k k.npy --v v.npy --check", 1, "TOO LARGE",
         "differ from the reference");
  expect_json("run --q q_nan.npy --k k.npy --v v.npy --check --json", 1, "\"passed\": false");
  expect("run --q q_nan.npy --k k.npy --v v.npy", 0, NULL, NULL);
}

// How many points each rule turned away: the sum always, the rules when asked.
static void tune_tells_what_rules_turned_away(void **state)
{
  (void)state;
  static const char rule[] = "pack divides the GQA ratio";
  struct outcome brief = run_prefixed("", "tune --forward --budget 1 --database r.db " TINY);
  struct outcome full =
      run_prefixed("", "tune --verbose --forward --budget 2 --database r.db " TINY);
  assert_int_equal(brief.status, 0);
  assert_int_equal(full.status, 0);
  assert_non_null(strstr(brief.out, "points of the space; --verbose lists them\n"));
  assert_null(strstr(brief.out, rule));
  assert_non_null(strstr(full.out, "points of the space:\n"));
  assert_non_null(strstr(full.out, rule));
  release(&brief);
  release(&full);
  expect_json("tune --json --forward --budget 2 --database r.db " TINY, 0,
              "\"rule\": \"pack divides");
}

// The pick of a group's exchange is what a run of that group exchanges by.
static void tune_finds_an_exchange(void **state)
{
  (void)state;
  expect_json("tune --json --transport threads --budget 1 --ranks 2 --database x.db " TINY, 0,
              "\"kernel\": \"exchange\"");
  expect_json("run --json --ranks 2 --database x.db " TINY, 0, "exact pick");
  expect("run --check --ranks 2 --exchange "
         "overlap=2,chunks=8,together=0,order=1,poll=4,progress=50 " TINY,
         0, "given by the caller", NULL);
  expect("run --ranks 2 " TINY, 0, "beside its tensors", NULL);
  expect("run --ranks 2 --exchange overlap=2 " TINY, 1, NULL, "the config lacks 'chunks'");
}

// A second signal is often the first one, passed on. What was found so far is one document, and the
// words of the interruption go to stderr.
static void an_interrupted_tune_says_so(void **state)
{
  (void)state;
  struct outcome outcome = run_prefixed(
      "twice() { \"$@\" & sleep 2; kill -TERM $!; kill -INT $!; wait $!; }; twice",
      "tune --json --budget 600 --model gpt-oss-20b --tokens 2048 --ranks 4");
  const char *end = skip_json(outcome.out);
  assert_int_equal(outcome.status, 1);
  assert_non_null(strstr(outcome.err, "interrupted; what was measured is kept"));
  assert_non_null(strstr(outcome.out, "\"interrupted\": true"));
  assert_true(end && !*skip_json_blanks(end));
  release(&outcome);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(answers_without_a_verb),
    cmocka_unit_test(every_verb_has_help_with_examples),
    cmocka_unit_test(refuses_bad_use),
    cmocka_unit_test(fails_when_stdout_is_full),
    cmocka_unit_test(prints_one_json_document),
    cmocka_unit_test(plans_a_known_model),
    cmocka_unit_test(the_banner_makes_the_same_source),
    cmocka_unit_test(kernels_are_emitted_for_other_processors),
    cmocka_unit_test(kernels_are_compiled_for_gpus),
    cmocka_unit_test(what_does_not_fit_a_gpu_is_refused_by_name),
    cmocka_unit_test(replays_files_over_any_ranks),
    cmocka_unit_test(keeps_the_number_of_axes),
    cmocka_unit_test(refuses_files_that_do_not_fit),
    cmocka_unit_test(runs_on_the_cuda_target),
    cmocka_unit_test(a_failing_rank_ends_the_run),
    cmocka_unit_test(a_failed_check_is_a_failure),
    cmocka_unit_test(a_missing_rank_ends_the_run),
    cmocka_unit_test(tune_tells_what_rules_turned_away),
    cmocka_unit_test(tune_finds_an_exchange),
    cmocka_unit_test(an_interrupted_tune_says_so),
  };
  return cmocka_run_group_tests(tests, make_directory, scratch_remove);
}
