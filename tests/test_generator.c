// test_generator.c: the generator room: the template language, the spaces, what is emitted, and
// the box that the Lua state lives in.  Wrong and countable cases come from
// tests/fixtures/generator, laid over a copy of the real generator; the rest asks the built-in
// one.
#include <locale.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "runtime/gen.h"
#include "scratch.h"

#define COUNT(array) (sizeof(array) / sizeof(array)[0])

static const char *fixtures;         // the copy with the fixtures in it
static struct sw_gen *fixture_gen;  // opened on it
static struct sw_gen *real_gen;     // the built-in texts

static const char *source_directory(void)
{
  const char *directory = getenv("TEST_SOURCE_DIR");
  return directory ? directory : ".";
}

static int open_generators(void **state)
{
  (void)state;
  fixtures = scratch_make("generator");
  if (!fixtures) return -1;
  scratch_shell("cp -r '%s/generator' '%s/templates' '%s'", source_directory(), source_directory(),
        fixtures);
  scratch_shell("cp -r '%s/tests/fixtures/generator/.' '%s'", source_directory(), fixtures);
  if (sw_gen_open(fixtures, &fixture_gen) || sw_gen_open(NULL, &real_gen)) {
    print_error("%s\n", swathe_error());
    return -1;
  }
  return 0;
}

static int close_generators(void **state)
{
  sw_gen_close(fixture_gen);
  sw_gen_close(real_gen);
  return scratch_remove(state);
}

// A request about `text` over the plain problem; the problem is the caller's.
static struct sw_gen_request request_for(const char *kernel, const char *isa, const char *text,
                                         struct swathe_problem *problem)
{
  swathe_problem_init(problem);
  if (swathe_problem_parse(text, problem)) fail_msg("%s: %s", text, swathe_error());
  return (struct sw_gen_request){ problem, kernel, isa };
}

static void expect_words(const char *about, const char *words)
{
  if (!strstr(swathe_error(), words))
    fail_msg("%s: '%s' should say '%s'", about, swathe_error(), words);
}

// The default or given config's source.
static struct sw_gen_source emit(struct sw_gen *gen, const struct sw_gen_request *request,
                                 const char *config)
{
  char chosen[SW_CONFIG_TEXT];
  struct sw_gen_source source = { 0 };
  if (!config) {
    if (sw_gen_default(gen, request, chosen)) fail_msg("%s", swathe_error());
    config = chosen;
  }
  if (sw_gen_emit(gen, request, config, &source)) fail_msg("%s", swathe_error());
  return source;
}

// ---- Templates ---------------------------------------------------------------------------------

static void mistakes_name_file_and_line(void **state)
{
  (void)state;
  static const struct { const char *kernel, *words;
  } cases[] = {
    { "unknown_name",
      "templates/cpu/unknown_name.c:3: the template names 'TILE_M', which nothing" },
    { "lua_error", "templates/cpu/lua_error.c:4: attempt to index a nil value" },
    { "syntax", "templates/cpu/syntax.c:3: 'then' expected" },
    { "splice_lines", "templates/cpu/splice_lines.c:2: a splice may not span lines" },
    { "splice_open", "templates/cpu/splice_open.c:2: a splice $(...) without its closing" },
    { "splice_float", "templates/cpu/splice_float.c:3: $(...) gives a float" },
    { "sets_global", "templates/cpu/sets_global.c:2: the template sets 'count'" },
    { "missing_template", "templates/cpu/missing_template.c cannot be opened" },
    { "bad_default", "the default config knob=3 is not valid: knob=3 is not one of 1, 2" },
    { "bad_default_knob", "the default config gives a knob that is not declared" },
    { "bad_rule", "a rule reads 'tile_q', which nothing declares" },
    { "unfixed_rule", "a rule reads 'head_dim_v', which nothing declares" },
    { "bad_order", "'first' reads a size that is declared after it" },
    { "bad_fact", "'moon_phase', which facts.lua lacks" },
    { "../../../secret", "'templates/cpu/../../../secret.c' is no file of the generator" },
  };
  for (size_t i = 0; i < COUNT(cases); i++) {
    struct swathe_problem problem;
    struct sw_gen_source source;
    const struct sw_gen_request request = request_for(cases[i].kernel, "avx2", "", &problem);
    const enum swathe_status status = sw_gen_emit(fixture_gen, &request, "knob=1", &source);
    if (strncmp(cases[i].kernel, "bad_default", 11)) assert_int_equal(status, SWATHE_EMIT);
    else
      assert_int_equal(sw_gen_default(fixture_gen, &request, (char[SW_CONFIG_TEXT]){ 0 }),
                       SWATHE_EMIT);
    expect_words(cases[i].kernel, cases[i].words);
    expect_words(cases[i].kernel, cases[i].kernel);
  }
}

// The box: nothing leads out of it, and neither time nor memory runs away; it works on afterwards.
static void box_holds(void **state)
{
  (void)state;
  static const struct { const char *kernel, *words; } cases[] = {
    { "reaches_out", "reaches_out.c:2: the template names 'io'" },
    { "endless_loop", "endless_loop.c:2: the generator ran for more than" },
    { "hungry", "the generator needs more than 64 MiB" },
  };
  struct swathe_problem problem;
  for (size_t i = 0; i < COUNT(cases); i++) {
    struct sw_gen_source source;
    const struct sw_gen_request request = request_for(cases[i].kernel, "avx2", "", &problem);
    assert_int_equal(sw_gen_emit(fixture_gen, &request, "knob=1", &source), SWATHE_EMIT);
    expect_words(cases[i].kernel, cases[i].words);
  }
  const struct sw_gen_request request = request_for("band", "avx2", "window_left=10", &problem);
  struct sw_gen_source source = emit(fixture_gen, &request, NULL);
  sw_gen_source_free(&source);
}

