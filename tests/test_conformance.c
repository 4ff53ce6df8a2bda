// test_conformance.c: what each primitive of the CUDA prelude yields, compared with the results
// that stand in conformance/expected.txt.  They were made on the emulated driver; on a device this
// test tells whether the emulator reads the instructions as the device does.
//
// Environment:
//   TEST_LIBCUDA             the driver; empty: libcuda.so.1
//   TEST_CONFORMANCE_WRITE   a file to which the results go instead of being compared
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_driver.h"
#include "scratch.h"

enum { IN_WORDS = 4096, OUT_WORDS = 512, SHARED_BYTES = 16384 };

enum kind {
  BITS,        // anything
  REALS,       // floats of all sizes, with zeros, infinities, NaN and denormals among them
  TAME,        // floats from -8 to 8
  WHOLE,       // pairs of elements that are small whole numbers
  FRACTIONS,   // pairs of elements from -2 to 2
};

// How near the results must be: bits; units in the last place of a float; or in all.
enum nearness { EQUAL, ULPS, WITHIN };

static const struct primitive {
  const char *name;
  enum kind kind;
  int words;
  enum nearness nearness;
  double allowed;
} primitives[] = {
  { "copy_async", BITS, 256, EQUAL, 0 },
  { "copy_async_word", BITS, 64, EQUAL, 0 },
  { "copy_groups", BITS, 512, EQUAL, 0 },
  { "shared_words", BITS, 256, EQUAL, 0 },
  { "shared_chunks", BITS, 256, EQUAL, 0 },
  { "some_sync", BITS, 32, EQUAL, 0 },
  { "load_elements", BITS, 256, EQUAL, 0 },
  { "load_global", BITS, 256, EQUAL, 0 },
  { "store_elements", BITS, 288, EQUAL, 0 },
  { "load_matrices", BITS, 256, EQUAL, 0 },
  { "load_matrices_transposed", BITS, 256, EQUAL, 0 },
  { "operand_a", BITS, 256, EQUAL, 0 },
  { "operands_b", BITS, 256, EQUAL, 0 },
  { "operands_b_transposed", BITS, 256, EQUAL, 0 },
  { "multiply_whole", WHOLE, 256, EQUAL, 0 },
  { "multiply_real", FRACTIONS, 256, WITHIN, 1e-3 },
  { "join", REALS, 512, EQUAL, 0 },
  { "narrow", REALS, 512, EQUAL, 0 },
  { "narrow_bf16", REALS, 512, EQUAL, 0 },
  { "widen", BITS, 512, EQUAL, 0 },
  { "exp2_of", TAME, 512, ULPS, 3 },
  { "log2_of", TAME, 512, WITHIN, 1e-6 },
  { "reciprocal", TAME, 512, ULPS, 2 },
  { "tanh_of", TAME, 512, WITHIN, 1e-6 },
  { "larger", REALS, 512, EQUAL, 0 },
  { "exchange", BITS, 64, EQUAL, 0 },
  { "row_largest", TAME, 64, EQUAL, 0 },
  { "row_sum", TAME, 64, EQUAL, 0 },
  { "grow_global", TAME, 8, EQUAL, 0 },
  { "chunk_beside", BITS, 64, EQUAL, 0 },
};
enum { PRIMITIVES = sizeof primitives / sizeof *primitives };

static struct cuda_driver cuda;
static const char *command;

// ---- what goes in

static uint64_t chance_state;

static uint32_t chance(void)
{
  chance_state = chance_state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
  return (uint32_t)(chance_state >> 32);
}

