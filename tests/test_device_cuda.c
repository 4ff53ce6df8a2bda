// test_device_cuda.c: the CUDA driver as a device: what is said when something is missing or fails,
// memory, modules, launches.  All of it on the emulated driver, each test in a process of its own:
// a process opens one driver, once.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "device_cuda.h"

// Doubles what `args` points to, in every block.
#define DOUBLING(version)                                                                          \
    "// Cuda compilation tools, release 13.0\n"                                                    \
    ".version " version "\n.target sm_80\n.address_size 64\n"                                      \
    ".visible .entry twice(.param .align 8 .b8 twice_param_0[8])\n"                                \
    "{\n"                                                                                          \
    "  .reg .b32 %r<6>;\n"                                                                         \
    "  .reg .b64 %rd<6>;\n"                                                                        \
    "  .reg .f32 %f<3>;\n"                                                                         \
    "  ld.param.u64 %rd1, [twice_param_0];\n"                                                      \
    "  mov.u32 %r1, %ctaid.x;\n"                                                                   \
    "  mov.u32 %r2, %tid.x;\n"                                                                     \
    "  mad.lo.s32 %r3, %r1, 32, %r2;\n"                                                            \
    "  mul.wide.s32 %rd2, %r3, 4;\n"                                                               \
    "  add.s64 %rd3, %rd1, %rd2;\n"                                                                \
    "  ld.global.f32 %f1, [%rd3];\n"                                                               \
    "  add.f32 %f2, %f1, %f1;\n"                                                                   \
    "  st.global.f32 [%rd3], %f2;\n"                                                               \
    "  ret;\n"                                                                                     \
    "}\n"
static const char doubling[] = DOUBLING("7.0"), doubling_anew[] = DOUBLING("9.0");

// ---- A process for each test --------------------------------------------------------------------

struct setting {
  const char *name, *value;
};

// Runs `body` in a child with these variables set; its words, "" when it returned SWATHE_OK.
static const char *words_of(enum swathe_status (*body)(void), const struct setting *settings)
{
  static char words[4096];
  int ends[2], state = 0;

  if (pipe(ends)) fail_msg("no pipe");
  const pid_t child = fork();
  if (child < 0) fail_msg("no process");
  if (child == 0) {
    close(ends[0]);
    for (; settings && settings->name; settings++) setenv(settings->name, settings->value, 1);
    const enum swathe_status status = body();
    const char *said = status ? swathe_error() : "";
    if (write(ends[1], said, strlen(said)) < 0) _exit(3);
    _exit(status ? 1 : 0);
  }
  close(ends[1]);
  size_t used = 0;
  for (ssize_t got; (got = read(ends[0], words + used, sizeof words - 1 - used)) > 0;)
    used += (size_t)got;
  words[used] = 0;
  close(ends[0]);
  waitpid(child, &state, 0);
  if (!WIFEXITED(state) || WEXITSTATUS(state) > 1)
    fail_msg("the child ended with state %#x after saying: %s", (unsigned)state, words);
  if (WEXITSTATUS(state) == 1 && !*words) fail_msg("a failure without words");
  return words;
}

static const char *emulated(void)
{
  const char *path = getenv("TEST_LIBCUDA");
  if (!path) skip();
  return path;
}

static void expect_words(const char *words, const char *const *parts)
{
  for (; *parts; parts++)
    if (!strstr(words, *parts)) fail_msg("'%s' is not in:\n%s", *parts, words);
}

static void expect_fine(enum swathe_status (*body)(void), const struct setting *settings)
{
  const char *words = words_of(body, settings);
  if (*words) fail_msg("%s", words);
}

// ---- Finding a driver ---------------------------------------------------------------------------

static enum swathe_status pick_device(void)
{
  int32_t ordinal = 0;
  return sw_device_cuda_pick(-1, &ordinal);
}

static void a_missing_driver_is_said(void **state)
{
  const struct setting nowhere[] = { { "SWATHE_LIBCUDA", "/nowhere/libcuda.so.1" },
                                     { NULL, NULL } };
  const struct setting other[] = { { "SWATHE_LIBCUDA", "libm.so.6" }, { NULL, NULL } };
  const char *const missing[] = { "no CUDA driver", "/nowhere/libcuda.so.1", "SWATHE_LIBCUDA",
                                  NULL };
  const char *const old[] = { "libm.so.6", "cuInit", "older than CUDA 11.2", NULL };
  (void)state;
  expect_words(words_of(pick_device, nowhere), missing);
  expect_words(words_of(pick_device, other), old);
}

