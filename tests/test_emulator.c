// test_emulator.c: the emulated driver: each of its checks catches a small kernel with the fault,
// and lets the same kernel without it pass; what instructions yield; streams, events, graphs.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "cuda_driver.h"

enum { WORDS = 1024, SEEDS = 12 };
enum { ILLEGAL_ADDRESS = 700, MISALIGNED = 716, LAUNCH_FAILED = 719 };

static struct cuda_driver cuda;

// Every kernel here has: r1 thread, r2 block, r3 shared memory, r4 = 4 thread, r5 the thread's word
// of shared memory; d1 output, d2 input, d4 and d5 the thread's words of them.
static const char head[] =
  ".version 8.0\n.target %s\n.address_size 64\n"
  ".extern .shared .align 128 .b8 s[];\n"
  ".visible .entry k(.param .u64 to, .param .u64 from_)\n{\n"
  ".reg .pred %%p<8>;\n.reg .b16 %%h<8>;\n.reg .b32 %%r<64>;\n.reg .f32 %%f<32>;\n"
  ".reg .b64 %%d<24>;\n"
  "ld.param.u64 %%d1, [to];\nld.param.u64 %%d2, [from_];\nmov.u32 %%r1, %%tid.x;\n"
  "mov.u32 %%r2, %%ctaid.x;\nmov.u32 %%r3, s;\nshl.b32 %%r4, %%r1, 2;\nadd.u32 %%r5, %%r3, %%r4;\n"
  "cvt.u64.u32 %%d3, %%r4;\nadd.u64 %%d4, %%d1, %%d3;\nadd.u64 %%d5, %%d2, %%d3;\n"
  "%s\nret;\n}\n";

static void *context;
static uint64_t output, input;

static void begin(void)
{
  assert_int_equal(cuda.init(0), 0);
  assert_int_equal(cuda.retain(&context, 0), 0);
  assert_int_equal(cuda.set_current(context), 0);
  assert_int_equal(cuda.allocate(&output, 4 * WORDS), 0);
  assert_int_equal(cuda.allocate(&input, 4 * WORDS), 0);
  uint32_t words[WORDS];
  for (uint32_t i = 0; i < WORDS; i++) words[i] = i;
  assert_int_equal(cuda.to_device(input, words, sizeof words), 0);
}

// The last to leave takes a fault along.
static void end(void)
{
  cuda.free(output);
  cuda.free(input);
  assert_int_equal(cuda.release(0), 0);
}

static const char *said(void)
{
  static char text[2048];
  cuda.words(text, sizeof text);
  return text;
}

static void seed(int number)
{
  char text[16];
  snprintf(text, sizeof text, "%d", number);
  setenv("EMULATOR_SEED", text, 1);
}

static void *load(const char *arch, const char *body, void **module)
{
  static char text[1 << 16];
  void *function;
  snprintf(text, sizeof text, head, arch, body);
  int status = cuda.load(module, text);
  if (status) fail_msg("%s", said());
  assert_int_equal(cuda.function(&function, *module, "k"), 0);
  return function;
}

static int launch(void *function, unsigned blocks, unsigned threads, unsigned shared_bytes,
                  void *stream)
{
  void *params[] = { &output, &input };
  return cuda.launch(function, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, params, NULL);
}

static int run(const char *arch, const char *body, unsigned blocks, unsigned threads,
               unsigned shared_bytes)
{
  void *module, *function = load(arch, body, &module);
  int status = launch(function, blocks, threads, shared_bytes, NULL);
  if (!status) status = cuda.synchronize();
  return status;
}

// Whatever a test that failed has left.
static int leave(void **state)
{
  (void)state;
  while (!cuda.release(0)) {}
  unsetenv("EMULATOR_ARCH");
  unsetenv("EMULATOR_QUIET");
  return 0;
}

// ---- faults, and the same without them

struct fault {
  const char *name, *body;
  unsigned blocks, threads;
  int status;                  // 0: none
  const char *words;
  const char *arch;            // NULL: sm_80
};

// what a race looks like, whichever comes first
#define RACE "no barrier between|never written"
#define WRITE "st.shared.u32 [%r5], %r1;\n"
// the word of the thread with one bit of its number turned over
#define READ(bit) "xor.b32 %r6, %r4, " #bit ";\nadd.u32 %r6, %r3, %r6;\n" \
  "ld.shared.u32 %r7, [%r6];\n" "st.global.u32 [%d4], %r7;\n"