// Names a template must not know, each tried in a splice of its own.
static void templates_know_no_world(void **state)
{
  (void)state;
  static const char *const names[] = {
    "io",           "os",           "package", "debug", "load",    "load_text",
    "read_text",    "require",      "dofile",  "pcall", "pairs",   "next",
    "setmetatable", "getmetatable", "rawset",  "_G",    "_ENV._G", "collectgarbage"
  };
  for (size_t i = 0; i < COUNT(names); i++) {
    struct swathe_problem problem;
    struct sw_gen_source source;
    const struct sw_gen_request request = request_for("reaches_out", "avx2", "", &problem);
    scratch_shell("printf '//@ local x = %s\\n' > '%s/templates/cpu/reaches_out.c'", names[i],
                  fixtures);
    assert_int_equal(sw_gen_emit(fixture_gen, &request, "knob=1", &source), SWATHE_EMIT);
    expect_words(names[i], "which nothing declares");
  }
}

// What no module of the generator may reach either, each tried in a models.lua of its own.
static void modules_know_no_world(void **state)
{
  (void)state;
  static const char *const reaches[] = {
    "io.open", "os.getenv", "debug.getinfo", "package.path", "dofile(1)", "loadfile(1)", "load(1)",
    "string.dump(1)", "math.random()", "math.randomseed(1)", "collectgarbage()", "print(1)",
    "warn(1)",
  };
  scratch_shell("mkdir '%s/world' && cp -r '%s/generator' '%s/world'", fixtures, fixtures,
                fixtures);
  for (size_t i = 0; i < COUNT(reaches); i++) {
    struct sw_gen *gen;
    char directory[300];
    snprintf(directory, sizeof directory, "%s/world", fixtures);
    scratch_shell("printf 'return { %s }' > '%s/generator/models.lua'", reaches[i], directory);
    assert_int_equal(sw_gen_open(directory, &gen), SWATHE_EMIT);
    expect_words(reaches[i], "generator/models.lua:1: attempt to");
    expect_words(reaches[i], "a nil value");
  }
}

static void directories_are_checked(void **state)
{
  (void)state;
  struct sw_gen *gen;
  assert_int_equal(sw_gen_open("/no/such/place", &gen), SWATHE_EMIT);
  expect_words("no directory", "/no/such/place/generator/emit.lua cannot be opened");

  scratch_shell("mkdir '%s/bad' && cp -r '%s/generator' '%s/bad'", fixtures, fixtures, fixtures);
  scratch_shell("printf '\\033Lua' > '%s/bad/generator/models.lua'", fixtures);
  char directory[300];
  snprintf(directory, sizeof directory, "%s/bad", fixtures);
  assert_int_equal(sw_gen_open(directory, &gen), SWATHE_EMIT);
  expect_words("bytecode", "attempt to load a binary chunk");

  scratch_shell("head -c 2000000 /dev/zero > '%s/bad/generator/models.lua'", fixtures);
  assert_int_equal(sw_gen_open(directory, &gen), SWATHE_EMIT);
  expect_words("large file", "models.lua is larger than");
}

// Every construct of the language, byte for byte: the same text on any machine.
static void emitted_text_is_as_written_down(void **state)
{
  (void)state;
  char path[1024], *expected = NULL;
  size_t bytes = 0;
  snprintf(path, sizeof path, "%s/tests/fixtures/generator/expected_band.c", source_directory());
  FILE *file = fopen(path, "rb");
  assert_non_null(file);
  assert_true(getdelim(&expected, &bytes, EOF, file) > 0);
  fclose(file);

  struct swathe_problem problem;
  const struct sw_gen_request request =
      request_for("band", "avx2", "q_heads=8,kv_heads=2,window_left=10", &problem);
  struct sw_gen_source source = emit(fixture_gen, &request, "pack=4,tile_k=16");
  const char *head_end = strstr(source.text, "// kernel_abi.h"),
             *body = strstr(source.text, "// prelude");
  assert_non_null(head_end);
  assert_non_null(body);
  const size_t head_bytes = (size_t)(head_end - source.text);
  assert_memory_equal(source.text, expected, head_bytes);   // what stands between is kernel_abi.h
  assert_string_equal(body, expected + head_bytes);
  sw_gen_source_free(&source);
  free(expected);
}

// ---- Compiler messages -------------------------------------------------------------------------

static unsigned line_of(const char *text, const char *part)
{
  unsigned line = 1;
  const char *found = strstr(text, part);
  assert_non_null(found);
  for (; text < found; text++) line += *text == '\n';
  return line;
}

static void logs_speak_of_template_lines(void **state)
{
  (void)state;
  struct swathe_problem problem;
  const struct sw_gen_request request = request_for("c_mistake", "avx2", "", &problem);
  struct sw_gen_source source = emit(fixture_gen, &request, "knob=1");
  const unsigned mistake = line_of(source.text, "int broken"),
                 third = line_of(source.text, "int before_3");

  static const struct { const char *log, *mapped;
  } cases[] = {
    { "/a b/x.c:%u:19: error: expected\n", "/a templates/cpu/c_mistake.c:4:19: error: expected\n" },
    { "x.c:%u: warning: w", "templates/cpu/c_mistake.c:4: warning: w" },
    { "forward.cu(%u): error: identifier", "templates/cpu/c_mistake.c:4: error: identifier" },
    { "/tmp/x.c: In function 'f':\n", "/tmp/x.c: In function 'f':\n" },
    { "cc1: all warnings being treated as errors\n",
      "cc1: all warnings being treated as errors\n" },
    { "x.c:999999:1: error: e\n", "x.c:999999:1: error: e\n" },
    { "x.c:0:1: error: e\n", "x.c:0:1: error: e\n" },
    { "x.c:%u", "x.c:%u" },
    { "x.c:%u error: e", "x.c:%u error: e" },
    { "x.cu(%u: error: e", "x.cu(%u: error: e" },
    { "", "" },
  };
  for (size_t i = 0; i < COUNT(cases); i++) {
    char log[256], expected[256];
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
    snprintf(log, sizeof log, cases[i].log, mistake);
    snprintf(expected, sizeof expected, cases[i].mapped, mistake);
#pragma GCC diagnostic pop
    char *mapped = sw_gen_map_log(&source, log);
    assert_string_equal(mapped, expected);
    free(mapped);
  }

  char log[64], *mapped;
  snprintf(log, sizeof log, "x.c:%u:1: note: n\nx.c:1:1: note: head\n", third);
  mapped = sw_gen_map_log(&source, log);
  assert_string_equal(
      mapped, "templates/cpu/c_mistake.c:2:1: note: n\ntemplates/cpu/head.c:1:1: note: head\n");
  free(mapped);
  sw_gen_source_free(&source);
}

