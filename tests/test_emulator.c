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
  unsetenv("EMULATOR_RACES");
  unsetenv("EMULATOR_MOST_INSTRUCTIONS");
  unsetenv("EMULATOR_DEVICES");
  unsetenv("EMULATOR_FAIL");
  unsetenv("EMULATOR_MEMORY_BYTES");
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

// A copy that was not waited for is not there yet, by chance; unwatched, the numbers show it.
static void test_late_copies_show_in_the_numbers(void **state)
{
  (void)state;
  setenv("EMULATOR_RACES", "0", 1);
  for (int waits = 0; waits < 2; waits++) {
    int late = 0;
    for (int s = 0; s < SEEDS; s++) {
      uint32_t is[32];
      seed(s);
      begin();
      assert_int_equal(run("sm_80", waits ? COPY COMMIT WAIT(0) MINE : COPY COMMIT MINE WAIT(0), 1,
                           32, 2048), 0);
      assert_int_equal(cuda.to_host(is, output, sizeof is), 0);
      for (uint32_t l = 0; l < 32; l++) {
        assert_true(is[l] == l || is[l] == UINT32_MAX);
        late += is[l] != l;
      }
      end();
    }
    if (waits) assert_int_equal(late, 0);
    else assert_in_range(late, SEEDS * 8, SEEDS * 24);
  }
  unsetenv("EMULATOR_RACES");
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

static void test_endless_loop(void **state)
{
  (void)state;
  setenv("EMULATOR_QUIET", "1", 1);
  setenv("EMULATOR_MOST_INSTRUCTIONS", "100000", 1);
  begin();
  assert_int_equal(run("sm_80", "again:\nadd.u32 %r20, %r20, 1;\nbra again;\n", 1, 64, 0),
                   LAUNCH_FAILED);
  assert_true(says("the block does not end"));
  end();
  unsetenv("EMULATOR_MOST_INSTRUCTIONS");
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

// ---- what instructions yield

// a, b, c lie in r10 to r12 and f10 to f12, {a, b} in d10, {c, c} in d11; the result in r20, or
// f20, or d20 whose halves are `low` and `high`.
static const struct value {
  const char *text;
  uint32_t a, b, c, low, high;
} values[] = {
  { "add.s32 %r20, %r10, %r11;", 0x7fffffff, 1, 0, 0x80000000, 0 },
  { "sub.s32 %r20, %r10, %r11;", 0, 1, 0, 0xffffffff, 0 },
  { "mul.lo.s32 %r20, %r10, %r11;", 0x10001, 0x10001, 0, 0x20001, 0 },
  { "mul.hi.s32 %r20, %r10, %r11;", 0xffffffff, 2, 0, 0xffffffff, 0 },
  { "mul.hi.u32 %r20, %r10, %r11;", 0xffffffff, 2, 0, 1, 0 },
  { "mad.lo.s32 %r20, %r10, %r11, %r12;", 3, 5, 7, 22, 0 },
  { "mul.wide.s32 %d20, %r10, %r11;", 0xffffffff, 3, 0, 0xfffffffd, 0xffffffff },
  { "mul.wide.u32 %d20, %r10, %r11;", 0xffffffff, 3, 0, 0xfffffffd, 2 },
  { "mad.wide.u32 %d20, %r10, %r11, %d11;", 0xffffffff, 2, 1, 0xffffffff, 2 },
  { "div.s32 %r20, %r10, %r11;", (uint32_t)-7, 2, 0, (uint32_t)-3, 0 },
  { "rem.s32 %r20, %r10, %r11;", (uint32_t)-7, 2, 0, (uint32_t)-1, 0 },
  { "div.u32 %r20, %r10, %r11;", 0xfffffff9, 2, 0, 0x7ffffffc, 0 },
  { "min.s32 %r20, %r10, %r11;", 0xffffffff, 1, 0, 0xffffffff, 0 },
  { "min.u32 %r20, %r10, %r11;", 0xffffffff, 1, 0, 1, 0 },
  { "abs.s32 %r20, %r10;", 0xfffffffb, 0, 0, 5, 0 },
  { "shl.b32 %r20, %r10, %r11;", 1, 31, 0, 0x80000000, 0 },
  { "shl.b32 %r20, %r10, %r11;", 1, 32, 0, 0, 0 },
  { "shr.u32 %r20, %r10, %r11;", 0x80000000, 31, 0, 1, 0 },
  { "shr.s32 %r20, %r10, %r11;", 0x80000000, 99, 0, 0xffffffff, 0 },
  { "shr.s64 %d20, %d10, %r12;", 0, 0x80000000, 63, 0xffffffff, 0xffffffff },
  { "shl.b64 %d20, %d10, %r12;", 1, 0, 40, 0, 0x100 },
  { "shf.l.wrap.b32 %r20, %r10, %r11, %r12;", 0x80000000, 1, 1, 3, 0 },
  { "shf.r.wrap.b32 %r20, %r10, %r11, %r12;", 2, 1, 33, 0x80000001, 0 },
  { "shf.r.clamp.b32 %r20, %r10, %r11, %r12;", 2, 5, 40, 5, 0 },
  { "prmt.b32 %r20, %r10, %r11, %r12;", 0x33221100, 0x77665544, 0x7513, 0x77551133, 0 },
  { "prmt.b32 %r20, %r10, %r11, %r12;", 0x00008000, 0, 0x9999, 0xffffffff, 0 },
  { "bfe.u32 %r20, %r10, 8, 8;", 0x12345678, 0, 0, 0x56, 0 },
  { "bfe.s32 %r20, %r10, 4, 4;", 0x12345688, 0, 0, 0xfffffff8, 0 },
  { "bfe.u32 %r20, %r10, 28, 8;", 0xf2345678, 0, 0, 0xf, 0 },
  { "bfi.b32 %r20, %r10, %r11, 8, 8;", 0xab, 0x11223344, 0, 0x1122ab44, 0 },
  { "lop3.b32 %r20, %r10, %r11, %r12, 0x96;", 0xf0f0f0f0, 0xcccccccc, 0xaaaaaaaa, 0x96969696, 0 },
  { "lop3.b32 %r20, %r10, %r11, %r12, 0xca;", 0xffff0000, 0x12345678, 0x9abcdef0, 0x1234def0, 0 },
  { "popc.b32 %r20, %r10;", 0xf00f, 0, 0, 8, 0 },
  { "clz.b32 %r20, %r10;", 0x00010000, 0, 0, 15, 0 },
  { "clz.b32 %r20, %r10;", 0, 0, 0, 32, 0 },
  { "brev.b32 %r20, %r10;", 0x80000001, 0, 0, 0x80000001, 0 },
  { "brev.b32 %r20, %r10;", 0x00000010, 0, 0, 0x08000000, 0 },
  { "cvt.s64.s32 %d20, %r10;", 0x80000000, 0, 0, 0x80000000, 0xffffffff },
  { "cvt.u64.u32 %d20, %r10;", 0x80000000, 0, 0, 0x80000000, 0 },
  { "cvt.u32.u64 %r20, %d10;", 5, 9, 0, 5, 0 },
  { "cvt.s32.s8 %r20, %r10;", 0x80, 0, 0, 0xffffff80, 0 },
  { "cvt.u32.u8 %r20, %r10;", 0x1ff, 0, 0, 0xff, 0 },
  { "cvt.u16.u32 %h1, %r10;\ncvt.s32.s16 %r20, %h1;", 0x18000, 0, 0, 0xffff8000, 0 },
  { "cvt.rn.f32.s32 %f20, %r10;", 0xffffffff, 0, 0, 0xbf800000, 0 },
  { "cvt.rn.f32.u32 %f20, %r10;", 0xffffffff, 0, 0, 0x4f800000, 0 },
  { "cvt.rzi.s32.f32 %r20, %f10;", 0xbfc00000, 0, 0, 0xffffffff, 0 },
  { "cvt.rni.s32.f32 %r20, %f10;", 0x40200000, 0, 0, 2, 0 },
  { "cvt.rmi.s32.f32 %r20, %f10;", 0xbfc00000, 0, 0, 0xfffffffe, 0 },
  { "cvt.rzi.s32.f32 %r20, %f10;", 0x7fc00000, 0, 0, 0, 0 },
  { "cvt.rzi.s32.f32 %r20, %f10;", 0x4f000000, 0, 0, 0x7fffffff, 0 },
  { "cvt.rzi.u32.f32 %r20, %f10;", 0xbf800000, 0, 0, 0, 0 },
  { "cvt.rn.bf16x2.f32 %r20, %f10, %f11;", 0x3f808000, 0x3f818000, 0, 0x3f803f82, 0 },
  { "cvt.rn.f16x2.f32 %r20, %f10, %f11;", 0x477ff000, 0x33800000, 0, 0x7c000001, 0 },
  { "cvt.rn.f16x2.f32 %r20, %f10, %f11;", 0x477fefff, 0x33000000, 0, 0x7bff0000, 0 },
  { "cvt.rn.f16x2.f32 %r20, %f10, %f11;", 0x7fc00000, 0xff800000, 0, 0x7ffffc00, 0 },
  { "mov.b32 {%h1, %h2}, %r10;\ncvt.f32.f16 %f20, %h2;", 0x00010000, 0, 0, 0x33800000, 0 },
  { "mov.b32 {%h1, %h2}, %r10;\ncvt.f32.f16 %f20, %h1;", 0xc000, 0, 0, 0xc0000000, 0 },
  { "mov.b32 {%h1, %h2}, %r10;\nmov.b32 %r20, {%h2, %h1};", 0x12345678, 0, 0, 0x56781234, 0 },
  { "min.f32 %f20, %f10, %f11;", 0x7fc00000, 0x40000000, 0, 0x40000000, 0 },
  { "max.f32 %f20, %f10, %f11;", 0x80000000, 0, 0, 0, 0 },
  { "min.f32 %f20, %f10, %f11;", 0, 0x80000000, 0, 0x80000000, 0 },
  { "max.f32 %f20, %f10, %f11;", 0x7fc00000, 0xffc00000, 0, 0x7fffffff, 0 },
  { "fma.rn.f32 %f20, %f10, %f11, %f12;", 0x3f800001, 0x3f800001, 0xbf800002, 0x28800000, 0 },
  { "mul.f32 %f20, %f10, %f11;", 0x00800000, 0x3f000000, 0, 0x00400000, 0 },
  { "mul.ftz.f32 %f20, %f10, %f11;", 0x00800000, 0x3f000000, 0, 0, 0 },
  { "neg.f32 %f20, %f10;", 0, 0, 0, 0x80000000, 0 },
  { "ex2.approx.ftz.f32 %f20, %f10;", 0x40400000, 0, 0, 0x41000000, 0 },
  { "ex2.approx.ftz.f32 %f20, %f10;", 0xff800000, 0, 0, 0, 0 },
  { "ex2.approx.ftz.f32 %f20, %f10;", 0x43000000, 0, 0, 0x7f800000, 0 },
  { "ex2.approx.ftz.f32 %f20, %f10;", 0xc2fe0000, 0, 0, 0, 0 },
  { "ex2.approx.f32 %f20, %f10;", 0xc2fe0000, 0, 0, 0x00400000, 0 },
  { "lg2.approx.f32 %f20, %f10;", 0, 0, 0, 0xff800000, 0 },
  { "rcp.approx.ftz.f32 %f20, %f10;", 0, 0, 0, 0x7f800000, 0 },
  { "setp.lt.s32 %p1, %r10, %r11;\nselp.b32 %r20, 1, 2, %p1;", 0xffffffff, 0, 0, 1, 0 },
  { "setp.lt.u32 %p1, %r10, %r11;\nselp.b32 %r20, 1, 2, %p1;", 0xffffffff, 0, 0, 2, 0 },
  { "setp.ne.f32 %p1, %f10, %f10;\nselp.b32 %r20, 1, 2, %p1;", 0x7fc00000, 0, 0, 2, 0 },
  { "setp.neu.f32 %p1, %f10, %f10;\nselp.b32 %r20, 1, 2, %p1;", 0x7fc00000, 0, 0, 1, 0 },
  { "setp.ltu.f32 %p1, %f10, %f11;\nselp.b32 %r20, 1, 2, %p1;", 0x7fc00000, 0, 0, 1, 0 },
  { "setp.gt.and.s32 %p1|%p2, %r10, %r11, 1;\nselp.b32 %r20, 1, 2, %p2;", 1, 2, 0, 1, 0 },
  { "setp.eq.s64 %p1, %d10, %d11;\nselp.b64 %d20, %d10, %d11, %p1;", 7, 7, 7, 7, 7 },
  { "st.global.u32 [%d1+512], %r10;\nld.global.s8 %r20, [%d1+513];", 0x8000, 0, 0, 0xffffff80, 0 },
  { "st.global.v2.u32 [%d1+512], {%r10, %r11};\nld.global.u64 %d20, [%d1+512];", 1, 2, 0, 1, 2 },
  { "st.global.u32 [%d1+512], %r10;\natom.global.add.u32 %r21, [%d1+512], 5;\n"
    "ld.global.u32 %r20, [%d1+512];", 7, 0, 0, 12, 0 },
  { "st.global.u32 [%d1+512], %r10;\nred.global.max.s32 [%d1+512], %r11;\n"
    "ld.global.u32 %r20, [%d1+512];", 0xffffffff, 3, 0, 3, 0 },
  { "st.global.u32 [%d1+512], %r10;\natom.global.cas.b32 %r20, [%d1+512], 7, 9;\n"
    "ld.global.u32 %r21, [%d1+512];\nadd.u32 %r20, %r20, %r21;", 7, 0, 0, 16, 0 },
  { ".local .align 8 .b8 own[16];\nst.local.u32 [own+4], %r10;\nmov.u64 %d12, own;\n"
    "cvta.local.u64 %d12, %d12;\nld.u32 %r20, [%d12+4];", 77, 0, 0, 77, 0 },
  { "cvt.u64.u32 %d12, %r3;\ncvta.shared.u64 %d12, %d12;\nst.u32 [%d12], %r10;\n"
    "ld.shared.u32 %r20, [%r3];", 78, 0, 0, 78, 0 },
  { "ts: .branchtargets one, two;\nbrx.idx %r10, ts;\none:\nmov.u32 %r20, 1;\nbra both;\ntwo:\n"
    "mov.u32 %r20, 2;\nboth:", 1, 0, 0, 2, 0 },
  { "{\n.reg .b32 %r10;\nmov.u32 %r10, 4;\nmov.u32 %r20, %r10;\n}\n"
    "add.u32 %r20, %r20, %r10;", 3, 0, 0, 7, 0 },
};

static void test_values(void **state)
{
  (void)state;
  begin();
  for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
    const struct value *value = &values[i];
    char body[1024];
    uint32_t is[2];
    bool wide = strstr(value->text, "%d20"), real = strstr(value->text, "%f20");
    snprintf(body, sizeof body, "mov.u32 %%r10, 0x%x;\nmov.u32 %%r11, 0x%x;\nmov.u32 %%r12, 0x%x;\n"
             "mov.b32 %%f10, %%r10;\nmov.b32 %%f11, %%r11;\nmov.b32 %%f12, %%r12;\n"
             "mov.b64 %%d10, {%%r10, %%r11};\nmov.b64 %%d11, {%%r12, %%r12};\nmov.u32 %%r21, 0;\n"
             "%s\n%s\nst.global.v2.u32 [%%d1], {%%r20, %%r21};\n", value->a, value->b, value->c,
             value->text, wide ? "mov.b64 {%r20, %r21}, %d20;" : real ? "mov.b32 %r20, %f20;" : "");
    assert_int_equal(run("sm_80", body, 1, 1, 64), 0);
    assert_int_equal(cuda.to_host(is, output, 8), 0);
    if (is[0] != value->low || (wide && is[1] != value->high))
      fail_msg("%s of %08x, %08x, %08x: %08x %08x", value->text, value->a, value->b, value->c,
               is[0], is[1]);
  }
  end();
}

static uint32_t three(uint32_t l) { return 3 * l; }
static uint32_t crossed(uint32_t l) { return three(l ^ 5); }
static uint32_t from_below(uint32_t l) { return three(l < 4 ? l : l - 4); }
static uint32_t from_above(uint32_t l) { return three(l + 4 > 31 ? l : l + 4); }
static uint32_t from_above_in_eights(uint32_t l) { return three(l % 8 + 4 > 7 ? l : l + 4); }
static uint32_t first_of_eight(uint32_t l) { return three(l / 8 * 8); }
static uint32_t odd(uint32_t l) { return (void)l, 0xaaaaaaaa; }
static uint32_t sum(uint32_t l) { return (void)l, 3 * 31 * 16; }
static uint32_t largest(uint32_t l) { return (void)l, 93; }
static uint32_t within(uint32_t l) { return l < 4 ? 2 : 1; }
static uint32_t below(uint32_t l) { return (1u << l) - 1; }
static uint32_t paths(uint32_t l) { return l < 10 ? 100 + l : l < 20 ? 200 + l : 300 + l; }
static uint32_t loops(uint32_t l) { return l * (l + 1) / 2; }
static uint32_t votes(uint32_t l) { return (void)l, 1; }

// Of a warp's lanes, where lane l has 3 l: what each gets, as a function of its number.
static const struct exchange {
  const char *text;
  uint32_t (*of)(uint32_t lane);
} exchanges[] = {
  { "shfl.sync.bfly.b32 %r20, %r10, 5, 31, -1;", crossed },
  { "shfl.sync.up.b32 %r20, %r10, 4, 0, -1;", from_below },
  { "shfl.sync.down.b32 %r20, %r10, 4, 31, -1;", from_above },
  { "shfl.sync.down.b32 %r20, %r10, 4, 0x181f, -1;", from_above_in_eights },
  { "shfl.sync.idx.b32 %r20, %r10, 0, 0x181f, -1;", first_of_eight },
  { "shfl.sync.up.b32 %r21|%p1, %r10, 4, 0, -1;\nselp.b32 %r20, 1, 2, %p1;", within },
  { "and.b32 %r20, %r1, 1;\nsetp.eq.u32 %p1, %r20, 1;\n"
    "vote.sync.ballot.b32 %r20, %p1, -1;", odd },
  { "setp.lt.u32 %p1, %r1, 32;\nvote.sync.all.pred %p2, %p1, -1;\nselp.b32 %r20, 1, 0, %p2;",
    votes },
  { "redux.sync.add.s32 %r20, %r10, -1;", sum },
  { "redux.sync.max.u32 %r20, %r10, -1;", largest },
  { "mov.u32 %r20, %lanemask_lt;", below },
  { "setp.lt.u32 %p1, %r1, 10;\nsetp.lt.u32 %p2, %r1, 20;\n@%p1 bra ten;\n@%p2 bra twenty;\n"
    "add.u32 %r20, %r1, 300;\nbra joined;\nten:\nadd.u32 %r20, %r1, 100;\nbra joined;\ntwenty:\n"
    "add.u32 %r20, %r1, 200;\njoined:\nbar.warp.sync -1;\n", paths },
  { "mov.u32 %r20, 0;\nmov.u32 %r21, %r1;\nround:\nadd.u32 %r20, %r20, %r21;\n"
    "setp.eq.u32 %p1, %r21, 0;\n@%p1 bra over;\nsub.u32 %r21, %r21, 1;\nbra round;\nover:\n"
    "bar.warp.sync -1;\n", loops },
};

static void test_lanes(void **state)
{
  (void)state;
  begin();
  for (size_t i = 0; i < sizeof exchanges / sizeof *exchanges; i++) {
    char body[1024];
    uint32_t is[32];
    snprintf(body, sizeof body, "mul.lo.u32 %%r10, %%r1, 3;\n%s\nst.global.u32 [%%d4], %%r20;\n",
             exchanges[i].text);
    assert_int_equal(run("sm_80", body, 1, 32, 64), 0);
    assert_int_equal(cuda.to_host(is, output, sizeof is), 0);
    for (uint32_t l = 0; l < 32; l++)
      if (is[l] != exchanges[i].of(l))
        fail_msg("%s: lane %u has %08x, not %08x", exchanges[i].text, l, is[l],
                 exchanges[i].of(l));
  }
  end();
}

// 8 rows of 16 bytes in different banks are one pass; all in the same are eight.
static void test_counts(void **state)
{
  (void)state;
  begin();
  for (int shift = 4; shift < 8; shift += 3) {
    char body[1024];
    uint64_t mma = cuda.count("mma"), replays = cuda.count("replays");
    uint64_t ldmatrix = cuda.count("ldmatrix"), barriers = cuda.count("barriers");
    uint64_t bytes = cuda.count("copied bytes");
    snprintf(body, sizeof body, "%sand.b32 %%r6, %%r1, 7;\n"
             "shl.b32 %%r6, %%r6, %d;\nadd.u32 %%r6, %%r3, %%r6;\n"
             "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%%r7, %%r8}, [%%r6];\n%s",
             COPY COMMIT WAIT(0) BARRIER, shift, FRAGMENTS MMA MMA);
    assert_int_equal(run("sm_80", body, 3, 256, 2048), 0);
    assert_int_equal(cuda.count("mma") - mma, 3 * 8 * 2);
    assert_int_equal(cuda.count("ldmatrix") - ldmatrix, 3 * 8);
    assert_int_equal(cuda.count("replays") - replays, shift == 4 ? 0 : 3 * 8 * 2 * 7);
    assert_int_equal(cuda.count("barriers") - barriers, 3);
    assert_int_equal(cuda.count("copied bytes") - bytes, 3 * 256 * 4);
  }
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
  assert_int_equal(cuda.load(&module, text), 0);
  setenv("EMULATOR_ARCH", "sm_100", 1);
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

// ---- failures on demand

static void test_failures_on_demand(void **state)
{
  (void)state;
  uint64_t address[3], left = 5000;
  char room[32];
  begin();
  setenv("EMULATOR_FAIL", "cuEventCreate:1=2,cuMemsetD32_v2:2=719", 1);
  void *event;
  assert_int_equal(cuda.event_create(&event, 0), 2);
  assert_int_equal(cuda.set_words(output, 0, 1), 0);
  assert_int_equal(cuda.set_words(output, 0, 1), 719);
  assert_int_equal(cuda.set_words(output, 0, 1), 0);
  unsetenv("EMULATOR_FAIL");
  snprintf(room, sizeof room, "%llu", (unsigned long long)left + 8192);
  setenv("EMULATOR_MEMORY_BYTES", room, 1);
  assert_int_equal(cuda.allocate(&address[0], left), 0);
  assert_int_equal(cuda.allocate(&address[1], 1), 2);
  assert_int_equal(cuda.free(address[0]), 0);
  assert_int_equal(cuda.allocate(&address[2], 1), 0);
  assert_int_equal(cuda.free(address[2]), 0);
  unsetenv("EMULATOR_MEMORY_BYTES");
  end();
}

// ---- streams

// These races are meant; a race detector of threads sees them too.
static void skip_where_races_are_errors(void)
{
#ifdef __SANITIZE_THREAD__
  print_message("races on purpose: not under the race detector\n");
  skip();
#endif
}

// How many of the seeds show the value that was there before: the reader did not wait.
static int count_early_reads(bool waits, unsigned reader_flags)
{
  int early = 0;
  begin();
  void *writer, *reader, *event, *host;
  assert_int_equal(cuda.stream_create(&writer, 1), 0);
  assert_int_equal(cuda.stream_create(&reader, reader_flags), 0);
  assert_int_equal(cuda.event_create(&event, 2), 0);
  assert_int_equal(cuda.allocate_host(&host, 4), 0);
  for (int i = 0; i < 40; i++) {
    assert_int_equal(cuda.set_words(output, 0, 1), 0);
    assert_int_equal(cuda.synchronize(), 0);
    assert_int_equal(cuda.set_words_async(output, 7, 1, writer), 0);
    assert_int_equal(cuda.event_record(event, writer), 0);
    if (waits) assert_int_equal(cuda.stream_wait(reader, event, 0), 0);
    assert_int_equal(cuda.to_host_async(host, output, 4, reader), 0);
    assert_int_equal(cuda.stream_synchronize(reader), 0);
    early += *(uint32_t *)host == 0;
    assert_int_equal(cuda.stream_synchronize(writer), 0);
  }
  cuda.free_host(host);
  cuda.event_destroy(event);
  cuda.stream_destroy(writer);
  cuda.stream_destroy(reader);
  end();
  return early;
}

static void test_missing_wait_between_streams_shows(void **state)
{
  (void)state;
  assert_int_equal(count_early_reads(true, 1), 0);
  skip_where_races_are_errors();
  assert_in_range(count_early_reads(false, 1), 1, 40);
}

// Blocking streams and the null stream wait for one another; others do not.
static void test_null_stream(void **state)
{
  (void)state;
  skip_where_races_are_errors();
  begin();
  void *host;
  assert_int_equal(cuda.allocate_host(&host, 4), 0);
  // who does not wait for the last of many is early nearly always
  enum { ROUNDS = 40, MANY = 16 };
  for (unsigned flags = 0; flags < 2; flags++) {
    void *stream;
    int early = 0;
    assert_int_equal(cuda.stream_create(&stream, flags), 0);
    for (int i = 0; i < ROUNDS; i++) {
      assert_int_equal(cuda.set_words(output, 0, 1), 0);
      assert_int_equal(cuda.synchronize(), 0);
      for (unsigned word = MANY; word-- > 0;)
        assert_int_equal(cuda.set_words_async(output, word ? 0 : 7, 1, i % 2 ? stream : NULL), 0);
      assert_int_equal(cuda.to_host_async(host, output, 4, i % 2 ? NULL : stream), 0);
      assert_int_equal(cuda.stream_synchronize(i % 2 ? NULL : stream), 0);
      early += *(uint32_t *)host == 0;
      assert_int_equal(cuda.synchronize(), 0);
    }
    if (flags) assert_in_range(early, 1, ROUNDS);
    else assert_int_equal(early, 0);
    cuda.stream_destroy(stream);
  }
  cuda.free_host(host);
  end();
}

// Pinned memory is read when the copy runs; other memory before the call returns.
static void test_reused_host_memory(void **state)
{
  (void)state;
  skip_where_races_are_errors();
  begin();
  void *stream, *pinned;
  uint32_t plain, seen;
  int changed = 0;
  assert_int_equal(cuda.stream_create(&stream, 1), 0);
  assert_int_equal(cuda.allocate_host(&pinned, 4), 0);
  for (int i = 0; i < 40; i++) {
    *(uint32_t *)pinned = 1;
    assert_int_equal(cuda.to_device_async(output, pinned, 4, stream), 0);
    *(volatile uint32_t *)pinned = 2;
    assert_int_equal(cuda.stream_synchronize(stream), 0);
    assert_int_equal(cuda.to_host(&seen, output, 4), 0);
    changed += seen == 2;
    plain = 1;
    assert_int_equal(cuda.to_device_async(output, &plain, 4, stream), 0);
    plain = 2;
    assert_int_equal(cuda.to_host(&seen, output, 4), 0);
    assert_int_equal(seen, 1);
  }
  assert_in_range(changed, 1, 40);
  cuda.free_host(pinned);
  cuda.stream_destroy(stream);
  end();
}

static void note(void *argument) { (*(int *)argument)++; }

static void test_events_and_host_functions(void **state)
{
  (void)state;
  begin();
  void *stream, *from, *to;
  int noted = 0, status;
  float ms;
  assert_int_equal(cuda.stream_create(&stream, 1), 0);
  assert_int_equal(cuda.event_create(&from, 0), 0);
  assert_int_equal(cuda.event_create(&to, 0), 0);
  assert_int_equal(cuda.event_query(from), 0);  // never recorded: done
  assert_int_equal(cuda.event_elapsed(&ms, from, to), 400);
  assert_int_equal(cuda.event_record(from, stream), 0);
  for (int i = 0; i < 10; i++) assert_int_equal(cuda.host_function(stream, note, &noted), 0);
  assert_int_equal(cuda.event_record(to, stream), 0);
  while ((status = cuda.event_query(to)) == 600) {}
  assert_int_equal(status, 0);
  assert_int_equal(noted, 10);
  assert_int_equal(cuda.event_elapsed(&ms, from, to), 0);
  assert_true(ms >= 0);
  while ((status = cuda.stream_query(stream)) == 600) {}
  assert_int_equal(status, 0);
  cuda.event_destroy(from);
  cuda.event_destroy(to);
  assert_int_equal(cuda.stream_destroy(stream), 0);
  assert_int_equal(cuda.stream_synchronize(stream), 400);
  end();
}

// A fault shows where somebody waits, and stays.
static void test_fault_in_a_stream(void **state)
{
  (void)state;
  setenv("EMULATOR_QUIET", "1", 1);
  begin();
  void *stream, *module, *function = load("sm_80", "st.global.u32 [%d4+8192], %r1;\n", &module);
  assert_int_equal(cuda.stream_create(&stream, 1), 0);
  assert_int_equal(launch(function, 1, 32, 0, stream), 0);
  assert_int_equal(cuda.stream_synchronize(stream), ILLEGAL_ADDRESS);
  assert_int_equal(launch(function, 1, 32, 0, stream), ILLEGAL_ADDRESS);
  assert_int_equal(cuda.stream_create(&stream, 1), ILLEGAL_ADDRESS);
  end();
}

static void test_two_devices(void **state)
{
  (void)state;
  setenv("EMULATOR_QUIET", "1", 1);
  setenv("EMULATOR_DEVICES", "2", 1);
  begin();
  void *other, *stream, *module, *bad = load("sm_80", "trap;\n", &module);
  assert_int_equal(cuda.retain(&other, 1), 0);
  assert_int_equal(cuda.retain(&other, 2), 101);
  assert_int_equal(cuda.set_current(other), 0);
  assert_int_equal(cuda.stream_create(&stream, 0), 0);
  assert_int_equal(launch(bad, 1, 32, 0, NULL), 400);  // the other device's function
  assert_int_equal(cuda.set_current(context), 0);
  assert_int_equal(cuda.stream_synchronize(stream), 400);
  assert_int_equal(launch(bad, 1, 32, 0, NULL), 0);
  assert_int_equal(cuda.synchronize(), LAUNCH_FAILED);
  assert_int_equal(cuda.set_current(other), 0);
  assert_int_equal(cuda.synchronize(), 0);
  assert_int_equal(cuda.release(1), 0);
  assert_int_equal(cuda.set_current(context), 0);
  end();
  unsetenv("EMULATOR_DEVICES");
}

// ---- graphs

#define ADD_ONE "ld.global.u32 %r7, [%d4];\nadd.u32 %r7, %r7, 1;\nst.global.u32 [%d4], %r7;\n"
#define DOUBLE "ld.global.u32 %r7, [%d4];\nadd.u32 %r7, %r7, %r7;\nst.global.u32 [%d4], %r7;\n"

// Forks to a second stream and back: (x + 1) * 2, then + 1 on either side of the join.
static void test_graph(void **state)
{
  (void)state;
  begin();
  void *first, *second, *forked, *joined, *graph, *exec, *modules[2];
  void *add = load("sm_80", ADD_ONE, &modules[0]), *twice = load("sm_80", DOUBLE, &modules[1]);
  uint32_t seen, capturing;
  assert_int_equal(cuda.stream_create(&first, 1), 0);
  assert_int_equal(cuda.stream_create(&second, 1), 0);
  assert_int_equal(cuda.event_create(&forked, 2), 0);
  assert_int_equal(cuda.event_create(&joined, 2), 0);
  assert_int_equal(cuda.set_words(output, 0, 32), 0);
  assert_int_equal(cuda.synchronize(), 0);
  assert_int_equal(cuda.begin_capture(first, 0), 0);
  assert_int_equal(launch(add, 1, 32, 0, first), 0);
  assert_int_equal(cuda.event_record(forked, first), 0);
  assert_int_equal(cuda.stream_wait(second, forked, 0), 0);
  assert_int_equal(launch(twice, 1, 32, 0, second), 0);
  assert_int_equal(cuda.event_record(joined, second), 0);
  assert_int_equal(cuda.is_capturing(second, (int *)&capturing), 0);
  assert_int_equal(capturing, 1);
  assert_int_equal(cuda.stream_wait(first, joined, 0), 0);
  assert_int_equal(launch(add, 1, 32, 0, first), 0);
  assert_int_equal(cuda.end_capture(first, &graph), 0);
  assert_int_equal(cuda.graph_instantiate(&exec, graph, 0), 0);
  assert_int_equal(cuda.graph_destroy(graph), 0);
  assert_int_equal(cuda.to_host(&seen, output, 4), 0);
  assert_int_equal(seen, 0);  // nothing has run
  for (uint32_t i = 0, x = 0; i < 10; i++) {
    x = (x + 1) * 2 + 1;
    assert_int_equal(cuda.graph_launch(exec, first), 0);
    assert_int_equal(cuda.stream_synchronize(first), 0);
    assert_int_equal(cuda.to_host(&seen, output, 4), 0);
    assert_int_equal(seen, x);
  }
  assert_int_equal(cuda.graph_exec_destroy(exec), 0);
  cuda.event_destroy(forked);
  cuda.event_destroy(joined);
  cuda.stream_destroy(first);
  cuda.stream_destroy(second);
  end();
}

// The same with no event back: refused, and with no event there: both orders come about.
static void test_graph_without_an_edge(void **state)
{
  (void)state;
  begin();
  void *first, *second, *forked, *joined, *graph, *exec, *modules[2];
  void *add = load("sm_80", ADD_ONE, &modules[0]), *twice = load("sm_80", DOUBLE, &modules[1]);
  uint32_t seen;
  assert_int_equal(cuda.stream_create(&first, 1), 0);
  assert_int_equal(cuda.stream_create(&second, 1), 0);
  assert_int_equal(cuda.event_create(&forked, 2), 0);
  assert_int_equal(cuda.event_create(&joined, 2), 0);
  for (int joins = 0; joins < 2; joins++) {
    assert_int_equal(cuda.begin_capture(first, 0), 0);
    assert_int_equal(cuda.event_record(forked, first), 0);
    assert_int_equal(cuda.stream_wait(second, forked, 0), 0);
    assert_int_equal(launch(add, 1, 32, 0, first), 0);
    assert_int_equal(launch(twice, 1, 32, 0, second), 0);
    assert_int_equal(cuda.event_record(joined, second), 0);
    if (joins) assert_int_equal(cuda.stream_wait(first, joined, 0), 0);
    assert_int_equal(cuda.end_capture(first, &graph), joins ? 0 : 904);
  }
  assert_int_equal(cuda.graph_instantiate(&exec, graph, 0), 0);
  int orders[2] = { 0 };
  for (int i = 0; i < 40; i++) {
    assert_int_equal(cuda.set_words(output, 1, 32), 0);
    assert_int_equal(cuda.synchronize(), 0);
    assert_int_equal(cuda.graph_launch(exec, first), 0);
    assert_int_equal(cuda.stream_synchronize(first), 0);
    assert_int_equal(cuda.to_host(&seen, output, 4), 0);
    assert_in_range(seen, 3, 4);
    orders[seen - 3]++;
  }
  assert_true(orders[0] && orders[1]);
  cuda.graph_destroy(graph);
  cuda.graph_exec_destroy(exec);
  cuda.event_destroy(forked);
  cuda.event_destroy(joined);
  cuda.stream_destroy(first);
  cuda.stream_destroy(second);
  end();
}

static void test_waiting_spoils_a_recording(void **state)
{
  (void)state;
  begin();
  void *stream, *graph;
  assert_int_equal(cuda.stream_create(&stream, 1), 0);
  assert_int_equal(cuda.begin_capture(stream, 0), 0);
  assert_int_equal(cuda.stream_synchronize(stream), 900);
  assert_int_equal(cuda.end_capture(stream, &graph), 901);
  uint64_t address;
  assert_int_equal(cuda.begin_capture(stream, 0), 0);
  assert_int_equal(cuda.allocate(&address, 16), 900);
  assert_int_equal(cuda.end_capture(stream, &graph), 901);
  assert_int_equal(cuda.begin_capture(stream, 2), 0);  // relaxed
  assert_int_equal(cuda.allocate(&address, 16), 0);
  assert_int_equal(cuda.end_capture(stream, &graph), 0);
  cuda.graph_destroy(graph);
  cuda.free(address);
  cuda.stream_destroy(stream);
  end();
}

// ---- wgmma, in the layouts that its descriptors know

// d[64][N] = a[64][64] b[N][64] transposed.  WIDTH: bytes of a line, 16 where there is no swizzle;
// A_ROWS, B_ROWS: rows are contiguous in memory instead of k.
static const char wgmma_source[] =
  "typedef unsigned long long u64;\n"
  "#define ASM(text) asm volatile(text ::: \"memory\")\n"
  "extern __shared__ __align__(1024) unsigned char shared[];\n"
  "static __device__ unsigned place(int row, int k, bool rows) {\n"
  "  int byte = 2 * (rows ? row : k), line = rows ? k : row;\n"
  "  unsigned at = (unsigned)(byte / WIDTH * 64 * WIDTH + line * WIDTH + byte % WIDTH);\n"
  "  return WIDTH == 128 ? at ^ (at >> 3 & 0x70) : WIDTH == 64 ? at ^ (at >> 3 & 0x30)\n"
  "       : WIDTH == 32 ? at ^ (at >> 3 & 0x10) : at;\n"
  "}\n"
  "static __device__ u64 descriptor(unsigned at, int k, bool rows) {\n"
  "  u64 mode = WIDTH == 128 ? 1 : WIDTH == 64 ? 2 : WIDTH == 32 ? 3 : 0;\n"
  "  unsigned panel = 64 * WIDTH, eight = 8 * WIDTH;\n"
  "  at += rows ? k * WIDTH : 2 * k / WIDTH * panel + 2 * k % WIDTH;\n"
  "  unsigned leading = rows && WIDTH == 16 ? eight : panel;\n"
  "  unsigned stride = rows && WIDTH == 16 ? panel : eight;\n"
  "  return (u64)(at >> 4 & 0x3fff) | (u64)(leading >> 4) << 16 | (u64)(stride >> 4) << 32 |\n"
  "         mode << 62;\n"
  "}\n"
  "extern \"C\" __global__ void k(float *d, const unsigned short *in) {\n"
  "  unsigned base = (unsigned)__cvta_generic_to_shared(shared);\n"
  "  for (int i = threadIdx.x; i < 64 * 64; i += 128) {\n"
  "    *(unsigned short *)(shared + place(i / 64, i % 64, A_ROWS)) = in[i];\n"
  "    *(unsigned short *)(shared + 8192 + place(i / 64, i % 64, B_ROWS)) = in[4096 + i];\n"
  "  }\n"
  "  FENCE; BARRIER;\n"
  "  float c[16];\n"
  "  for (int i = 0; i < 16; i++) c[i] = 0;\n"
  "  unsigned a[4][4], lane = threadIdx.x % 32, warp = threadIdx.x / 32;\n"
  "  for (int s = 0; s < 4; s++) for (int i = 0; i < 4; i++)\n"
  "    a[s][i] = *(const unsigned *)(in + (warp * 16 + lane / 4 + i % 2 * 8) * 64 + 16 * s +\n"
  "                                  lane % 4 * 2 + i / 2 * 8);\n"
  "  WGMMA_FENCE;\n"
  "  for (int s = 0; s < 4; s++)\n"
  "#if A_REGISTERS\n"
  "    asm volatile(\"wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 \"\n"
  "      \"{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, \"\n"
  "      \"{%16,%17,%18,%19}, %20, 1, 1, 1, %21;\"\n"
  "      : \"+f\"(c[0]), \"+f\"(c[1]), \"+f\"(c[2]), \"+f\"(c[3]), \"+f\"(c[4]), \"+f\"(c[5]),\n"
  "        \"+f\"(c[6]), \"+f\"(c[7]), \"+f\"(c[8]), \"+f\"(c[9]), \"+f\"(c[10]), \"+f\"(c[11]),\n"
  "        \"+f\"(c[12]), \"+f\"(c[13]), \"+f\"(c[14]), \"+f\"(c[15])\n"
  "      : \"r\"(a[s][0]), \"r\"(a[s][1]), \"r\"(a[s][2]), \"r\"(a[s][3]),\n"
  "        \"l\"(descriptor(base + 8192, 16 * s, B_ROWS)), \"n\"(B_ROWS));\n"
  "#else\n"
  "    asm volatile(\"wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 \"\n"
  "      \"{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, \"\n"
  "      \"%16, %17, 1, 1, 1, %18, %19;\"\n"
  "      : \"+f\"(c[0]), \"+f\"(c[1]), \"+f\"(c[2]), \"+f\"(c[3]), \"+f\"(c[4]), \"+f\"(c[5]),\n"
  "        \"+f\"(c[6]), \"+f\"(c[7]), \"+f\"(c[8]), \"+f\"(c[9]), \"+f\"(c[10]), \"+f\"(c[11]),\n"
  "        \"+f\"(c[12]), \"+f\"(c[13]), \"+f\"(c[14]), \"+f\"(c[15])\n"
  "      : \"l\"(descriptor(base, 16 * s, A_ROWS)),\n"
  "        \"l\"(descriptor(base + 8192, 16 * s, B_ROWS)), \"n\"(A_ROWS), \"n\"(B_ROWS));\n"
  "#endif\n"
  "  asm volatile(\"wgmma.commit_group.sync.aligned;\" ::: \"memory\");\n"
  "  WAIT;\n"
  "  for (int i = 0; i < 16; i++)\n"
  "    d[(warp * 16 + lane / 4 + i / 2 % 2 * 8) * 32 + i / 4 * 8 + lane % 4 * 2 + i % 2] = c[i];\n"
  "}\n";

// The status; *wrong: how many sums are not the product's.  Skips where there is no NVRTC.
static int run_wgmma(const char *fault, int width, int a_rows, int b_rows, int a_registers,
                     int *wrong)
{
  static uint16_t in[2 * 64 * 64];
  static float d[64 * 32];
  char settings[4][32];
  bool missing;
  snprintf(settings[0], 32, "-DWIDTH=%d", width);
  snprintf(settings[1], 32, "-DA_ROWS=%d", a_rows);
  snprintf(settings[2], 32, "-DB_ROWS=%d", b_rows);
  snprintf(settings[3], 32, "-DA_REGISTERS=%d", a_registers);
  const char *options[] = {
    settings[0], settings[1], settings[2], settings[3],
    strcmp(fault, "fence") ? "-DFENCE=ASM(\"fence.proxy.async.shared::cta;\")" : "-DFENCE=",
    strcmp(fault, "barrier") ? "-DBARRIER=__syncthreads()" : "-DBARRIER=",
    !strcmp(fault, "wgmma fence") ? "-DWGMMA_FENCE="
    : strcmp(fault, "alone") ? "-DWGMMA_FENCE=ASM(\"wgmma.fence.sync.aligned;\")"
    : "-DWGMMA_FENCE=if (warp == 3) return; ASM(\"wgmma.fence.sync.aligned;\")",
    strcmp(fault, "wait") ? "-DWAIT=ASM(\"wgmma.wait_group.sync.aligned 0;\")" : "-DWAIT=" };
  char *ptx = cuda_compile(wgmma_source, "sm_90a", options, 8, false, &missing);
  if (missing) skip();
  assert_non_null(ptx);
  uint64_t in_at, d_at;
  for (int i = 0; i < 2 * 64 * 64; i++) {
    float x = (float)(i * 7 % 13 - 6);
    uint32_t bits;
    memcpy(&bits, &x, 4);
    in[i] = (uint16_t)(bits >> 16);
  }
  begin();
  void *module, *function;
  assert_int_equal(cuda.load(&module, ptx), 0);
  free(ptx);
  assert_int_equal(cuda.function(&function, module, "k"), 0);
  assert_int_equal(cuda.allocate(&in_at, sizeof in), 0);
  assert_int_equal(cuda.allocate(&d_at, sizeof d), 0);
  assert_int_equal(cuda.to_device(in_at, in, sizeof in), 0);
  void *params[] = { &d_at, &in_at };
  assert_int_equal(cuda.launch(function, 1, 1, 1, 128, 1, 1, 16384, NULL, params, NULL), 0);
  int status = cuda.synchronize();
  *wrong = 0;
  if (!status) assert_int_equal(cuda.to_host(d, d_at, sizeof d), 0);
  for (int m = 0; m < 64 && !status; m++)
    for (int n = 0; n < 32; n++) {
      float sum = 0;
      for (int k = 0; k < 64; k++)
        sum += (float)((m * 64 + k) * 7 % 13 - 6) * (float)((4096 + n * 64 + k) * 7 % 13 - 6);
      *wrong += d[m * 32 + n] != sum;
    }
  end();
  return status;
}

static void test_wgmma_layouts(void **state)
{
  (void)state;
  static const int widths[] = { 16, 32, 64, 128 };
  setenv("EMULATOR_ARCH", "sm_90a", 1);
  for (int w = 0; w < 4; w++)
    for (int rows = 0; rows < 4; rows++)
      for (int registers = 0; registers < (rows & 1 ? 1 : 2); registers++) {
        int wrong, status = run_wgmma("", widths[w], rows & 1, rows >> 1, registers, &wrong);
        if (status || wrong)
          fail_msg("width %d, rows %d, registers %d: %d, %d wrong", widths[w], rows, registers,
                   status, wrong);
      }
}

static void test_wgmma_faults(void **state)
{
  (void)state;
  static const struct { const char *fault, *words; } cases[] = {
    { "fence", "fence.proxy.async" }, { "barrier", "no barrier between|never written" },
    { "wgmma fence", "no wgmma.fence" }, { "wait", "wgmma not waited for" },
    { "alone", "other wgmmas than warp 0" },
  };
  setenv("EMULATOR_ARCH", "sm_90a", 1);
  setenv("EMULATOR_QUIET", "1", 1);
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    int wrong, status = run_wgmma(cases[i].fault, 128, 0, 0, 0, &wrong);
    if (status != LAUNCH_FAILED || !says(cases[i].words))
      fail_msg("%s: %d: %s", cases[i].fault, status, said());
  }
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test_teardown(test_faults, leave),
    cmocka_unit_test_teardown(test_late_copies_show_in_the_numbers, leave),
    cmocka_unit_test_teardown(test_fault_says_where, leave),
    cmocka_unit_test_teardown(test_endless_loop, leave),
    cmocka_unit_test_teardown(test_freed_memory, leave),
    cmocka_unit_test_teardown(test_new_memory_is_poison, leave),
    cmocka_unit_test_teardown(test_values, leave),
    cmocka_unit_test_teardown(test_lanes, leave),
    cmocka_unit_test_teardown(test_counts, leave),
    cmocka_unit_test_teardown(test_unknown_instruction, leave),
    cmocka_unit_test_teardown(test_what_it_does_not_load, leave),
    cmocka_unit_test_teardown(test_launch_limits, leave),
    cmocka_unit_test_teardown(test_failures_on_demand, leave),
    cmocka_unit_test_teardown(test_wgmma_layouts, leave),
    cmocka_unit_test_teardown(test_wgmma_faults, leave),
    cmocka_unit_test_teardown(test_missing_wait_between_streams_shows, leave),
    cmocka_unit_test_teardown(test_null_stream, leave),
    cmocka_unit_test_teardown(test_reused_host_memory, leave),
    cmocka_unit_test_teardown(test_events_and_host_functions, leave),
    cmocka_unit_test_teardown(test_fault_in_a_stream, leave),
    cmocka_unit_test_teardown(test_two_devices, leave),
    cmocka_unit_test_teardown(test_graph, leave),
    cmocka_unit_test_teardown(test_graph_without_an_edge, leave),
    cmocka_unit_test_teardown(test_waiting_spoils_a_recording, leave),
  };
  const char *path = getenv("TEST_LIBCUDA");
  if (!path || !cuda_driver_open(&cuda, path)) {
    fprintf(stderr, "TEST_LIBCUDA must name libcuda_emulated.so\n");
    return 1;
  }
  return cmocka_run_group_tests(tests, NULL, NULL);
}