#define COPY "cp.async.ca.shared.global [%r5], [%d5], 4;\n"
#define COMMIT "cp.async.commit_group;\n"
#define WAIT(n) "cp.async.wait_group " #n ";\n"
#define BARRIER "bar.sync 0;\n"
#define MINE "ld.shared.u32 %r7, [%r5];\nst.global.u32 [%d4], %r7;\n"
#define FRAGMENTS "mov.f32 %f1, 0f00000000;\nmov.b32 %r10, 0;\n"
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f2,%f3,%f4,%f5}, " \
  "{%r10,%r10,%r10,%r10}, {%r10,%r10}, {%f1,%f1,%f1,%f1};\n"
#define BULK \
  "setp.eq.u32 %p1, %r1, 0;\nadd.u32 %r20, %r3, 1024;\n@!%p1 bra started;\n" \
  "mbarrier.init.shared::cta.b64 [%r20], 1;\nfence.mbarrier_init.release.cluster;\nstarted:\n" \
  BARRIER
#define EXPECT(bytes) \
  "@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], " #bytes ";\n"
#define BULK_COPY "@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes " \
  "[%r3], [%d2], 512, [%r20];\n"
#define PASS(parity) "again:\n" \
  "mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r20], " #parity ";\n" \
  "@!%p2 bra again;\n"
#define BULK_STORE "setp.eq.u32 %p1, %r1, 0;\n@%p1 cp.async.bulk.global.shared::cta.bulk_group " \
  "[%d1], [%r3], 512;\n@%p1 cp.async.bulk.commit_group;\n@%p1 cp.async.bulk.wait_group 0;\n"