static void every_line_has_an_origin(void **state)
{
  (void)state;
  struct swathe_problem problem;
  const struct sw_gen_request request = request_for("band", "avx2", "window_left=10", &problem);
  struct sw_gen_source source = emit(fixture_gen, &request, NULL);
  size_t lines = 0, origins = 0;
  for (const char *c = source.text; *c; c++) lines += *c == '\n';
  for (const char *c = source.origins; *c; c++) origins += *c == '\n';
  assert_int_equal(lines, origins);
  sw_gen_source_free(&source);
}

// ---- Spaces ------------------------------------------------------------------------------------

struct refusals {
  int64_t points;
  char text[512];
};

static void add_refusal(void *arg, const char *rule, int64_t points)
{
  struct refusals *refusals = arg;
  const size_t used = strlen(refusals->text);
  refusals->points += points;
  snprintf(refusals->text + used, sizeof refusals->text - used, "%lld %s; ", (long long)points,
           rule);
}

// Walks to the end; returns how many configs there are.  The configs, one a line, into `out` if
// not NULL.
static int64_t walk_all(struct sw_gen *gen, const struct sw_gen_request *request, bool exhaustive,
                        FILE *out, struct refusals *refusals)
{
  struct sw_gen_walk *walk;
  char config[SW_CONFIG_TEXT];
  int64_t count = 0;
  enum swathe_status status;

  if (sw_gen_walk_begin(gen, request, exhaustive, &walk)) fail_msg("%s", swathe_error());
  while (!(status = sw_gen_walk_next(walk, config))) {
    count++;
    if (out) fprintf(out, "%s\n", config);
  }
  if (status != SWATHE_NOT_FOUND) fail_msg("%s", swathe_error());
  assert_int_equal(sw_gen_walk_next(walk, config), SWATHE_NOT_FOUND);
  if (refusals) sw_gen_walk_refused(walk, add_refusal, refusals);
  sw_gen_walk_end(walk);
  return count;
}

static void small_spaces_are_counted_by_hand(void **state)
{
  (void)state;
  static const struct {
    const char *kernel, *problem;
    bool exhaustive;
    int64_t count;
    const char *refused;
  } cases[] = {
    { "band", "q_heads=4,window_left=10", true, 9, "3 pack divides the GQA ratio; " },
    { "band", "q_heads=4,window_left=10", false, 3,
      "1 pack divides the GQA ratio; 8 a step is no wider than the band; " },
    { "band", "q_heads=7,window_left=31", true, 3, "9 pack divides the GQA ratio; " },
    // early=2 and early=3 each leave one value of late; mixed is 6 for early=3, late=3
    { "shortcut", "", true, 8, "8 early is 1, or both are equal; 2 mixed is not 6; " },
  };
  for (size_t i = 0; i < COUNT(cases); i++) {
    struct swathe_problem problem;
    struct refusals refusals = { 0 };
    const struct sw_gen_request request =
        request_for(cases[i].kernel, "generic", cases[i].problem, &problem);
    assert_int_equal(walk_all(fixture_gen, &request, cases[i].exhaustive, NULL, &refusals),
                     cases[i].count);
    assert_string_equal(refusals.text, cases[i].refused);
  }
}

static void configs_come_in_declared_order(void **state)
{
  (void)state;
  struct swathe_problem problem;
  char *text = NULL;
  size_t bytes = 0;
  const struct sw_gen_request request =
      request_for("band", "avx2", "q_heads=2,window_left=15", &problem);
  FILE *out = open_memstream(&text, &bytes);
  walk_all(fixture_gen, &request, false, out, NULL);
  fclose(out);
  assert_string_equal(text,
                      "tile_k=8,pack=1\ntile_k=8,pack=2\ntile_k=16,pack=1\ntile_k=16,pack=2\n");
  free(text);
}

// B27: 6^12 points, 10 000 valid: every point is accounted for, within the box's memory and steps.
static void huge_space_is_accounted_for(void **state)
{
  (void)state;
  struct swathe_problem problem;
  struct refusals refusals = { 0 };
  const struct sw_gen_request request = request_for("huge", "avx2", "", &problem);
  assert_int_equal(walk_all(fixture_gen, &request, false, NULL, &refusals), 10000);
  assert_int_equal(refusals.points, INT64_C(2176782336) - 10000);
}

// B27: 6^12 valid points: only a lazy walk gives the first ones; several walks do not disturb each
// other.
static void walks_are_lazy(void **state)
{
  (void)state;
  struct swathe_problem problem;
  char first[SW_CONFIG_TEXT], config[SW_CONFIG_TEXT];
  struct sw_gen_walk *walk, *other;
  const struct sw_gen_request request = request_for("endless", "avx2", "", &problem);
  assert_int_equal(sw_gen_walk_begin(fixture_gen, &request, false, &walk), SWATHE_OK);
  assert_int_equal(sw_gen_walk_next(walk, first), SWATHE_OK);
  for (int i = 0; i < 1000; i++) assert_int_equal(sw_gen_walk_next(walk, config), SWATHE_OK);
  assert_string_equal(
      config, "x1=1,x2=1,x3=1,x4=1,x5=1,x6=1,y1=1,y2=1,y3=5,y4=4,y5=5,y6=5"); // 1000 in base 6

  assert_int_equal(sw_gen_walk_begin(fixture_gen, &request, false, &other), SWATHE_OK);
  assert_int_equal(sw_gen_walk_next(other, config), SWATHE_OK);
  assert_string_equal(config, first);
  sw_gen_walk_end(walk);
  assert_int_equal(sw_gen_walk_next(other, config), SWATHE_OK);
  sw_gen_walk_end(other);
}

static int compare_lines(const void *a, const void *b)
{
  return strcmp(*(char *const *)a, *(char *const *)b);
}

struct line_list {
  char *text, **lines;
  size_t count;
};

