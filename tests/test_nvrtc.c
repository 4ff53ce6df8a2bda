// test_nvrtc.c: CUDA C becomes a CUBIN, its PTX, and numbers one can trust; no GPU, no driver.
//
// Needs NVRTC, but for the tests of its absence.  Where there is none the others are skipped by
// name.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "jit.h"
#include "jit_cache.h"
#include "scratch.h"

static const char *root;
static bool have_nvrtc;
static char cache[256];
static const double plenty_s = 120;

static const char plain[] =
    "struct launch { int threads, shared_bytes; };\n"
    "extern \"C\" __device__ const struct launch scale_launch = { 64, 4096 };\n"
    "extern \"C\" __constant__ const int limits[2] = { 7, 9 };\n"
    "extern \"C\" __device__ float room[16];\n"
    "extern \"C\" __global__ void scale(float *p, float f)\n"
    "{\n"
    "  __shared__ float s[64];\n"
    "  s[threadIdx.x] = f * p[threadIdx.x];\n"
    "  __syncthreads();\n"
    "  p[threadIdx.x] = s[63 - threadIdx.x];\n"
    "}\n"
    "extern \"C\" __global__ void nothing() {}\n";

// Sixty-four registers for a hundred and twenty-eight values that all live at once.
static const char spilling[] =
    "extern \"C\" __global__ void __launch_bounds__(256, 4) spill(float *p, int n)\n"
    "{\n"
    "  float a[128];\n"
    "  for (int i = 0; i < 128; i++) a[i] = p[i * n + threadIdx.x];\n"
    "  __syncthreads();\n"
    "  for (int i = 0; i < 128; i++) p[i * 7 + threadIdx.x] = a[i] * a[(i * 5) % 128];\n"
    "}\n";

static struct sw_jit_request request_for(const char *source, const char *isa)
{
  static _Thread_local char flags[8][64];
  static _Thread_local int turn;
  char *mine = flags[turn++ % 8];
  snprintf(mine, sizeof flags[0], "--gpu-architecture=%s", isa);
  return (struct sw_jit_request){
    .name = "scale", .source = source, .flags = mine, .isa = isa, .compiler = SW_JIT_NVRTC
  };
}

static struct sw_jit *open_jit(void)
{
  struct sw_jit *jit = NULL;
  assert_int_equal(sw_jit_open(cache, NULL, &jit), SWATHE_OK);
  return jit;
}

static void need_nvrtc(void)
{
  if (!have_nvrtc) skip();
}