static const struct fault faults[] = {
  { "barrier", WRITE BARRIER READ(128), 1, 128, 0, NULL, NULL },
  { "barrier removed", WRITE READ(128), 1, 128, LAUNCH_FAILED, RACE, NULL },
  { "barrier before overwriting", WRITE BARRIER READ(128) BARRIER WRITE, 1, 128, 0, NULL, NULL },
  { "barrier before overwriting removed", WRITE BARRIER READ(128) WRITE, 1, 128, LAUNCH_FAILED,
    RACE, NULL },
  { "warp barrier", WRITE "bar.warp.sync 0xffffffff;\n" READ(4), 1, 32, 0, NULL, NULL },
  { "warp barrier removed", WRITE READ(4), 1, 32, LAUNCH_FAILED, RACE, NULL },
  { "two halves of a word", "cvt.u16.u32 %h1, %r1;\n"
    "add.u32 %r6, %r3, %r1;\nadd.u32 %r6, %r6, %r1;\n"
    "st.shared.u16 [%r6], %h1;\nld.shared.u16 %h2, [%r6];\n", 1, 64, 0, NULL, NULL },
  { "never written", MINE, 1, 32, LAUNCH_FAILED, "never written", NULL },
  { "copy", COPY COMMIT WAIT(0) MINE, 1, 64, 0, NULL, NULL },
  { "wait removed", COPY COMMIT MINE, 1, 64, LAUNCH_FAILED, "not waited for", NULL },
  { "wait too weak", COPY COMMIT WAIT(1) MINE, 1, 64, LAUNCH_FAILED, "not waited for", NULL },
  { "commit removed", COPY WAIT(0) MINE, 1, 64, LAUNCH_FAILED, "not waited for", NULL },
  { "the last but one group", COPY COMMIT COMMIT WAIT(1) MINE, 1, 64, 0, NULL, NULL },
  { "copy, others read", COPY COMMIT WAIT(0) BARRIER READ(128), 1, 64, 0, NULL, NULL },
  { "copy, others read with no barrier", COPY COMMIT WAIT(0) READ(128), 1, 64, LAUNCH_FAILED,
    RACE "|not waited for", NULL },
  { "copy under way at the end", COPY COMMIT, 1, 32, LAUNCH_FAILED, "has ended with the copy",
    NULL },
  { "past the end", "st.global.u32 [%d4+4000], %r1;\n", 1, 64, ILLEGAL_ADDRESS,
    "past the 4096 bytes", NULL },
  { "before the start", "ld.global.u32 %r7, [%d2+-4];\n", 1, 1, ILLEGAL_ADDRESS, "before the",
    NULL },
  { "misaligned", "ld.global.v2.u32 {%r7, %r8}, [%d5];\n", 1, 32, MISALIGNED, "not aligned", NULL },
  { "shared memory past the end", "st.shared.u32 [%r5+2048], %r1;\n", 1, 32, ILLEGAL_ADDRESS,
    "shared memory", NULL },
  { "mma of the warp", FRAGMENTS MMA, 1, 32, 0, NULL, NULL },
  { "mma of half the warp", FRAGMENTS "setp.lt.u32 %p1, %r1, 16;\n@%p1 bra in;\nbra out;\nin:\n" MMA
    "out:\n", 1, 32, LAUNCH_FAILED, "whole warp", NULL },
  { "ldmatrix of half the warp", WRITE BARRIER "setp.lt.u32 %p1, %r1, 16;\n"
    "@%p1 ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r7}, [%r3];\n", 1, 32, LAUNCH_FAILED,
    "whole warp", NULL },
  { "barrier of half the warp", "setp.lt.u32 %p1, %r1, 16;\n@%p1 bar.sync 0;\n", 1, 32,
    LAUNCH_FAILED, "whole warp", NULL },
  { "shuffle with a lane that is elsewhere", "setp.lt.u32 %p1, %r1, 16;\n"
    "@%p1 shfl.sync.bfly.b32 %r7, %r1, 1, 31, 0xffffffff;\n", 1, 32, LAUNCH_FAILED, "are named",
    NULL },
  { "shuffle of those named", "setp.lt.u32 %p1, %r1, 16;\n"
    "@%p1 shfl.sync.bfly.b32 %r7, %r1, 1, 31, 0xffff;\n", 1, 32, 0, NULL, NULL },
  { "one warp misses the barrier", "setp.lt.u32 %p1, %r1, 32;\n@%p1 bra out;\nbar.sync 1, 64;\n"
    "out:\n", 1, 64, LAUNCH_FAILED, "no warp can go on: warp 1 at barrier 1", NULL },
  { "producer arrives, consumer waits", "setp.lt.u32 %p1, %r1, 32;\n@%p1 bra from;\n"
    "bar.sync 1, 64;\nxor.b32 %r6, %r4, 128;\nadd.u32 %r6, %r3, %r6;\nld.shared.u32 %r7, [%r6];\n"
    "bra out;\nfrom:\n" WRITE "bar.arrive 1, 64;\nout:\n", 1, 64, 0, NULL, NULL },
  { "producer arrives before it writes", "setp.lt.u32 %p1, %r1, 32;\n@%p1 bra from;\n"
    "bar.sync 1, 64;\nxor.b32 %r6, %r4, 128;\nadd.u32 %r6, %r3, %r6;\nld.shared.u32 %r7, [%r6];\n"
    "bra out;\nfrom:\nbar.arrive 1, 64;\n" WRITE "out:\n", 1, 64, LAUNCH_FAILED, RACE, NULL },
  { "counts that differ", "setp.lt.u32 %p1, %r1, 32;\n@%p1 bra one;\nbar.sync 1, 64;\nbra out;\n"
    "one:\nbar.sync 1, 96;\nout:\n", 1, 64, LAUNCH_FAILED, "where others", NULL },
  { "two blocks write a word", "st.global.u32 [%d4], %r2;\n", 2, 32, LAUNCH_FAILED,
    "blocks of a launch have no order", NULL },
  { "one block reads what another writes", "setp.eq.u32 %p1, %r2, 0;\n"
    "@%p1 st.global.u32 [%d4], %r1;\n@!%p1 ld.global.u32 %r7, [%d4];\n", 2, 32, LAUNCH_FAILED,
    "blocks of a launch have no order", NULL },
  { "two blocks write halves of words", "cvt.u16.u32 %h1, %r1;\nmul.wide.u32 %d6, %r2, 2;\n"
    "add.u64 %d6, %d6, %d4;\nst.global.u16 [%d6], %h1;\n", 2, 32, 0, NULL, NULL },
  { "all blocks read", "ld.global.u32 %r7, [%d5];\n", 8, 32, 0, NULL, NULL },
  { "atomics of all blocks", "red.global.add.u32 [%d1], 1;\natom.global.max.u32 %r7, [%d4+128], "
    "%r2;\n", 8, 32, 0, NULL, NULL },
  { "trap", "trap;\n", 1, 32, LAUNCH_FAILED, "trap", NULL },
  { "bulk copy", BULK EXPECT(512) BULK_COPY PASS(0) READ(128), 1, 64, 0, NULL, "sm_90a" },
  { "bulk copy not waited for", BULK EXPECT(512) BULK_COPY READ(128), 1, 64, LAUNCH_FAILED,
    RACE "|not waited for", "sm_90a" },
  { "bulk copy, the phase before", BULK EXPECT(512) BULK_COPY PASS(1) READ(128), 1, 64,
    LAUNCH_FAILED, RACE "|not waited for", "sm_90a" },
  { "more bytes expected than copied", BULK EXPECT(528) BULK_COPY PASS(0), 1, 64, LAUNCH_FAILED,
    "no warp can go on", "sm_90a" },
  { "fewer bytes expected than copied", BULK EXPECT(496) BULK_COPY PASS(0), 1, 64, LAUNCH_FAILED,
    "mbarrier|no warp can go on", "sm_90a" },
  { "no arrival at an mbarrier", BULK PASS(0), 1, 64, LAUNCH_FAILED, "no warp can go on",
    "sm_90a" },
  { "no mbarrier there", "mbarrier.arrive.shared::cta.b64 _, [%r3];\n", 1, 32, LAUNCH_FAILED,
    "no mbarrier", "sm_90a" },
  { "mbarrier used by a warp that knows nothing of its making", "add.u32 %r20, %r3, 1024;\n"
    "setp.eq.u32 %p1, %r1, 0;\n@%p1 mbarrier.init.shared::cta.b64 [%r20], 1;\n"
    "setp.eq.u32 %p1, %r1, 32;\n@%p1 mbarrier.arrive.shared::cta.b64 _, [%r20];\n", 1, 64,
    LAUNCH_FAILED, "no barrier between|no mbarrier", "sm_90a" },
  { "bulk store", WRITE "fence.proxy.async.shared::cta;\n" BARRIER BULK_STORE, 1, 128, 0, NULL,
    "sm_90a" },
  { "bulk store with no proxy fence", WRITE BARRIER BULK_STORE, 1, 128, LAUNCH_FAILED,
    "fence.proxy.async", "sm_90a" },
  { "bulk store with no barrier", WRITE "fence.proxy.async.shared::cta;\n" BULK_STORE, 1, 128,
    LAUNCH_FAILED, RACE "|fence.proxy.async", "sm_90a" },
};

