// limit.c: the machine's peak, measured by a few lines of C that go through the same compiler,
// with the same flags, as the kernels do.
#include "limit.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

// Twelve sums, more than a multiply-add's latency needs.  PAIRS: the instruction that multiplies
// pairs of bfloat16.  The empty assembly keeps the compiler from thinking ahead.
const char sw_limit_source[] =
    "#if defined __AVX512F__\nenum { LANES = 16 };\n#define REGISTER \"+v\"\n"
    "#elif defined __AVX2__\nenum { LANES = 8 };\n#define REGISTER \"+x\"\n"
    "#elif defined __aarch64__\nenum { LANES = 4 };\n#define REGISTER \"+w\"\n"
    "#elif defined __SSE__\nenum { LANES = 4 };\n#define REGISTER \"+x\"\n"
    "#else\nenum { LANES = 4 };\n#define REGISTER \"+m\"\n#endif\n"
    "#if defined PAIRS && defined __AVX512BF16__\n"
    "#define STEP(a) __asm__ volatile(\"vdpbf16ps %2, %1, %0\" : \"+v\"(a) : \"v\"(x), \"v\"(y))\n"
    "const long step_flops = 4 * LANES;\n"
    "#else\n"
    "#define STEP(a) a += x * y; __asm__ volatile(\"\" : REGISTER(a), REGISTER(x), REGISTER(y))\n"
    "const long step_flops = 2 * LANES;\n"
    "#endif\n"
    "typedef float vec __attribute__((vector_size(4 * LANES)));\n"
    "void multiply(const void *out, long begin, long end, void *unused) {\n"
    "  vec x = (vec){0} + 1e-3f, y = (vec){0} + 0.5f, zero = {0};\n"
    "  vec a = zero, b = zero, c = zero, d = zero, e = zero, f = zero;\n"
    "  vec g = zero, h = zero, i = zero, j = zero, k = zero, l = zero;\n"
    "  for (long n = (end - begin) * 1000; n > 0; n--) {\n"
    "    STEP(a); STEP(b); STEP(c); STEP(d); STEP(e); STEP(f);\n"
    "    STEP(g); STEP(h); STEP(i); STEP(j); STEP(k); STEP(l);\n"
    "  }\n"
    "  a += b + c + d + e + f + g + h + i + j + k + l;\n"
    "  if (a[0] == 1e30f) *(float *)out = a[0];\n"
    "}\n"
    "void read(const void *data, long begin, long end, void *unused) {\n"
    "  const vec *at = (const vec *)((const char *)data + begin * 65536);\n"
    "  const vec *stop = (const vec *)((const char *)data + end * 65536);\n"
    "  vec a = {0}, b = {0}, c = {0}, d = {0};\n"
    "  for (; at < stop; at += 4) { a += at[0]; b += at[1]; c += at[2]; d += at[3]; }\n"
    "  a += b + c + d;\n"
    "  if (a[0] == 1e30f) *(float *)data = a[0];\n"
    "}\n";
const char sw_limit_pairs[] = "#define PAIRS\n";

enum { ITEM_BYTES = 65536, ITEMS_READ = 128, TRIES = 48 };

// A single thread's clock stands still while others run, as when candidates are timed.
static double clock_s(int64_t threads)
{
  struct timespec time;
  clock_gettime(threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

// The best of a few launches, in items per second; 0: it failed.
static double best_rate(struct sw_device *device, int64_t threads, void *kernel, const void *args,
                        int64_t items)
{
  struct sw_device_launch launch = { .args = args, .items = items, .grain = 1 };
  double best = 0;
  *(void **)&launch.kernel = kernel;
  for (int i = 0; i < TRIES; i++) {
    const double begin = clock_s(threads);
    if (sw_device_launch(device, &launch)) return 0;
    const double rate = (double)items / (clock_s(threads) - begin);
    if (rate > best) best = rate;
  }
  return best;
}

static enum swathe_status measure(struct swathe_context *context, const struct sw_jit_image *image,
                                  struct sw_limit *limit)
{
  void *multiply, *read, *step_flops;
  struct sw_device *device;
  const int64_t threads = context->threads;
  enum swathe_status status = sw_jit_symbol(image, "multiply", &multiply);

  if (!status) status = sw_jit_symbol(image, "read", &read);
  if (!status) status = sw_jit_symbol(image, "step_flops", &step_flops);
  if (!status) status = sw_device_cpu_create(context->threads, &device);
  if (status) return status;
  // 8 MiB a thread: what does not fit the caches of a core, and may fit those that all share
  const int64_t items = ITEMS_READ * threads;
  void *data = sw_device_allocate(device, (size_t)items * ITEM_BYTES);
  float sink = 0;
  const double flops = (double)*(const long *)step_flops * SW_LIMIT_STEPS;
  limit->flops_per_s = flops * best_rate(device, threads, multiply, &sink, 64 * threads);
  limit->bytes_per_s = data ? ITEM_BYTES * best_rate(device, threads, read, data, items) : 0;
  sw_device_free(device, data);
  sw_device_destroy(device);
  return SWATHE_OK;
}

enum swathe_status sw_limit_measure(struct swathe_context *context, enum swathe_dtype dtype,
                                    const char *flags, struct sw_limit *limit)
{
  static const double deadline_s = 60;
  char text[sizeof sw_limit_pairs + sizeof sw_limit_source];
  struct sw_jit_image *image;
  struct sw_jit_report report;

  strcpy(text, dtype == SWATHE_BF16 ? sw_limit_pairs : "");
  strcat(text, sw_limit_source);
  const struct sw_jit_request request = {
    .name = "limit", .source = text, .flags = flags, .isa = context->isa
  };
  enum swathe_status status =
      sw_jit_load(context->jit, &request, deadline_s, &image, &report, NULL);
  if (status) return sw_within(status, "while measuring the machine's peak");
  status = measure(context, image, limit);
  sw_jit_unload(image);
  return status;
}