static double now(void)
{
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static const struct sw_jit_resources *use_of(const struct sw_jit_report *report, const char *kernel)
{
  for (int32_t i = 0; i < report->kernel_count; i++)
    if (!strcmp(report->kernels[i].kernel, kernel)) return &report->kernels[i];
  fail_msg("nothing is said about %s", kernel);
  return NULL;
}

static int begin(void **state)
{
  char command[300];
  (void)state;
  unsetenv("SWATHE_LIBNVRTC");
  snprintf(command, sizeof command, "rm -rf '%s'", cache);
  return system(command);
}

static int begin_all(void **state)
{
  struct sw_jit *jit;
  struct sw_jit_nvrtc_state found;
  (void)state;
  root = scratch_make("nvrtc");
  if (!root) return -1;
  snprintf(cache, sizeof cache, "%s/cache", root);
  unsetenv("SWATHE_LIBNVRTC");
  if (sw_jit_open(cache, NULL, &jit)) return -1;
  sw_jit_nvrtc_state(jit, &found);
  have_nvrtc = *found.path;
  if (!have_nvrtc) print_message("skipped, for want of NVRTC: %s\n", found.problem);
  sw_jit_close(jit);
  return 0;
}

// ---- What comes out ----------------------------------------------------------------------------

static void an_image_is_code_and_its_text(void **state)
{
  struct sw_jit_image *image;
  struct sw_jit_report report;
  const void *cubin;
  const char *ptx;
  size_t cubin_bytes;
  void *address;
  (void)state;
  need_nvrtc();
  static const char *const isas[] = { "sm_80", "sm_90", "sm_90a", "sm_100", "sm_120" };
  for (size_t i = 0; i < sizeof isas / sizeof *isas; i++) {
    char target[32];
    struct sw_jit *jit = open_jit();
    const struct sw_jit_request request = request_for(plain, isas[i]);
    assert_int_equal(sw_jit_load(jit, &request, plenty_s, &image, &report, NULL), SWATHE_OK);
    sw_jit_close(jit);  // images stay
    assert_false(report.cached);
    assert_true(report.compile_s > 0);

    assert_int_equal(sw_jit_cuda(image, &cubin, &cubin_bytes, &ptx), SWATHE_OK);
    assert_memory_equal(cubin, "\177ELF", 4);
    assert_int_equal((uintptr_t)cubin % 16, 0);
    snprintf(target, sizeof target, ".target %s", isas[i]);
    assert_non_null(strstr(ptx, target));
    assert_non_null(strstr(ptx, ".entry scale("));

    // what variables begin with can be read without a driver
    assert_int_equal(sw_jit_symbol(image, "scale_launch", &address), SWATHE_OK);
    assert_int_equal(((const int *)address)[0], 64);
    assert_int_equal(((const int *)address)[1], 4096);
    assert_int_equal(sw_jit_symbol(image, "limits", &address), SWATHE_OK);
    assert_int_equal(((const int *)address)[1], 9);
    assert_int_equal(sw_jit_symbol(image, "room", &address), SWATHE_LOAD);   // begins as nothing
    assert_int_equal(sw_jit_symbol(image, "absent", &address), SWATHE_LOAD);
    assert_non_null(strstr(swathe_error(), "absent"));
    int launch[2] = { 0 };
    assert_int_equal(sw_jit_variable(image, "scale_launch", launch, sizeof launch), SWATHE_OK);
    assert_int_equal(launch[0], 64);
    assert_int_equal(launch[1], 4096);
    assert_int_equal(sw_jit_variable(image, "scale_launch", launch, 4), SWATHE_LOAD);
    assert_non_null(strstr(swathe_error(), "scale_launch has 8 bytes in the image, 4 here"));
    assert_int_equal(sw_jit_variable(image, "absent", launch, sizeof launch), SWATHE_LOAD);
    sw_jit_unload(image);
  }
}

static void use_is_reported_and_kept(void **state)
{
  (void)state;
  need_nvrtc();
  for (int cached = 0; cached < 2; cached++) {
    struct sw_jit_report report;
    struct sw_jit *jit = open_jit();
    struct sw_jit_request request = request_for(plain, "sm_80");
    assert_int_equal(sw_jit_warm(jit, &request, plenty_s, &report, NULL), SWATHE_OK);
    assert_int_equal(report.cached, cached);
    assert_int_equal(report.kernel_count, 2);
    const struct sw_jit_resources *scale = use_of(&report, "scale");
    assert_in_range(scale->registers, 4, 32);
    assert_int_equal(scale->spill_bytes, 0);
    assert_int_equal(scale->stack_bytes, 0);
    assert_int_equal(scale->static_shared_bytes, 256);
    assert_int_equal(scale->barriers, 1);
    const struct sw_jit_resources *nothing = use_of(&report, "nothing");
    assert_int_equal(nothing->static_shared_bytes, 0);
    assert_int_equal(nothing->barriers, 0);
    assert_true(nothing->registers < scale->registers);

    request = request_for(spilling, "sm_90");
    assert_int_equal(sw_jit_warm(jit, &request, plenty_s, &report, NULL), SWATHE_OK);
    assert_int_equal(report.cached, cached);
    const struct sw_jit_resources *spill = use_of(&report, "spill");
    assert_int_equal(spill->registers, 64);
    assert_true(spill->spill_bytes > 256);
    assert_true(spill->stack_bytes >= 512);
    sw_jit_close(jit);
  }
}

static void an_image_for_the_host_is_no_cuda_image(void **state)
{
  struct sw_jit_image *image;
  const void *cubin;
  const char *ptx;
  size_t cubin_bytes;
  (void)state;
  struct sw_jit *jit = open_jit();
  const struct sw_jit_request request = {
    .name = "scale", .source = "int x;", .flags = "-shared -fPIC", .isa = "generic"
  };
  assert_int_equal(sw_jit_load(jit, &request, plenty_s, &image, NULL, NULL), SWATHE_OK);
  assert_int_equal(sw_jit_cuda(image, &cubin, &cubin_bytes, &ptx), SWATHE_LOAD);
  sw_jit_unload(image);
  sw_jit_close(jit);
}

// ---- What is refused ---------------------------------------------------------------------------

static void mistakes_come_back_with_their_lines(void **state)
{
  static const struct {
    const char *source, *isa, *flags, *words, *log;
  } cases[] = {
    { "\n\nextern \"C\" __global__ void f() { int x = nowhere; }\n", "sm_80", "",
      "NVRTC_ERROR_COMPILATION", "scale.cu(3): error: identifier \"nowhere\" is undefined" },
    { "#include <cuda_bf16.h>\n", "sm_80", "", "rejected", "scale.cu(1)" },
    // the assembler's messages name lines of the PTX: the line itself comes along
    { "extern \"C\" __global__ void f() { asm volatile(\"made.up.name;\"); }\n", "sm_80", "",
      "rejected", "    made.up.name;" },
    { "extern \"C\" __global__ void f() {}\n", "sm_80", "--made-up", "INVALID_OPTION",
      "--made-up" },
    // wgmma is sm_90a's alone
    { "extern \"C\" __global__ void f() { asm volatile(\"wgmma.fence.sync.aligned;\"); }\n",
      "sm_90", "", "rejected", "    wgmma.fence.sync.aligned;" },
    { "__device__ int no_kernel;\n", "sm_80", "", "no kernel", "" },
  };
  (void)state;
  need_nvrtc();
  struct sw_jit *jit = open_jit();
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    char *log = NULL;
    struct sw_jit_request request = request_for(cases[i].source, cases[i].isa);
    if (*cases[i].flags) request.flags = cases[i].flags;
    for (int again = 0; again < 2; again++) {  // a failure is not kept
      assert_int_equal(sw_jit_warm(jit, &request, plenty_s, NULL, &log), SWATHE_COMPILE);
      assert_non_null(strstr(swathe_error(), cases[i].words));
      assert_non_null(strstr(swathe_error(), "while compiling scale for"));
      assert_non_null(log);
      if (!strstr(log, cases[i].log)) fail_msg("the log lacks '%s': %s", cases[i].log, log);
      free(log);
    }
  }
  sw_jit_close(jit);
}