// Whether what was said has one of the words that '|' separates.
static bool says(const char *words)
{
  const char *text = said();
  for (const char *at = words; *at;) {
    size_t length = strcspn(at, "|");
    char one[64];
    snprintf(one, sizeof one, "%.*s", (int)length, at);
    if (strstr(text, one)) return true;
    at += length + (at[length] == '|');
  }
  return false;
}

// Without a race detector some faults do not show: it must be what finds them.
static void test_faults(void **state)
{
  (void)state;
  setenv("EMULATOR_QUIET", "1", 1);
  for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
    const struct fault *fault = &faults[i];
    const char *arch = fault->arch ? fault->arch : "sm_80";
    setenv("EMULATOR_ARCH", arch, 1);
    for (int s = 0; s < SEEDS; s++) {
      seed(s);
      begin();
      int status = run(arch, fault->body, fault->blocks, fault->threads, 2048);
      if (status != fault->status)
        fail_msg("%s, seed %d: %d: %s", fault->name, s, status, status ? said() : "no fault");
      if (status && !says(fault->words)) fail_msg("%s: %s", fault->name, said());
      // sticky, as on a device
      if (status) assert_int_equal(cuda.synchronize(), status);
      end();
    }
  }
  unsetenv("EMULATOR_ARCH");
  unsetenv("EMULATOR_QUIET");
}

static void test_fault_says_where(void **state)
{
  (void)state;
  setenv("EMULATOR_QUIET", "1", 1);
  begin();
  assert_int_equal(run("sm_80", ".loc 1 321 5\nsetp.eq.u32 %p1, %r1, 37;\n"
                       "@%p1 st.global.u32 [%d4+8192], %r1;\n", 1, 64, 0), ILLEGAL_ADDRESS);
  assert_non_null(strstr(said(), "kernel k, block (0,0,0), warp 1, lane 5, PTX line "));
  assert_non_null(strstr(said(), "(source line 321)"));
  assert_non_null(strstr(said(), "@%p1 st.global.u32 [%d4+8192], %r1;"));
  end();
  unsetenv("EMULATOR_QUIET");
}

static void test_freed_memory(void **state)
{
  (void)state;
  setenv("EMULATOR_QUIET", "1", 1);
  begin();
  uint64_t kept = input, gone;
  assert_int_equal(cuda.allocate(&gone, 4096), 0);
  assert_int_equal(cuda.free(gone), 0);
  assert_int_equal(cuda.free(gone), 1);
  input = gone;
  assert_int_equal(run("sm_80", "ld.global.u32 %r7, [%d5];\n", 1, 32, 0), ILLEGAL_ADDRESS);
  assert_non_null(strstr(said(), "it was freed"));
  input = kept;
  end();
  unsetenv("EMULATOR_QUIET");
}

static void test_new_memory_is_poison(void **state)
{
  (void)state;
  begin();
  uint32_t word = 0;
  assert_int_equal(cuda.to_host(&word, output + 512, 4), 0);
  assert_int_equal(word, UINT32_MAX);
  end();
}

