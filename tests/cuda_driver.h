// cuda_driver.h: the CUDA driver and NVRTC as tests call them: opened by name, declared by hand.
#ifndef TEST_CUDA_DRIVER_H
#define TEST_CUDA_DRIVER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct cuda_driver {
  int (*init)(unsigned);
  int (*driver_version)(int *);
  int (*device_get)(int *, int);
  int (*device_name)(char *, int, int);
  int (*device_attribute)(int *, int, int);
  int (*retain)(void **, int);
  int (*release)(int);
  int (*set_current)(void *);
  int (*synchronize)(void);
  int (*allocate)(uint64_t *, size_t);
  int (*free)(uint64_t);
  int (*allocate_host)(void **, size_t);
  int (*free_host)(void *);
  int (*to_device)(uint64_t, const void *, size_t);
  int (*to_host)(void *, uint64_t, size_t);
  int (*to_device_async)(uint64_t, const void *, size_t, void *);
  int (*to_host_async)(void *, uint64_t, size_t, void *);
  int (*between_async)(uint64_t, uint64_t, size_t, void *);
  int (*set_words)(uint64_t, unsigned, size_t);
  int (*set_words_async)(uint64_t, unsigned, size_t, void *);
  int (*stream_create)(void **, unsigned);
  int (*stream_destroy)(void *);
  int (*stream_synchronize)(void *);
  int (*stream_query)(void *);
  int (*stream_wait)(void *, void *, unsigned);
  int (*host_function)(void *, void (*)(void *), void *);
  int (*event_create)(void **, unsigned);
  int (*event_destroy)(void *);
  int (*event_record)(void *, void *);
  int (*event_synchronize)(void *);
  int (*event_query)(void *);
  int (*event_elapsed)(float *, void *, void *);
  int (*load)(void **, const void *);
  int (*unload)(void *);
  int (*function)(void **, void *, const char *);
  int (*global)(uint64_t *, size_t *, void *, const char *);
  int (*function_set)(void *, int, int);
  int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                void *, void **, void **);
  int (*begin_capture)(void *, int);
  int (*end_capture)(void *, void **);
  int (*is_capturing)(void *, int *);
  int (*graph_instantiate)(void **, void *, unsigned long long);
  int (*graph_launch)(void *, void *);
  int (*graph_destroy)(void *);
  int (*graph_exec_destroy)(void *);
  int (*error_name)(int, const char **);
  int (*words)(char *, size_t);          // the emulator's; NULL where it is a real driver
  uint64_t (*count)(const char *);       // likewise
};

// Opens `path`, or libcuda.so.1 where it is NULL.  False and words on stderr where it cannot.
bool cuda_driver_open(struct cuda_driver *driver, const char *path);

// PTX (zero-terminated) or, where `cubin`, a CUBIN, to be freed.  NULL where there is no NVRTC
// (*missing) or the source does not compile (its log goes to stderr).
char *cuda_compile(const char *source, const char *arch, const char *const *options,
                   int option_count, bool cubin, bool *missing);

#endif