// The assembler waits on its own when an accumulator is touched under way, and only remarks on it.
static void advisories_of_the_assembler_are_errors(void **state)
{
  static const char touched[] =
      "extern \"C\" __global__ void f(float *p, unsigned long long a, unsigned long long b)\n"
      "{\n"
      "  float c[4] = { 0, 0, 0, 0 };\n"
      "  asm volatile(\"wgmma.fence.sync.aligned;\" ::: \"memory\");\n"
      "  asm volatile(\"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 \"\n"
      "    \"{%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;\"\n"
      "    : \"+f\"(c[0]), \"+f\"(c[1]), \"+f\"(c[2]), \"+f\"(c[3]) : \"l\"(a), \"l\"(b));\n"
      "  asm volatile(\"wgmma.commit_group.sync.aligned;\" ::: \"memory\");\n"
      "  p[threadIdx.x] = c[0] + c[1] + c[2] + c[3];\n"
      "  asm volatile(\"wgmma.wait_group.sync.aligned 0;\" ::: \"memory\");\n"
      "}\n";
  char *log = NULL;
  (void)state;
  need_nvrtc();
  struct sw_jit *jit = open_jit();
  const struct sw_jit_request request = request_for(touched, "sm_90a");
  assert_int_equal(sw_jit_warm(jit, &request, plenty_s, NULL, &log), SWATHE_COMPILE);
  assert_non_null(strstr(swathe_error(), "did not take scale.cu for sm_90a as it stands"));
  assert_non_null(log);
  assert_non_null(strstr(log, "(C75"));
  free(log);
  sw_jit_close(jit);
}

static void unknown_architectures_are_named(void **state)
{
  static const char *const isas[] = { "sm_70", "sm_9", "sm_900", "generic", "", "sm_90b" };
  (void)state;
  need_nvrtc();
  struct sw_jit *jit = open_jit();
  for (size_t i = 0; i < sizeof isas / sizeof *isas; i++) {
    const struct sw_jit_request request = request_for(plain, isas[i]);
    assert_int_equal(sw_jit_warm(jit, &request, plenty_s, NULL, NULL), SWATHE_COMPILE);
    assert_non_null(strstr(swathe_error(), "sm_80"));  // the list of those it knows
  }
  sw_jit_close(jit);
}