static uint32_t bits_of(float x)
{
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

static float float_of(uint32_t bits)
{
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

static float between(float low, float high)
{
  return low + (high - low) * (float)(chance() >> 8) / (1 << 24);
}

// An element of at most 8 significant bits, which both kinds have.
static uint16_t element(float x, bool f16)
{
  if (!f16) return (uint16_t)(bits_of(x) >> 16);
  uint32_t bits = bits_of(x) & 0xffff0000u;
  if (!(bits << 1)) return 0;
  return (uint16_t)((bits >> 16 & 0x8000) | ((bits & 0x7fffffff) - (112u << 23)) >> 13);
}

static void fill(uint32_t *in, enum kind kind, bool f16)
{
  static const uint32_t special[] = { 0, 0x80000000u, 0x7f800000u, 0xff800000u, 0x7fc00000u,
    1, 0x80000001u, 0x007fffffu, 0x00800000u, 0x3f808000u, 0x3f818000u, 0x3f807fffu, 0x477fefffu,
    0x477ff000u, 0x33000000u, 0x33000001u, 0x387fffffu, 0x38800000u, 0x3f801000u, 0x3f803000u,
    0x7f7fffffu, 0xff7fffffu };
  chance_state = 20240607 + (uint64_t)kind;
  for (int i = 0; i < IN_WORDS; i++) {
    switch (kind) {
    case BITS: in[i] = chance(); break;
    case REALS:
      in[i] = i % 8 == 0 ? special[(unsigned)i / 8 % (sizeof special / sizeof *special)]
                         : bits_of(ldexpf(between(-2, 2), (int)(chance() % 60) - 30));
      break;
    case TAME: in[i] = bits_of(between(-8, 8)); break;
    case WHOLE:
      in[i] = element((float)(int)(chance() % 17) - 8, f16);
      in[i] |= (uint32_t)element((float)(int)(chance() % 17) - 8, f16) << 16;
      break;
    case FRACTIONS:
      in[i] = element(between(1, 2), f16) | (chance() & 0x8000);
      in[i] |= (uint32_t)(element(between(1, 2), f16) | (chance() & 0x8000)) << 16;
      break;
    }
  }
}

// ---- what comes out

static void *compile(const char *dtype)
{
  char arch[16], path[64];
  int major, minor;
  bool missing;
  assert_int_equal(cuda.device_attribute(&major, 75, 0), 0);
  assert_int_equal(cuda.device_attribute(&minor, 76, 0), 0);
  snprintf(arch, sizeof arch, "sm_%d%d", major, minor);
  snprintf(path, sizeof path, "source-%s.cu", dtype);
  scratch_shell("'%s' emit forward --target cuda --arch sm_80 --dtype %s --model gpt-oss-20b "
                "--output %s && cat '%s/tests/conformance/primitives.cu' >>%s", command, dtype,
                path, getenv("TEST_SOURCE_DIR"), path);
  char *source = scratch_read(path);
  char *image = cuda_compile(source, arch, NULL, 0, !cuda.words, &missing);
  free(source);
  if (missing) {
    print_message("there is no NVRTC\n");
    skip();
  }
  if (!image) fail_msg("the primitives do not compile");
  void *module;
  assert_int_equal(cuda.load(&module, image), 0);
  free(image);
  return module;
}

static void run_once(void *module, const struct primitive *primitive, bool f16, uint32_t *out)
{
  static uint32_t in[IN_WORDS];
  uint64_t in_at, out_at;
  char name[64];
  void *function;
  fill(in, primitive->kind, f16);
  snprintf(name, sizeof name, "try_%s", primitive->name);
  assert_int_equal(cuda.function(&function, module, name), 0);
  assert_int_equal(cuda.allocate(&in_at, sizeof in), 0);
  assert_int_equal(cuda.allocate(&out_at, 4 * OUT_WORDS), 0);
  assert_int_equal(cuda.to_device(in_at, in, sizeof in), 0);
  assert_int_equal(cuda.set_words(out_at, 0, OUT_WORDS), 0);
  void *params[] = { &in_at, &out_at };
  int status = cuda.launch(function, 1, 1, 1, 64, 1, 1, SHARED_BYTES, NULL, params, NULL);
  if (!status) status = cuda.synchronize();
  if (status) fail_msg("%s: %d", primitive->name, status);
  assert_int_equal(cuda.to_host(out, out_at, 4 * OUT_WORDS), 0);
  cuda.free(in_at);
  cuda.free(out_at);
}

// On the emulated driver whatever order warps run in and copies land in.
static void run(void *module, const struct primitive *primitive, bool f16, uint32_t *out)
{
  run_once(module, primitive, f16, out);
  for (int seed = 2; seed < 10 && cuda.words; seed++) {
    uint32_t again[OUT_WORDS];
    char text[8];
    snprintf(text, sizeof text, "%d", seed);
    setenv("EMULATOR_SEED", text, 1);
    run_once(module, primitive, f16, again);
    assert_memory_equal(again, out, sizeof again);
  }
}

static int64_t ordered(uint32_t bits)
{
  return bits >> 31 ? -(int64_t)(bits & 0x7fffffff) : (int64_t)bits;
}

static bool is_near(const struct primitive *primitive, uint32_t is, uint32_t expected)
{
  if (is == expected) return true;
  if (primitive->nearness == ULPS)
    return (double)llabs(ordered(is) - ordered(expected)) <= primitive->allowed;
  double difference = (double)float_of(is) - (double)float_of(expected);
  return primitive->nearness == WITHIN && fabs(difference) <= primitive->allowed;
}

// What stands in the file: of results that must be equal a digest of all and the first words.
enum { KEPT = 11 };
static int keep(const struct primitive *primitive, uint32_t *out)
{
  if (primitive->nearness != EQUAL) return primitive->words;
  uint64_t digest = UINT64_C(0xcbf29ce484222325);
  for (int i = 0; i < primitive->words; i++) digest = (digest ^ out[i]) * UINT64_C(0x100000001b3);
  int count = primitive->words < KEPT - 2 ? primitive->words : KEPT - 2;
  memmove(out + 2, out, (size_t)count * 4);
  out[0] = (uint32_t)(digest >> 32);
  out[1] = (uint32_t)digest;
  return count + 2;
}

// A line of the file: the primitive, the dtype, and its words in hexadecimal over the next lines.
static void read_expected(FILE *file, const char *name, const char *dtype, uint32_t *words,
                          int count)
{
  char is_name[64], is_dtype[8];
  assert_int_equal(fscanf(file, "%63s %7s", is_name, is_dtype), 2);
  assert_string_equal(is_name, name);
  assert_string_equal(is_dtype, dtype);
  for (int i = 0; i < count; i++) assert_int_equal(fscanf(file, "%8x", &words[i]), 1);
}

static void write_results(FILE *file, const char *name, const char *dtype, const uint32_t *words,
                          int count)
{
  fprintf(file, "%s %s", name, dtype);
  for (int i = 0; i < count; i++) fprintf(file, "%s%08x", i % KEPT ? " " : "\n", words[i]);
  fputc('\n', file);
}

static void test_primitives(void **state)
{
  (void)state;
  char path[512];
  const char *write = getenv("TEST_CONFORMANCE_WRITE");
  snprintf(path, sizeof path, "%s/tests/conformance/expected.txt", getenv("TEST_SOURCE_DIR"));
  FILE *file = fopen(write ? write : path, write ? "w" : "r");
  assert_non_null(file);
  int wrong = 0;
  for (int f16 = 0; f16 < 2; f16++) {
    const char *dtype = f16 ? "f16" : "bf16";
    void *module = compile(dtype);
    for (int i = 0; i < PRIMITIVES; i++) {
      const struct primitive *primitive = &primitives[i];
      uint32_t is[OUT_WORDS], expected[OUT_WORDS];
      run(module, primitive, f16, is);
      int count = keep(primitive, is);
      if (write) {
        write_results(file, primitive->name, dtype, is, count);
        continue;
      }
      read_expected(file, primitive->name, dtype, expected, count);
      for (int k = 0; k < count; k++) {
        if (is_near(primitive, is[k], expected[k])) continue;
        print_error("%s %s, word %d: %08x (%g), expected %08x (%g)\n", primitive->name, dtype, k,
                    is[k], (double)float_of(is[k]), expected[k], (double)float_of(expected[k]));
        wrong++;
        break;
      }
    }
    cuda.unload(module);
  }
  fclose(file);
  assert_int_equal(wrong, 0);
}

static int begin(void **state)
{
  void *context;
  (void)state;
  return cuda.init(0) || cuda.retain(&context, 0) || cuda.set_current(context);
}

static int end(void **state)
{
  cuda.release(0);
  return scratch_remove(state);
}

int main(void)
{
  const struct CMUnitTest tests[] = { cmocka_unit_test(test_primitives) };
  const char *path = getenv("TEST_LIBCUDA");
  if (!cuda_driver_open(&cuda, path && *path ? path : NULL)) return 1;
  command = scratch_home("conformance");
  if (!command || !getenv("TEST_SOURCE_DIR")) return 1;
  return cmocka_run_group_tests(tests, begin, end);
}