// The toolkit's stub is refused by its place, before it is opened.
static void the_stub_is_not_opened(void **state)
{
  char directory[] = "/tmp/swathe-test-stub-XXXXXX", stubs[64], library[80], command[256];
  const char *const parts[] = { "is the toolkit's stub, not a driver", NULL };
  (void)state;
  assert_non_null(mkdtemp(directory));
  snprintf(stubs, sizeof stubs, "%s/stubs", directory);
  snprintf(library, sizeof library, "%s/libcuda.so.1", stubs);
  snprintf(command, sizeof command, "mkdir %s && touch %s", stubs, library);
  assert_int_equal(system(command), 0);
  const struct setting settings[] = { { "SWATHE_LIBCUDA", library }, { NULL, NULL } };
  const char *words = words_of(pick_device, settings);
  snprintf(command, sizeof command, "rm -r %s", directory);
  assert_int_equal(system(command), 0);
  expect_words(words, parts);
}

static enum swathe_status look_at_driver(void)
{
  struct sw_device_cuda_driver driver;
  const enum swathe_status status = sw_device_cuda_look(&driver);
  if (status) return status;
  if (!driver.emulated || driver.devices < 1 || driver.first_major != 9)
    return sw_fail(SWATHE_DEVICE, "not what was asked for: %s", driver.first);
  return SWATHE_OK;
}

static void an_emulated_driver_is_known_as_one(void **state)
{
  const struct setting settings[] = { { "SWATHE_LIBCUDA", emulated() },
                                      { "EMULATOR_ARCH", "sm_90a" }, { NULL, NULL } };
  (void)state;
  expect_fine(look_at_driver, settings);
}

static enum swathe_status open_device(struct sw_device_cuda **device)
{
  int32_t ordinal = 0;
  enum swathe_status status = sw_device_cuda_pick(-1, &ordinal);
  if (!status) status = sw_device_cuda_create(ordinal, device);
  return status ? status : sw_device_cuda_enter(*device);
}

static enum swathe_status ask_for_isa(void)
{
  static const char *const isas[] = { "sm_120", "sm_100", "sm_90a", "sm_90", "sm_86", "sm_80" };
  const char *want = getenv("WANT_ISA");
  struct sw_device_cuda *device = NULL;
  const enum swathe_status status = open_device(&device);
  if (status) return status;
  const char *isa = sw_device_cuda_isa(device, isas, 6);
  if (!isa || strcmp(isa, want))
    return sw_fail(SWATHE_DEVICE, "isa %s, not %s", isa ? isa : "none", want);
  return SWATHE_OK;
}

static void the_isa_is_the_devices(void **state)
{
  static const char *const rows[][2] = {
    { "sm_80", "sm_80" }, { "sm_86", "sm_86" }, { "sm_89", "sm_86" }, { "sm_90a", "sm_90a" },
    { "sm_100", "sm_100" }, { "sm_103", "sm_100" }, { "sm_120", "sm_120" },
  };
  (void)state;
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    const struct setting settings[] = { { "SWATHE_LIBCUDA", emulated() },
                                        { "EMULATOR_ARCH", rows[i][0] },
                                        { "WANT_ISA", rows[i][1] },
                                        { NULL, NULL } };
    expect_fine(ask_for_isa, settings);
  }
}

static enum swathe_status create_ninth(void)
{
  struct sw_device_cuda *device = NULL;
  return sw_device_cuda_create(9, &device);
}

static void a_device_that_is_not_there_is_refused(void **state)
{
  const struct setting settings[] = { { "SWATHE_LIBCUDA", emulated() }, { NULL, NULL } };
  const char *const parts[] = { "there is no CUDA device 9", "the driver has 1", NULL };
  (void)state;
  expect_words(words_of(create_ninth, settings), parts);
}

// ---- Work ---------------------------------------------------------------------------------------

static enum swathe_status load_doubling(struct sw_device_cuda *device, void **module,
                                        struct sw_device_cuda_launch *launch)
{
  enum swathe_status status =
      sw_device_cuda_load(device, "twice", "\177ELF", 4, doubling, module);
  *launch = (struct sw_device_cuda_launch){ .name = "twice", .blocks_x = 2, .blocks_y = 1,
                                            .threads = 32 };
  return status ? status
                : sw_device_cuda_function(device, *module, "twice", &launch->function);
}

// 64 floats, doubled by two blocks on a stream of their own.
static enum swathe_status double_floats(void)
{
  struct sw_device_cuda *device = NULL;
  struct sw_device_cuda_launch launch;
  void *module = NULL, *memory = NULL, *pinned = NULL, *stream = NULL;
  enum swathe_status status = open_device(&device);