// ---- The library itself ------------------------------------------------------------------------

static void missing_library_is_named(void **state)
{
  static const struct {
    const char *library, *words;
  } cases[] = {
    { "/no/such/libnvrtc.so", "/no/such/libnvrtc.so" },
    { "libm.so.6", "nvrtcVersion" },
  };
  struct sw_jit_nvrtc_state found;
  (void)state;
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const struct sw_jit_request request = request_for(plain, "sm_80");
    setenv("SWATHE_LIBNVRTC", cases[i].library, 1);
    struct sw_jit *jit = open_jit();
    assert_int_equal(sw_jit_warm(jit, &request, plenty_s, NULL, NULL), SWATHE_COMPILE);
    assert_non_null(strstr(swathe_error(), cases[i].words));
    sw_jit_nvrtc_state(jit, &found);
    assert_string_equal(found.path, "");
    assert_string_equal(found.isas, "");
    assert_non_null(strstr(found.problem, cases[i].words));
    sw_jit_close(jit);
  }
}

static void the_library_says_who_it_is(void **state)
{
  struct sw_jit_nvrtc_state found;
  (void)state;
  need_nvrtc();
  struct sw_jit *jit = open_jit();
  sw_jit_nvrtc_state(jit, &found);
  assert_non_null(strstr(found.path, "libnvrtc"));
  assert_memory_equal(found.version, "nvrtc 1", 7);
  assert_non_null(strstr(found.isas, "sm_80"));
  assert_string_equal(found.problem, "");
  sw_jit_close(jit);
}

// A machine without NVRTC loads what the cache has.
static void no_library_but_a_warm_cache(void **state)
{
  struct sw_jit_report report;
  struct sw_jit_image *image;
  (void)state;
  need_nvrtc();
  const struct sw_jit_request request = request_for(plain, "sm_80");
  const struct sw_jit_request other = request_for(spilling, "sm_80");
  struct sw_jit *jit = open_jit();
  assert_int_equal(sw_jit_warm(jit, &request, plenty_s, &report, NULL), SWATHE_OK);
  sw_jit_remember(jit, SW_JIT_NVRTC, "origin", report.key);
  sw_jit_close(jit);

  setenv("SWATHE_LIBNVRTC", "/no/such/libnvrtc.so", 1);
  jit = open_jit();
  assert_int_equal(sw_jit_load(jit, &request, plenty_s, &image, &report, NULL), SWATHE_OK);
  assert_true(report.cached);
  assert_int_equal(report.kernel_count, 2);
  sw_jit_unload(image);
  assert_int_equal(sw_jit_recall(jit, SW_JIT_NVRTC, "origin", "scale", &image, &report),
                   SWATHE_OK);
  assert_int_equal(report.kernel_count, 2);
  sw_jit_unload(image);
  assert_int_equal(sw_jit_recall(jit, SW_JIT_CC, "origin", "scale", &image, &report),
                   SWATHE_NOT_FOUND);
  assert_int_equal(sw_jit_warm(jit, &other, plenty_s, NULL, NULL), SWATHE_COMPILE);
  assert_non_null(strstr(swathe_error(), "/no/such/libnvrtc.so"));
  sw_jit_close(jit);
}

// ---- The cache ---------------------------------------------------------------------------------

// Standard error goes nowhere until it is told to come back.
static int silence(void)
{
  const int saved = dup(STDERR_FILENO), nowhere = open("/dev/null", O_WRONLY | O_CLOEXEC);
  dup2(nowhere, STDERR_FILENO);
  close(nowhere);
  return saved;
}

static void speak(int saved)
{
  dup2(saved, STDERR_FILENO);
  close(saved);
}