// ---- what cannot be loaded or launched

static void test_unknown_instruction(void **state)
{
  (void)state;
  static char text[4096];
  void *module;
  setenv("EMULATOR_QUIET", "1", 1);
  begin();
  const char *unknown[] = { "sad.u32 %r6, %r1, %r2, %r3;", "add.sat.s32 %r6, %r1, %r2;",
                            "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%r6,%r7,%r8,%r9}, "
                            "{%r6,%r7,%r8,%r9}, {%r6,%r7}, {%r6,%r7,%r8,%r9};",
                            "ld.global.unheard_of.u32 %r6, [%d1];" };
  for (size_t i = 0; i < sizeof unknown / sizeof *unknown; i++) {
    snprintf(text, sizeof text, head, "sm_80", unknown[i]);
    assert_int_equal(cuda.load(&module, text), 218);
    char name[64];
    sscanf(unknown[i], "%63s", name);
    assert_non_null(strstr(said(), name));
    assert_non_null(strstr(said(), "not known"));
  }
  snprintf(text, sizeof text, head, "sm_80", "add.u32 %r6, %r1, %d1;");
  assert_int_equal(cuda.load(&module, text), 218);
  assert_non_null(strstr(said(), "wrong width"));
  snprintf(text, sizeof text, head, "sm_80", "bra nowhere;");
  assert_int_equal(cuda.load(&module, text), 218);
  assert_non_null(strstr(said(), "nowhere was not declared"));
  end();
  unsetenv("EMULATOR_QUIET");
}

static void test_what_it_does_not_load(void **state)
{
  (void)state;
  static char text[4096];
  void *module;
  setenv("EMULATOR_QUIET", "1", 1);
  begin();
  assert_int_equal(cuda.load(&module, "\177ELF and more"), 209);
  snprintf(text, sizeof text, head, "sm_90", "");
  assert_int_equal(cuda.load(&module, text), 218);  // newer than the device
  setenv("EMULATOR_ARCH", "sm_90", 1);
  assert_int_equal(cuda.load(&module, text), 0);
  snprintf(text, sizeof text, head, "sm_90a", "");
  assert_int_equal(cuda.load(&module, text), 218);
  unsetenv("EMULATOR_ARCH");
  snprintf(text, sizeof text, head, "sm_80", "");
  memcpy(strstr(text, "8.0"), "8.7", 3);
  setenv("EMULATOR_DRIVER_VERSION", "12020", 1);
  assert_int_equal(cuda.load(&module, text), 222);
  int version;
  assert_int_equal(cuda.driver_version(&version), 0);
  assert_int_equal(version, 12020);
  unsetenv("EMULATOR_DRIVER_VERSION");
  assert_int_equal(cuda.load(&module, text), 0);
  end();
  unsetenv("EMULATOR_QUIET");
}

static void test_launch_limits(void **state)
{
  (void)state;
  setenv("EMULATOR_QUIET", "1", 1);
  begin();
  void *module, *function = load("sm_80", "", &module), *params[] = { &output, &input };
  assert_int_equal(launch(function, 1, 1025, 0, NULL), 1);
  assert_int_equal(launch(function, 0, 32, 0, NULL), 1);
  assert_int_equal(cuda.launch(function, 1, 65536, 1, 32, 1, 1, 0, NULL, params, NULL), 1);
  assert_int_equal(launch(function, 1, 32, 49152, NULL), 0);
  assert_int_equal(launch(function, 1, 32, 49153, NULL), 1);
  assert_int_equal(cuda.function_set(function, 8, 166913), 1);
  assert_int_equal(cuda.function_set(function, 8, 166912), 0);
  assert_int_equal(launch(function, 1, 32, 166912, NULL), 0);
  assert_int_equal(cuda.synchronize(), 0);
  end();
  unsetenv("EMULATOR_QUIET");
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test_teardown(test_faults, leave),
    cmocka_unit_test_teardown(test_fault_says_where, leave),
    cmocka_unit_test_teardown(test_freed_memory, leave),
    cmocka_unit_test_teardown(test_new_memory_is_poison, leave),
    cmocka_unit_test_teardown(test_unknown_instruction, leave),
    cmocka_unit_test_teardown(test_what_it_does_not_load, leave),
    cmocka_unit_test_teardown(test_launch_limits, leave),
  };
  const char *path = getenv("TEST_LIBCUDA");
  if (!path || !cuda_driver_open(&cuda, path)) {
    fprintf(stderr, "TEST_LIBCUDA must name libcuda_emulated.so\n");
    return 1;
  }
  return cmocka_run_group_tests(tests, NULL, NULL);
}