  if (!status) status = load_doubling(device, &module, &launch);
  if (!status) status = sw_device_cuda_allocate(device, 256, &memory);
  if (!status) status = sw_device_cuda_allocate_pinned(device, 256, &pinned);
  if (!status) status = sw_device_cuda_stream(device, true, &stream);
  if (status) return status;
  float *values = pinned;
  for (int i = 0; i < 64; i++) values[i] = (float)i;
  launch.args = &memory;
  status = sw_device_cuda_write(device, memory, values, 256, stream);
  if (!status) status = sw_device_cuda_launch(device, &launch, stream);
  if (!status) status = sw_device_cuda_read(device, values, memory, 256, stream);
  if (!status) status = sw_device_cuda_synchronize(device, stream);
  for (int i = 0; i < 64 && !status; i++)
    if (values[i] != 2 * (float)i)
      status = sw_fail(SWATHE_WRONG_RESULT, "value %d is %g", i, (double)values[i]);
  sw_device_cuda_drop_stream(device, stream);
  sw_device_cuda_free_pinned(device, pinned);
  sw_device_cuda_free(device, memory);
  sw_device_cuda_unload(device, module);
  sw_device_cuda_leave(device);
  sw_device_cuda_destroy(device);
  return status;
}

static void a_kernel_runs_from_its_ptx(void **state)
{
  const struct setting settings[] = { { "SWATHE_LIBCUDA", emulated() }, { NULL, NULL } };
  (void)state;
  expect_fine(double_floats, settings);
}

static enum swathe_status load_what_is_new(void)
{
  struct sw_device_cuda *device = NULL;
  void *module = NULL;
  const enum swathe_status status = open_device(&device);
  return status ? status
                : sw_device_cuda_load(device, "twice", "\177ELF", 4, doubling_anew, &module);
}

static void a_driver_older_than_the_ptx_is_named(void **state)
{
  const struct setting settings[] = { { "SWATHE_LIBCUDA", emulated() },
                                      { "EMULATOR_DRIVER_VERSION", "12020" }, { NULL, NULL } };
  const char *const parts[] = { "of CUDA 12.2", "neither the binary of twice", "(209)", "(222)",
                                "compiled by CUDA 13.0", "update the driver", NULL };
  (void)state;
  expect_words(words_of(load_what_is_new, settings), parts);
}

static enum swathe_status allocate_much(void)
{
  struct sw_device_cuda *device = NULL;
  void *memory = NULL;
  const enum swathe_status status = open_device(&device);
  return status ? status : sw_device_cuda_allocate(device, 2000000, &memory);
}

static void no_memory_says_how_much_there_is(void **state)
{
  const struct setting settings[] = { { "SWATHE_LIBCUDA", emulated() },
                                      { "EMULATOR_MEMORY_BYTES", "1000000" }, { NULL, NULL } };
  const char *const parts[] = { "no 2.0 MB of memory on device 0", "1.0 MB are free", NULL };
  (void)state;
  expect_words(words_of(allocate_much, settings), parts);
}

static void a_launch_that_fails_is_named(void **state)
{
  const struct setting settings[] = { { "SWATHE_LIBCUDA", emulated() },
                                      { "EMULATOR_FAIL", "cuLaunchKernel:1=701" },
                                      { NULL, NULL } };
  const char *const parts[] = { "a kernel cannot be started", "(701)", "twice, 2 x 1 blocks of 32",
                                NULL };
  (void)state;
  expect_words(words_of(double_floats, settings), parts);
}

// The kernel is given an address that nothing lies at.
static enum swathe_status double_nothing(void)
{
  struct sw_device_cuda *device = NULL;
  struct sw_device_cuda_launch launch;
  void *module = NULL, *nowhere = (void *)(uintptr_t)64;
  enum swathe_status status = open_device(&device);

  if (!status) status = load_doubling(device, &module, &launch);
  if (status) return status;
  if (!freopen("/dev/null", "w", stderr)) return sw_fail(SWATHE_FILE, "no /dev/null");
  launch.args = &nowhere;
  status = sw_device_cuda_launch(device, &launch, NULL);
  return status ? status : sw_device_cuda_synchronize(device, NULL);
}

static void a_failed_kernel_shows_later_and_says_so(void **state)
{
  const struct setting settings[] = { { "SWATHE_LIBCUDA", emulated() }, { NULL, NULL } };
  const char *const parts[] = { "waiting for a stream failed", "a kernel that was started earlier",
                                "cannot use the device any more", NULL };
  (void)state;
  expect_words(words_of(double_nothing, settings), parts);
}