// Whole entries whose payload is none of ours: of another version, cut, or no ELF within.
static void a_payload_that_makes_no_sense_is_a_miss(void **state)
{
  struct sw_jit_report first, report;
  struct sw_jit_image *image;
  struct sw_jit_cache *entries;
  unsigned char *good;
  size_t size;
  (void)state;
  need_nvrtc();
  const struct sw_jit_request request = request_for(plain, "sm_80");
  const struct sw_jit_cache_label label = { "scale", "sm_80", "nvrtc" };
  struct sw_jit *jit = open_jit();
  assert_int_equal(sw_jit_warm(jit, &request, plenty_s, &first, NULL), SWATHE_OK);
  assert_int_equal(sw_jit_cache_open(cache, &entries), SWATHE_OK);
  assert_true(sw_jit_cache_read(entries, first.key, &good, &size));
  const int saved = silence();
  for (int kind = 0; kind < 4; kind++) {
    unsigned char *bad = malloc(size);
    memcpy(bad, good, size);
    if (kind == 0) bad[6]++;                                        // the version
    if (kind == 1) *(unsigned char *)memmem(bad, size, "\177ELF", 4) = 0;
    if (kind == 2) bad[size - 1] = 'x';                             // no end of the PTX
    for (int loaded = 0; loaded < 2; loaded++) {
      assert_true(sw_jit_cache_write(entries, first.key, &label, bad, kind == 3 ? 100 : size));
      if (loaded) {
        assert_int_equal(sw_jit_load(jit, &request, plenty_s, &image, &report, NULL), SWATHE_OK);
        sw_jit_unload(image);
      } else {
        assert_int_equal(sw_jit_warm(jit, &request, plenty_s, &report, NULL), SWATHE_OK);
      }
      assert_false(report.cached);
      assert_int_equal(report.kernel_count, 2);
      assert_int_equal(sw_jit_warm(jit, &request, plenty_s, &report, NULL), SWATHE_OK);
      assert_true(report.cached);
      assert_int_equal(report.kernel_count, 2);
    }
    free(bad);
  }
  speak(saved);
  free(good);
  sw_jit_cache_close(entries);
  sw_jit_close(jit);
}

static void the_key_holds_architecture_flags_and_compiler(void **state)
{
  struct sw_jit_report report;
  char keys[4][65];
  (void)state;
  need_nvrtc();
  struct sw_jit *jit = open_jit();
  struct sw_jit_request request = request_for("extern \"C\" __global__ void f() {}\n", "sm_90");
  for (int i = 0; i < 4; i++) {
    if (i == 1) request = request_for(request.source, "sm_90a");
    if (i == 2) request.flags = "--gpu-architecture=sm_90a --use_fast_math";
    if (i == 3) {
      request.compiler = SW_JIT_CC;
      request.source = "int x;";
      request.flags = "-shared -fPIC";
    }
    assert_int_equal(sw_jit_warm(jit, &request, plenty_s, &report, NULL), SWATHE_OK);
    assert_false(report.cached);
    strcpy(keys[i], report.key);
    for (int k = 0; k < i; k++) assert_string_not_equal(keys[k], report.key);
  }
  sw_jit_close(jit);
}

// ---- Threads and deadlines ---------------------------------------------------------------------

struct worker {
  pthread_t thread;
  struct sw_jit *jit;
  bool cached;
  enum swathe_status status;
};

static void *load_in_thread(void *arg)
{
  struct worker *worker = arg;
  struct sw_jit_report report;
  struct sw_jit_image *image;
  const struct sw_jit_request request = request_for(plain, "sm_90");
  worker->status = sw_jit_load(worker->jit, &request, plenty_s, &image, &report, NULL);
  if (worker->status) return NULL;
  worker->cached = report.cached;
  sw_jit_unload(image);
  return NULL;
}

static void threads_compile_once(void **state)
{
  struct worker workers[6];
  int compiled = 0;
  (void)state;
  need_nvrtc();
  struct sw_jit *jits[2] = { open_jit(), open_jit() };  // as two processes would
  for (int i = 0; i < 6; i++) {
    workers[i] = (struct worker){ .jit = jits[i % 2] };
    assert_int_equal(pthread_create(&workers[i].thread, NULL, load_in_thread, &workers[i]), 0);
  }
  for (int i = 0; i < 6; i++) {
    pthread_join(workers[i].thread, NULL);
    assert_int_equal(workers[i].status, SWATHE_OK);
    compiled += !workers[i].cached;
  }
  assert_int_equal(compiled, 1);
  sw_jit_close(jits[0]);
  sw_jit_close(jits[1]);
}