static struct line_list sorted_configs(struct sw_gen *gen, const struct sw_gen_request *request)
{
  struct line_list list = { 0 };
  size_t bytes = 0;
  FILE *out = open_memstream(&list.text, &bytes);
  const int64_t count = walk_all(gen, request, true, out, NULL);
  fclose(out);
  assert_true(count > 1);
  list.lines = calloc((size_t)count, sizeof *list.lines);
  assert_non_null(list.lines);
  for (char *line = strtok(list.text, "\n"); line; line = strtok(NULL, "\n"))
    list.lines[list.count++] = line;
  qsort(list.lines, list.count, sizeof *list.lines, compare_lines);
  return list;
}

static uint64_t random_state = 20260101;
static size_t random_below(size_t bound)
{
  random_state = random_state * 6364136223846793005u + 1442695040888963407u;   // Knuth's MMIX
  return (size_t)(random_state >> 33) % bound;
}

// A point whose every knob has the value of one valid config or another: some are valid, most are
// not.
static void crossed_config(const struct line_list *list, char *config)
{
  const char *parents[3], *from[3];
  for (int i = 0; i < 3; i++) from[i] = parents[i] = list->lines[random_below(list->count)];
  *config = 0;
  while (*from[0]) {
    const char *knob = from[random_below(8) ? 0 : 1 + random_below(2)];
    strncat(config, knob, strcspn(knob, ","));
    for (int i = 0; i < 3; i++)
      from[i] += strcspn(from[i], ",") + (from[i][strcspn(from[i], ",")] == ',');
    if (*from[0]) strcat(config, ",");
  }
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { POINTS = 2500 };   // Lua is many times slower there
#else
enum { POINTS = 20000 };
#endif

// B27: the walk and the predicate are one: on 10^5 points they say the same.
static void walk_and_check_agree(void **state)
{
  (void)state;
  struct { struct sw_gen *gen; const char *kernel, *isa, *problem; } cases[] = {
    { fixture_gen, "huge", "avx2", "" },
    { fixture_gen, "shortcut", "avx2", "" },
    { real_gen, "forward", "avx2", "q_heads=8,window_left=127" },
    { real_gen, "backward", "avx2", "q_heads=8,window_left=127" },
    { real_gen, "forward", "sm_80", "q_heads=8,window_left=127,target=cuda,dtype=f16" },
  };
  for (size_t i = 0; i < COUNT(cases); i++) {
    struct swathe_problem problem;
    const struct sw_gen_request request =
        request_for(cases[i].kernel, cases[i].isa, cases[i].problem, &problem);
    const struct line_list list = sorted_configs(cases[i].gen, &request);
    int valid = 0;
    for (int point = 0; point < POINTS; point++) {
      char config[SW_CONFIG_TEXT], checked[SW_CONFIG_TEXT];
      crossed_config(&list, config);
      const char *key = config;
      const bool walked = bsearch(&key, list.lines, list.count, sizeof *list.lines, compare_lines);
      const enum swathe_status status = sw_gen_check(cases[i].gen, &request, config, checked);
      if (status != (walked ? SWATHE_OK : SWATHE_BAD_CONFIG))
        fail_msg("%s %s: walked %d, checked %d %s", cases[i].kernel, config, walked, status,
                 swathe_error());
      if (walked) assert_string_equal(checked, config);
      valid += walked;
    }
    if (i == 0) assert_in_range(valid, POINTS / 20, POINTS / 20 * 19);   // both answers were seen
    free(list.lines);
    free(list.text);
  }
}

// ---- Configs from outside ----------------------------------------------------------------------

static void hostile_configs_are_refused(void **state)
{
  (void)state;
  static const struct { const char *config, *words; } cases[] = {
    { "", "the config is empty" },
    { "../../x", "'../../x' in the config is not name=number" },
    { "tile_k=8;drop table pick", "is not name=number" },
    { "tile_k=8", "the config lacks 'pack'" },
    { "tile_k=8,pack=1,", "'' in the config is not name=number" },
    { ",tile_k=8,pack=1", "'' in the config is not name=number" },
    { "tile_k=8,pack=1,pack=1", "the config gives 'pack' twice" },
    { "tile_k=8,pack=1,warp=4", "there is no knob 'warp'; there are tile_k, pack" },
    { "tile_k=8,pack=3", "pack=3 is not one of 1, 2, 4, 8" },
    { "tile_k=8,pack=8", "refused: pack divides the GQA ratio" },
    { "tile_k=08,pack=1", "tile_k=08 is not one of 8, 16, 32" },
    { "tile_k=8.0,pack=1", "is not name=number" },
    { "tile_k=-8,pack=1", "tile_k=-8 is not one of" },
    { "tile_k=18446744073709551624,pack=1", "tile_k=18446744073709551624 is not one of" },
    { "tile_k=8,pack=99999999999999999999999999999999999999999999999", "is not one of 1, 2, 4, 8" },
    { "tile_k=0x8,pack=1", "is not name=number" },
    { "tile_k= 8,pack=1", "is not name=number" },
    { "TILE_K=8,pack=1", "is not name=number" },
    { "tile_k=8,pack=1\n", "'pack=1?' in the config is not name=number" },
    { "tile_k=8,pack=1\x1b[2J", "'pack=1?[2J' in the config is not name=number" },
    { "tile_k=%d,pack=%s%s%n", "'tile_k=%d' in the config is not name=number" },
    { "score_bytes=32,tile_k=8,pack=1", "there is no knob 'score_bytes'" },
    { "gqa=4,tile_k=8,pack=1", "there is no knob 'gqa'" },
    { "__index=1,tile_k=8,pack=1", "is not name=number" },
  };
  struct swathe_problem problem;
  const struct sw_gen_request request =
      request_for("band", "avx2", "q_heads=4,window_left=10", &problem);
  char config[SW_CONFIG_TEXT] = "untouched";
  struct sw_gen_source source = { 0 };
  for (size_t i = 0; i < COUNT(cases); i++) {
    assert_int_equal(sw_gen_check(fixture_gen, &request, cases[i].config, config),
                     SWATHE_BAD_CONFIG);
    expect_words(cases[i].config, cases[i].words);
    assert_int_equal(sw_gen_emit(fixture_gen, &request, cases[i].config, &source),
                     SWATHE_BAD_CONFIG);
    expect_words(cases[i].config, cases[i].words);
    assert_string_equal(config, "untouched");
    assert_null(source.text);
  }

  char *endless = malloc(1 << 20);
  memset(endless, 'a', (1 << 20) - 1);
  endless[(1 << 20) - 1] = 0;
  assert_int_equal(sw_gen_check(fixture_gen, &request, endless, config), SWATHE_BAD_CONFIG);
  expect_words("a megabyte", "the config is longer than 511 bytes");
  free(endless);
}

static void configs_travel_in_declared_order(void **state)
{
  (void)state;
  struct swathe_problem problem;
  const struct sw_gen_request request =
      request_for("band", "avx2", "q_heads=4,window_left=10", &problem);
  char config[SW_CONFIG_TEXT];
  assert_int_equal(sw_gen_check(fixture_gen, &request, "pack=2,tile_k=32", config), SWATHE_OK);
  assert_string_equal(config,
                      "tile_k=32,pack=2"); // a `prefer` rule refuses it, which is no reason here
  assert_int_equal(sw_gen_default(fixture_gen, &request, config), SWATHE_OK);
  assert_string_equal(config, "tile_k=8,pack=1");
}

struct size_list {
  char text[256];
};

static void add_size(void *arg, const char *name, int64_t value)
{
  struct size_list *list = arg;
  const size_t used = strlen(list->text);
  snprintf(list->text + used, sizeof list->text - used, "%s %lld; ", name, (long long)value);
}

// Where there is nothing to choose the empty config is the only one.
static void kernels_without_knobs_have_one_config(void **state)
{
  (void)state;
  struct swathe_problem problem;
  const struct sw_gen_request request =
      request_for("no_knobs", "avx2", "window_left=10", &problem);
  char config[SW_CONFIG_TEXT] = "untouched";
  assert_int_equal(walk_all(fixture_gen, &request, false, NULL, NULL), 1);
  assert_int_equal(sw_gen_check(fixture_gen, &request, "knob=1", config), SWATHE_BAD_CONFIG);
  expect_words("knob=1", "there is no knob 'knob', nor any");
  assert_int_equal(sw_gen_check(fixture_gen, &request, "", config), SWATHE_OK);
  assert_string_equal(config, "");
  strcpy(config, "untouched");
  assert_int_equal(sw_gen_default(fixture_gen, &request, config), SWATHE_OK);
  assert_string_equal(config, "");
}

static void sizes_are_told_in_declared_order(void **state)
{
  (void)state;
  static const struct { const char *kernel, *config, *sizes; } cases[] = {
    { "band", "tile_k=16,pack=4", "score_bytes 256; " },
    { "no_knobs", "", "double_window 20; window_again 10; " },
    { "endless", "x1=1,x2=1,x3=1,x4=1,x5=1,x6=1,y1=1,y2=1,y3=1,y4=1,y5=1,y6=1", "" },
  };
  for (size_t i = 0; i < COUNT(cases); i++) {
    struct swathe_problem problem;
    struct size_list list = { "" };
    const struct sw_gen_request request =
        request_for(cases[i].kernel, "avx2", "q_heads=4,window_left=10", &problem);
    assert_int_equal(sw_gen_sizes(fixture_gen, &request, cases[i].config, add_size, &list),
                     SWATHE_OK);
    assert_string_equal(list.text, cases[i].sizes);
    assert_int_equal(sw_gen_sizes(fixture_gen, &request, "tile_k=3", add_size, &list),
                     SWATHE_BAD_CONFIG);
  }
}

static void requests_are_checked(void **state)
{
  (void)state;
  static const struct {
    const char *kernel, *isa, *problem;
    enum swathe_status status;
    const char *words;
  } cases[] = {
    { "sideways", "avx2", "", SWATHE_BAD_USE, "there is no kernel 'sideways' for target cpu" },
    { "../forward", "avx2", "", SWATHE_BAD_USE, "there is no kernel" },
    { "forward", "sse9", "", SWATHE_BAD_USE, "target cpu has no isa 'sse9'; there are avx512" },
    { "forward", "avx2", "dtype=f16", SWATHE_UNSUPPORTED,
      "target cpu has no kernels for f16; there are f32, bf16" },
    { "forward", "avx2", "target=cuda,dtype=bf16", SWATHE_BAD_USE,
      "target cuda has no isa 'avx2'; there are sm_120" },
    { "forward", "sm_90", "target=cuda", SWATHE_UNSUPPORTED,
      "target cuda has no kernels for f32; there are bf16, f16" },
  };
  char config[SW_CONFIG_TEXT];
  struct swathe_problem problem;
  for (size_t i = 0; i < COUNT(cases); i++) {
    const struct sw_gen_request request =
        request_for(cases[i].kernel, cases[i].isa, cases[i].problem, &problem);
    assert_int_equal(sw_gen_default(real_gen, &request, config), cases[i].status);
    expect_words(cases[i].kernel, cases[i].words);
  }
  const struct sw_gen_request request = request_for("forward", "avx2", "", &problem);
  problem.kv_heads = 0;
  assert_int_equal(sw_gen_default(real_gen, &request, config), SWATHE_BAD_PROBLEM);
}

// ---- The real kernels --------------------------------------------------------------------------

static const char *const kernels[] = { "forward", "backward" };

struct isa_names {
  char names[8][16];
  size_t count;
};

static void add_isa(void *arg, const char *isa, const char *flags)
{
  struct isa_names *isas = arg;
  (void)flags;
  assert_true(isas->count < COUNT(isas->names));
  snprintf(isas->names[isas->count++], sizeof isas->names[0], "%s", isa);
}

// The kernels of a target.
static size_t kernel_count(enum swathe_target target)
{
  return target == SWATHE_CPU ? COUNT(kernels) : 1;
}

// Every kernel and isa has a valid default for this problem, and the walk agrees that it is one.
static void expect_target_defaults(const char *name, const struct swathe_problem *problem)
{
  struct isa_names isas = { 0 };
  assert_int_equal(sw_gen_isas(real_gen, problem->target, add_isa, &isas), SWATHE_OK);
  assert_true(isas.count >= 4);
  for (size_t k = 0; k < kernel_count(problem->target); k++)
    for (size_t i = 0; i < isas.count; i++) {
      char config[SW_CONFIG_TEXT], checked[SW_CONFIG_TEXT];
      const struct sw_gen_request request = { problem, kernels[k], isas.names[i] };
      if (sw_gen_default(real_gen, &request, config)) fail_msg("%s: %s", name, swathe_error());
      if (sw_gen_check(real_gen, &request, config, checked))
        fail_msg("%s: %s", name, swathe_error());
      assert_string_equal(config, checked);
    }
}

static void expect_defaults(const char *name, const struct swathe_problem *problem)
{
  struct swathe_problem for_cuda = *problem;
  expect_target_defaults(name, problem);
  for_cuda.target = SWATHE_CUDA;
  if (for_cuda.dtype == SWATHE_F32) for_cuda.dtype = SWATHE_F16;
  expect_target_defaults(name, &for_cuda);
}

static void expect_model_defaults(void *arg, const struct swathe_model *model)
{
  (void)arg;
  expect_defaults(model->name, &model->problem);
}

static void defaults_are_valid(void **state)
{
  (void)state;
  static const int head_dims[] = { 1, 3, 40, 64, 72, 100, 128, 255, 256 };
  static const int gqas[] = { 1, 2, 3, 5, 8, 12, 64, 71, 127 };
  static const char *const windows[] = { "0", "1", "127", "4095", "2147483647", "unlimited" };
  assert_int_equal(sw_gen_models(real_gen, expect_model_defaults, NULL), SWATHE_OK);
  for (size_t d = 0; d < COUNT(head_dims); d++)
    for (size_t g = 0; g < COUNT(gqas); g++) {
      struct swathe_problem problem;
      char text[200];
      const char *left = windows[(d + g) % COUNT(windows)], *right = windows[d % COUNT(windows)];
      snprintf(text, sizeof text,
               "q_heads=%d,head_dim_qk=%d,head_dim_v=%d,window_left=%s,window_right=%s,"
               "softcap=%zu,sinks=%zu,dtype=%s",
               gqas[g], head_dims[d], head_dims[(d * 5 + g) % COUNT(head_dims)], left, right, d % 2,
               g % 2, d % 3 ? "f32" : "bf16");
      request_for("forward", "avx2", text, &problem);
      expect_defaults(text, &problem);
    }
}

static void set_target(struct swathe_problem *problem, enum swathe_target target)
{
  problem->target = target;
  if (target == SWATHE_CUDA) problem->dtype = SWATHE_F16;
}

static void find_counted(void *arg, const char *name, int64_t value)
{
  if (!strcmp(name, "counted_permille")) *(int64_t *)arg = value;
}

// With a narrow window and many heads to a key head few products are made in vain: tiles fit the
// band.
static void tiles_fit_the_band(void **state)
{
  (void)state;
  static const struct { const char *problem; int64_t most; } rows[] = {
    { "q_heads=64,kv_heads=8,window_left=127,sinks=1", 1200 },
    { "q_heads=64,kv_heads=8,head_dim_qk=192,head_dim_v=128,window_left=127,sinks=1", 1250 },
    { "q_heads=32,kv_heads=16,head_dim_qk=128,head_dim_v=128,window_left=1023", 1150 },
    { "q_heads=12,kv_heads=12,window_left=64,window_right=64", 1500 },
  };
  struct isa_names isas = { 0 };
  assert_int_equal(sw_gen_isas(real_gen, SWATHE_CUDA, add_isa, &isas), SWATHE_OK);
  for (size_t r = 0; r < 2 * COUNT(rows); r++)
    for (size_t i = 0; i < isas.count; i++) {
      const char *kernel = r % 2 ? "backward" : "forward";
      struct swathe_problem problem;
      char config[SW_CONFIG_TEXT];
      int64_t counted = 0;
      const struct sw_gen_request request =
          request_for(kernel, isas.names[i], rows[r / 2].problem, &problem);
      set_target(&problem, SWATHE_CUDA);
      assert_int_equal(sw_gen_default(real_gen, &request, config), SWATHE_OK);
      assert_int_equal(sw_gen_sizes(real_gen, &request, config, find_counted, &counted),
                       SWATHE_OK);
      if (counted < 1000 || counted > rows[r / 2].most)
        fail_msg("%s of %s for %s: %lld", kernel, rows[r / 2].problem, isas.names[i],
                 (long long)counted);
    }
}

// Products of cpu tiles, worked out by hand: idle lanes, a tile's wider band, filled-up dims.
static void products_of_cpu_tiles_are_counted(void **state)
{
  (void)state;
  static const char band[] = "q_heads=3,kv_heads=1,head_dim_qk=16,head_dim_v=16,window_left=15";
  static const char all[] =
      "q_heads=1,kv_heads=1,head_dim_qk=16,head_dim_v=16,window_left=unlimited";
  static const struct {
    const char *kernel, *problem, *config;
    int64_t counted;
  } rows[] = {
    // 8 lanes hold 2 tokens of 3 heads, which see 17 keys: 20 scored by fours, 17 weighed;
    // 8 (20 * 16 + 17 * 16) of 2 * 3 * 16 * 32
    { "forward", band, "vectors=1,pack=3,strip=1,rows_k=4,rows_d=4,block_k=96,ring_blocks=64,"
      "prefetch=0,stream=0", 1541 },
    { "forward", all, "vectors=1,pack=1,strip=1,rows_k=4,rows_d=4,block_k=96,ring_blocks=64,"
      "prefetch=0,stream=0", 1000 },
    // 20 keys for all five products: 8 * 20 of 2 * 3 * 16
    { "backward", band, "vectors=1,pack=3,panels=2,rows_k=4,rows_d=4,rows_j=4,vectors_d=1,"
      "block_k=96,ring_blocks=128,pairs=0", 1666 },
    // by twelves: 24 keys
    { "backward", band, "vectors=1,pack=3,panels=1,rows_k=4,rows_d=4,rows_j=12,vectors_d=1,"
      "block_k=96,ring_blocks=128,pairs=0", 2000 },
  };
  for (size_t r = 0; r < COUNT(rows); r++) {
    struct swathe_problem problem;
    int64_t counted = 0;
    const struct sw_gen_request request =
        request_for(rows[r].kernel, "avx2", rows[r].problem, &problem);
    if (sw_gen_sizes(real_gen, &request, rows[r].config, find_counted, &counted))
      fail_msg("%s: %s", rows[r].config, swathe_error());
    if (counted != rows[r].counted)
      fail_msg("%s: %lld, not %lld", rows[r].config, (long long)counted,
               (long long)rows[r].counted);
  }
}

// One field changed at a time: what a kernel does not depend on must not change its text.
static void text_follows_the_problem(void **state)
{
  (void)state;
  static const char base[] =
      "q_heads=8,kv_heads=2,head_dim_qk=64,head_dim_v=64,window_left=127,softcap=50,sinks=1";
  static const struct { const char *change; bool differs;
  } cases[] = {
    { "kv_heads=1,q_heads=4", false },
    { "kv_heads=16,q_heads=64", false },
    { "softcap=30", false },
    { "scale=0.3", false },
    { "layout=zigzag", false },
    { "ranks=8", false },
    { "tokens_per_rank=131072", false },
    { "kv_heads=1", true },
    { "q_heads=2", true },
    { "head_dim_qk=72", true },
    { "head_dim_v=72", true },
    { "window_left=128", true },
    { "window_left=unlimited", true },
    { "window_left=0", true },
    { "window_right=1", true },
    { "window_right=unlimited", true },
    { "dtype=bf16", true },
    { "sinks=0", true },
    { "softcap=0", true },
  };
  static const struct {
    const char *kernel;
    enum swathe_target target;
    const char *isa, *other_isa;
  } rows[] = {
    { "forward", SWATHE_CPU, "avx2", "avx512" },
    { "backward", SWATHE_CPU, "avx2", "avx512" },
    { "forward", SWATHE_CUDA, "sm_90", "sm_80" },
  };
  for (size_t k = 0; k < COUNT(rows); k++) {
    struct swathe_problem problem, changed;
    const struct sw_gen_request request = request_for(rows[k].kernel, rows[k].isa, base, &problem);
    set_target(&problem, rows[k].target);
    struct sw_gen_source source = emit(real_gen, &request, NULL);
    for (size_t i = 0; i < COUNT(cases); i++) {
      struct sw_gen_request other = request_for(rows[k].kernel, rows[k].isa, base, &changed);
      set_target(&changed, rows[k].target);
      if (swathe_problem_parse(cases[i].change, &changed)) fail_msg("%s", swathe_error());
      other.problem = &changed;
      struct sw_gen_source text = emit(real_gen, &other, NULL);
      if (!!strcmp(text.text, source.text) != cases[i].differs)
        fail_msg("%s: %s should %schange the text", rows[k].kernel, cases[i].change,
                 cases[i].differs ? "" : "not ");
      sw_gen_source_free(&text);
    }
    const struct sw_gen_request wide = { &problem, rows[k].kernel, rows[k].other_isa };
    struct sw_gen_source text = emit(real_gen, &wide, NULL);
    assert_string_not_equal(text.text, source.text);
    if (rows[k].target == SWATHE_CPU) assert_string_not_equal(text.flags, source.flags);
    sw_gen_source_free(&text);
    sw_gen_source_free(&source);
  }
}

// Another state, another locale, another environment: the same bytes, and no trace of this
// machine in them.
static void text_is_the_same_everywhere(void **state)
{
  (void)state;
  struct sw_gen *other;
  struct swathe_problem problem;
  char host[256] = "";
  for (size_t k = 0; k < COUNT(kernels); k++) {
    const struct sw_gen_request request =
        request_for(kernels[k], "avx512", "q_heads=8,window_left=1023,softcap=50", &problem);
    struct sw_gen_source here = emit(real_gen, &request, NULL);
    const bool translated = setlocale(LC_ALL, "de_DE.UTF-8") || setlocale(LC_ALL, "fr_FR.UTF-8");
    (void)translated;
    assert_int_equal(sw_gen_open(source_directory(), &other), SWATHE_OK);
    struct sw_gen_source there = emit(other, &request, NULL);
    setlocale(LC_ALL, "C");
    assert_string_equal(here.text, there.text);
    assert_string_equal(here.flags, there.flags);
    assert_string_equal(here.origins, there.origins);

    gethostname(host, sizeof host - 1);
    if (strlen(host) > 4) assert_null(strstr(here.text, host));
    assert_null(strstr(here.text, source_directory()[0] == '/' ? source_directory() : "/home/"));
    sw_gen_source_free(&here);
    sw_gen_source_free(&there);
    sw_gen_close(other);
  }
}

// The banner's command says all that is needed to emit the same text again.
static void banner_command_makes_it_again(void **state)
{
  (void)state;
  static const struct { const char *target, *isa, *dtype; } rows[] = {
    { "cpu", "avx2", "bf16" }, { "cuda", "sm_80", "bf16" }, { "cuda", "sm_120", "f16" },
  };
  for (size_t i = 0; i < COUNT(rows); i++) {
    struct swathe_problem problem, again;
    char shape[300], line[1200], kernel[32], target[32], option[16], isa[32];
    char text[600], config[512];
    snprintf(shape, sizeof shape,
             "q_heads=24,kv_heads=8,head_dim_qk=192,head_dim_v=128,window_left=unlimited,"
             "window_right=3,sinks=1,softcap=30,ranks=8,target=%s,dtype=%s",
             rows[i].target, rows[i].dtype);
    const struct sw_gen_request request = request_for("forward", rows[i].isa, shape, &problem);
    struct sw_gen_source source = emit(real_gen, &request, NULL);
    const char *command = strstr(source.text, "swathe emit ");
    assert_non_null(command);
    snprintf(line, sizeof line, "%.*s", (int)strcspn(command, "\n"), command);
    assert_int_equal(
        sscanf(line, "swathe emit %31s --target %31s --%15s %31s --problem %511s --config %511s",
               kernel, target, option, isa, text, config),
        6);
    assert_string_equal(option, strcmp(target, "cuda") ? "isa" : "arch");
    assert_string_equal(target, rows[i].target);
    assert_string_equal(isa, rows[i].isa);
    strcat(text, ",target=");
    strcat(text, target);
    const struct sw_gen_request repeated = request_for(kernel, isa, text, &again);
    struct sw_gen_source same = emit(real_gen, &repeated, config);
    assert_string_equal(same.text, source.text);
    sw_gen_source_free(&same);
    sw_gen_source_free(&source);
  }
}

// ---- Presets -----------------------------------------------------------------------------------

struct preset_row {
  const char *name;
  int q_heads, kv_heads, head_dim_qk, head_dim_v;
  int64_t window_left, window_right;
  bool sinks;
  double softcap, scale;
  int layers, swa_layers;
  bool seen;
};

static void find_preset(void *arg, const struct swathe_model *model)
{
  struct preset_row *rows = arg;
  const struct swathe_problem *p = &model->problem;
  assert_true(*model->family && *model->source && model->note);
  assert_true(model->swa_layers > 0 && model->swa_layers <= model->layers);
  for (; rows->name; rows++) {
    if (strcmp(rows->name, model->name)) continue;
    if (rows->seen) fail_msg("%s twice", model->name);
    rows->seen = true;
    const struct preset_row found = {
      model->name, p->q_heads, p->kv_heads, p->head_dim_qk, p->head_dim_v, p->window_left,
      p->window_right, p->sinks, p->softcap, p->scale, model->layers, model->swa_layers, true,
    };
    if (found.q_heads != rows->q_heads || found.kv_heads != rows->kv_heads ||
        found.head_dim_qk != rows->head_dim_qk || found.head_dim_v != rows->head_dim_v ||
        found.window_left != rows->window_left || found.window_right != rows->window_right ||
        found.sinks != rows->sinks || found.softcap != rows->softcap ||
        found.scale != rows->scale || found.layers != rows->layers ||
        found.swa_layers != rows->swa_layers || p->dtype != SWATHE_BF16)
      fail_msg("%s differs from its published numbers", model->name);
    return;
  }
  fail_msg("%s is not in the table", model->name);
}

static void presets_are_as_published(void **state)
{
  (void)state;
  const double scale_27b = 1 / sqrt(168);
  struct preset_row rows[] = {
    { "gpt-oss-20b", 64, 8, 64, 64, 127, 0, true, 0, 0, 24, 12, false },
    { "gpt-oss-120b", 64, 8, 64, 64, 127, 0, true, 0, 0, 36, 18, false },
    { "gemma-2-2b", 8, 4, 256, 256, 4095, 0, false, 50, 0, 26, 13, false },
    { "gemma-2-9b", 16, 8, 256, 256, 4095, 0, false, 50, 0, 42, 21, false },
    { "gemma-2-27b", 32, 16, 128, 128, 4095, 0, false, 50, 1.0 / 12, 46, 23, false },
    { "gemma-3-270m", 4, 1, 256, 256, 511, 0, false, 0, 0, 18, 15, false },
    { "gemma-3-1b", 4, 1, 256, 256, 511, 0, false, 0, 0, 26, 22, false },
    { "gemma-3-4b", 8, 4, 256, 256, 1023, 0, false, 0, 0, 34, 29, false },
    { "gemma-3-12b", 16, 8, 256, 256, 1023, 0, false, 0, 0, 48, 40, false },
    { "gemma-3-27b", 32, 16, 128, 128, 1023, 0, false, 0, scale_27b, 62, 52, false },
    { "gemma-4-e2b", 8, 1, 256, 256, 511, 0, false, 0, 0, 35, 28, false },
    { "gemma-4-e4b", 8, 2, 256, 256, 511, 0, false, 0, 0, 42, 35, false },
    { "gemma-4-31b", 32, 16, 256, 256, 1023, 0, false, 0, 0, 60, 50, false },
    { "gemma-4-26b-a4b", 16, 8, 256, 256, 1023, 0, false, 0, 0, 30, 25, false },
    { "mimo-v2-flash", 64, 8, 192, 128, 127, 0, true, 0, 0, 48, 39, false },
    { "mistral-7b-v0.1", 32, 8, 128, 128, 4095, 0, false, 0, 0, 32, 32, false },
    { "olmo-3-7b", 32, 32, 128, 128, 4095, 0, false, 0, 0, 32, 24, false },
    { "olmo-3-32b", 40, 8, 128, 128, 4095, 0, false, 0, 0, 64, 48, false },
    { "command-r7b", 32, 8, 128, 128, 4095, 0, false, 0, 0, 32, 24, false },
    { "step-3.5-flash", 96, 8, 128, 128, 511, 0, false, 0, 0, 45, 33, false },
    { "modernbert-base", 12, 12, 64, 64, 64, 64, false, 0, 0, 22, 14, false },
    { 0 },
  };
  if (sw_gen_models(real_gen, find_preset, rows)) fail_msg("%s", swathe_error());
  for (const struct preset_row *row = rows; row->name; row++)
    if (!row->seen) fail_msg("%s is missing", row->name);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(mistakes_name_file_and_line),
    cmocka_unit_test(box_holds),
    cmocka_unit_test(templates_know_no_world),
    cmocka_unit_test(modules_know_no_world),
    cmocka_unit_test(directories_are_checked),
    cmocka_unit_test(emitted_text_is_as_written_down),
    cmocka_unit_test(logs_speak_of_template_lines),
    cmocka_unit_test(every_line_has_an_origin),
    cmocka_unit_test(small_spaces_are_counted_by_hand),
    cmocka_unit_test(configs_come_in_declared_order),
    cmocka_unit_test(huge_space_is_accounted_for),
    cmocka_unit_test(walks_are_lazy),
    cmocka_unit_test(walk_and_check_agree),
    cmocka_unit_test(hostile_configs_are_refused),
    cmocka_unit_test(configs_travel_in_declared_order),
    cmocka_unit_test(kernels_without_knobs_have_one_config),
    cmocka_unit_test(sizes_are_told_in_declared_order),
    cmocka_unit_test(requests_are_checked),
    cmocka_unit_test(defaults_are_valid),
    cmocka_unit_test(tiles_fit_the_band),
    cmocka_unit_test(products_of_cpu_tiles_are_counted),
    cmocka_unit_test(text_follows_the_problem),
    cmocka_unit_test(text_is_the_same_everywhere),
    cmocka_unit_test(banner_command_makes_it_again),
    cmocka_unit_test(presets_are_as_published),
  };
  return cmocka_run_group_tests(tests, open_generators, close_generators);
}