static enum swathe_status launch_too_wide(void)
{
  struct sw_device_cuda *device = NULL;
  struct sw_device_cuda_launch launch;
  void *module = NULL;
  enum swathe_status status = open_device(&device);
  if (!status) status = load_doubling(device, &module, &launch);
  launch.blocks_y = 65536;
  return status ? status : sw_device_cuda_launch(device, &launch, NULL);
}

static void a_grid_beyond_the_limit_is_refused(void **state)
{
  const struct setting settings[] = { { "SWATHE_LIBCUDA", emulated() }, { NULL, NULL } };
  const char *const parts[] = { "twice would need 2 x 65536 blocks", NULL };
  (void)state;
  expect_words(words_of(launch_too_wide, settings), parts);
}

static enum swathe_status want_too_much_shared(void)
{
  struct sw_device_cuda *device = NULL;
  struct sw_device_cuda_launch launch;
  void *module = NULL;
  enum swathe_status status = open_device(&device);
  if (!status) status = load_doubling(device, &module, &launch);
  return status ? status : sw_device_cuda_allow_shared(device, launch.function, "twice", 1 << 20);
}

static void shared_memory_beyond_the_device_is_refused(void **state)
{
  const struct setting settings[] = { { "SWATHE_LIBCUDA", emulated() }, { NULL, NULL } };
  const char *const parts[] = { "twice wants 1048576 bytes of shared memory", NULL };
  (void)state;
  expect_words(words_of(want_too_much_shared, settings), parts);
}

static enum swathe_status look_for_missing(void)
{
  struct sw_device_cuda *device = NULL;
  struct sw_device_cuda_launch launch;
  void *module = NULL, *function = NULL;
  enum swathe_status status = open_device(&device);
  if (!status) status = load_doubling(device, &module, &launch);
  return status ? status : sw_device_cuda_function(device, module, "thrice", &function);
}

static void a_missing_kernel_is_named(void **state)
{
  const struct setting settings[] = { { "SWATHE_LIBCUDA", emulated() }, { NULL, NULL } };
  const char *const parts[] = { "the image has no thrice", NULL };
  (void)state;
  expect_words(words_of(look_for_missing, settings), parts);
}

// ---- The caller's context -----------------------------------------------------------------------

// What is current on the thread is found again after a call, and its device is the one picked.
static enum swathe_status keep_current(void)
{
  struct sw_device_cuda *device = NULL;
  int32_t ordinal = 7;
  enum swathe_status status = open_device(&device);

  if (status) return status;
  void *library = dlopen(getenv("SWATHE_LIBCUDA"), RTLD_NOW | RTLD_NOLOAD);
  int (*current)(void **) = NULL;
  *(void **)&current = library ? dlsym(library, "cuCtxGetCurrent") : NULL;
  void *inside = NULL, *outside = (void *)1, *again = NULL;
  if (!current || current(&inside) || !inside)
    return sw_fail(SWATHE_DEVICE, "no context is current between enter and leave");
  status = sw_device_cuda_pick(5, &ordinal);
  if (!status && ordinal != 0) status = sw_fail(SWATHE_DEVICE, "picked device %d", ordinal);
  if (!status) status = sw_device_cuda_enter(device);
  sw_device_cuda_leave(device);
  if (!status && (current(&again) || again != inside))
    status = sw_fail(SWATHE_DEVICE, "the outer context is lost");
  sw_device_cuda_leave(device);
  if (!status && (current(&outside) || outside))
    status = sw_fail(SWATHE_DEVICE, "a context was left behind");
  return status;
}

static void the_current_context_is_put_back(void **state)
{
  const struct setting settings[] = { { "SWATHE_LIBCUDA", emulated() }, { NULL, NULL } };
  (void)state;
  expect_fine(keep_current, settings);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(a_missing_driver_is_said),
    cmocka_unit_test(the_stub_is_not_opened),
    cmocka_unit_test(an_emulated_driver_is_known_as_one),
    cmocka_unit_test(the_isa_is_the_devices),
    cmocka_unit_test(a_device_that_is_not_there_is_refused),
    cmocka_unit_test(a_kernel_runs_from_its_ptx),
    cmocka_unit_test(a_driver_older_than_the_ptx_is_named),
    cmocka_unit_test(no_memory_says_how_much_there_is),
    cmocka_unit_test(a_launch_that_fails_is_named),
    cmocka_unit_test(a_failed_kernel_shows_later_and_says_so),
    cmocka_unit_test(a_grid_beyond_the_limit_is_refused),
    cmocka_unit_test(shared_memory_beyond_the_device_is_refused),
    cmocka_unit_test(a_missing_kernel_is_named),
    cmocka_unit_test(the_current_context_is_put_back),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