// Some seconds of work: what it says is long once its loops are unrolled.
static const char long_winded[] =
    "extern \"C\" __global__ void slow(float *p, int n)\n"
    "{\n"
    "  float a[64], x = p[threadIdx.x];\n"
    "  for (int i = 0; i < 64; i++) a[i] = p[n * i];\n"
    "#pragma unroll\n"
    "  for (int j = 0; j < 200; j++)\n"
    "#pragma unroll\n"
    "    for (int i = 0; i < 64; i++) {\n"
    "      a[i] = __fmaf_rn(a[(i + j) % 64], x, a[(i * 7) % 64]);\n"
    "      if (a[i] > x) x = a[i] * 0.5f;\n"
    "    }\n"
    "  for (int i = 0; i < 64; i++) p[n * i] = a[i] + x;\n"
    "}\n";

static void a_deadline_gives_the_compiler_up(void **state)
{
  struct sw_jit_job *job;
  (void)state;
  need_nvrtc();
  struct sw_jit *jit = open_jit();
  const struct sw_jit_request request = request_for(long_winded, "sm_80");
  double start = now();
  assert_int_equal(sw_jit_warm(jit, &request, 0.02, NULL, NULL), SWATHE_TIMEOUT);
  assert_non_null(strstr(swathe_error(), "given up"));
  assert_int_equal(sw_jit_job_start(jit, &request, &job), SWATHE_OK);
  assert_int_equal(sw_jit_job_finish(job, 0.02, NULL), SWATHE_TIMEOUT);
  assert_int_equal(sw_jit_job_start(jit, &request, &job), SWATHE_OK);
  sw_jit_job_kill(job);
  assert_true(now() - start < 10);  // nobody waited for its end
  start = now();
  sw_jit_close(jit);                // this does, but it was told to stop
  assert_true(now() - start < 60);
}

static void jobs_run_in_the_background(void **state)
{
  static const char *const isas[] = { "sm_80", "sm_90", "sm_120" };
  struct sw_jit_job *jobs[3];
  struct sw_jit_report report;
  char *log = NULL;
  bool done;
  (void)state;
  need_nvrtc();
  struct sw_jit *jit = open_jit();
  for (int i = 0; i < 3; i++) {
    const struct sw_jit_request request = request_for(plain, isas[i]);
    assert_int_equal(sw_jit_job_start(jit, &request, &jobs[i]), SWATHE_OK);
  }
  for (int i = 0; i < 3; i++) {
    const struct timespec nap = { .tv_nsec = 1000000 };
    for (done = false; !done; nanosleep(&nap, NULL))
      assert_int_equal(sw_jit_job_poll(jobs[i], &done), SWATHE_OK);
    assert_int_equal(sw_jit_job_finish(jobs[i], 0.01, &log), SWATHE_OK);
    assert_null(log);
    const struct sw_jit_request request = request_for(plain, isas[i]);
    assert_int_equal(sw_jit_warm(jit, &request, plenty_s, &report, NULL), SWATHE_OK);
    assert_true(report.cached);
  }
  const struct sw_jit_request wrong = request_for("wrong;\n", "sm_80");
  assert_int_equal(sw_jit_job_start(jit, &wrong, &jobs[0]), SWATHE_OK);
  assert_int_equal(sw_jit_job_finish(jobs[0], plenty_s, &log), SWATHE_COMPILE);
  assert_non_null(strstr(log, "scale.cu(1)"));
  free(log);
  sw_jit_close(jit);
}

#define TEST(name) cmocka_unit_test_setup(name, begin)

int main(void)
{
  const struct CMUnitTest tests[] = {
    TEST(an_image_is_code_and_its_text),
    TEST(use_is_reported_and_kept),
    TEST(an_image_for_the_host_is_no_cuda_image),
    TEST(mistakes_come_back_with_their_lines),
    TEST(advisories_of_the_assembler_are_errors),
    TEST(unknown_architectures_are_named),
    TEST(missing_library_is_named),
    TEST(the_library_says_who_it_is),
    TEST(no_library_but_a_warm_cache),
    TEST(a_payload_that_makes_no_sense_is_a_miss),
    TEST(the_key_holds_architecture_flags_and_compiler),
    TEST(threads_compile_once),
    TEST(a_deadline_gives_the_compiler_up),
    TEST(jobs_run_in_the_background),
  };
  return cmocka_run_group_tests(tests, begin_all, scratch_remove);
}
