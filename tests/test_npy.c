// test_npy.c: .npy files as NumPy writes them are read, and everything else is refused with words
// that name the file and what is wrong.
#include "../runtime/cli/fail.c"
#include "../runtime/cli/npy.c"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

static char directory[] = "/tmp/test_npy_XXXXXX";
static char path[64];

static int make_directory(void **state)
{
  (void)state;
  if (!mkdtemp(directory)) return -1;
  snprintf(path, sizeof path, "%s/a.npy", directory);
  return 0;
}

static int remove_directory(void **state)
{
  (void)state;
  unlink(path);
  return rmdir(directory);
}

// A file of the given version with this header text, and `floats` floats 0, 1, 2, ... and `extra`
// bytes.
static void put_file(int version, const char *header, int floats, int extra)
{
  FILE *file = fopen(path, "wb");
  const size_t length = strlen(header);
  assert_non_null(file);
  fwrite(magic, 1, MAGIC_BYTES, file);
  fputc(version, file);
  fputc(0, file);
  for (int i = 0; i < (version == 1 ? 2 : 4); i++) fputc((int)(length >> 8 * i & 255), file);
  fwrite(header, 1, length, file);
  for (int i = 0; i < floats; i++) {
    const float value = (float)i;
    fwrite(&value, sizeof value, 1, file);
  }
  for (int i = 0; i < extra; i++) fputc(0, file);
  fclose(file);
}

// ---- What is read -------------------------------------------------------------------------------

static const struct readable {
  int version;
  const char *header;
  int axes, floats;
  int64_t shape[4];
} readable[] = {
  { 1, "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3, 4), }\n", 3, 24, { 2, 3, 4 } },
  { 2, "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3, 4), }\n", 3, 24, { 2, 3, 4 } },
  { 3, "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3, 4), }\n", 3, 24, { 2, 3, 4 } },
  { 1, "{'shape': (2, 2), 'fortran_order': False, 'descr': '<f4'}", 2, 4, { 2, 2 } },
  { 1, "  {\"descr\":\"<f4\",\"fortran_order\":False,\"shape\":(5,)}   \n", 1, 5, { 5 } },
  { 1, "{'descr': '<f4', 'fortran_order': False, 'shape': (2L, 3L), }", 2, 6, { 2, 3 } },
  { 1, "{'descr': '<f4', 'fortran_order': False, 'shape': (), }", 0, 1, { 0 } },
  { 1,
    "{'descr': '<f4', 'fortran_order': True, 'shape': (7,), }",
    1,
    7,
    { 7 } },  // one axis: the same
};

static void reads_what_numpy_writes(void **state)
{
  (void)state;
  for (size_t i = 0; i < sizeof readable / sizeof readable[0]; i++) {
    const struct readable *row = &readable[i];
    struct cli_npy array;
    put_file(row->version, row->header, row->floats, 0);
    if (cli_npy_read(path, &array)) fail_msg("row %zu: %s", i, cli_fail_words());
    assert_int_equal(array.axes, row->axes);
    assert_int_equal(array.elements, row->floats);
    for (int a = 0; a < row->axes; a++) assert_int_equal(array.shape[a], row->shape[a]);
    for (int e = 0; e < row->floats; e++) assert_true(array.data[e] == (float)e);
    free(array.data);
  }
}

// ---- What is refused ----------------------------------------------------------------------------

#define SOUND "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }\n"

static const struct refused {
  int version;
  const char *header;
  int floats, extra;
  const char *words;
} refused[] = {
  { 1, SOUND, 5, 0, "cut short: the shape [2, 3] needs 24 bytes of data, 20 are there" },
  { 1, SOUND, 5, 3, "cut short" },
  { 1, SOUND, 6, 1, "1 bytes more than the shape [2, 3] needs" },
  { 4, SOUND, 6, 0, "format version 4" },
  { 0, SOUND, 6, 0, "format version 0" },
  { 1, "{'descr': '<f4', 'fortran_order': True, 'shape': (2, 3), }", 6, 0, "Fortran order" },
  { 1, "{'descr': '<f8', 'fortran_order': False, 'shape': (3,), }", 6, 0, "<f8, not float32" },
  { 1, "{'descr': '>f4', 'fortran_order': False, 'shape': (6,), }", 6, 0, ">f4, not float32" },
  { 1, "{'descr': '<f2', 'fortran_order': False, 'shape': (12,), }", 6, 0, "<f2, not float32" },
  { 1, "{'descr': '', 'fortran_order': False, 'shape': (6,), }", 6, 0, "not float32" },
  { 1, "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (6,), }", 6, 0, "record" },
  { 1, "{'descr': '<f4', 'fortran_order': False, 'shape': (0, 3), }", 0, 0, "empty" },
  { 1, "{'descr': '<f4', 'fortran_order': False, 'shape': (-2, 3), }", 6, 0, "cannot be read" },
  { 1, "{'descr': '<f4', 'fortran_order': False, 'shape': (2 3), }", 6, 0, "cannot be read" },
  { 1, "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3", 6, 0, "cannot be read" },
  { 1, "{'descr': '<f4', 'fortran_order': Maybe, 'shape': (6,)}", 6, 0, "cannot be read" },
  { 1, "{'descr': '<f4', 'shape': (6,)}", 6, 0, "cannot be read" },
  { 1, "{'descr': '<f4', 'fortran_order': False}", 6, 0, "cannot be read" },
  { 1, "{'fortran_order': False, 'shape': (6,)}", 6, 0, "cannot be read" },
  { 1, "{'descr': '<f4', 'fortran_order': False, 'shape': (6,), 'x': 1}", 6, 0, "cannot be read" },
  { 1, "{'descr': '<f4', 'fortran_order': False, 'shape': (1,1,1,1,1,1,1,1,1)}", 1, 0,
    "cannot be" },
  { 1, "", 6, 0, "cannot be read" },
  { 1, "{", 6, 0, "cannot be read" },
  { 1, "{'descr': '<f4", 6, 0, "cannot be read" },
  { 1, "{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296)}", 6, 0,
    "no file" },
  { 1, "{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999,)}", 6, 0,
    "cannot" },
  { 1, "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,)}", 6, 0, "cut short" },
};

static void refuses_with_words(void **state)
{
  (void)state;
  for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) {
    const struct refused *row = &refused[i];
    struct cli_npy array;
    put_file(row->version, row->header, row->floats, row->extra);
    if (cli_npy_read(path, &array) != CLI_FAILED) fail_msg("row %zu was read", i);
    if (!strstr(cli_fail_words(), row->words) || !strstr(cli_fail_words(), path))
      fail_msg("row %zu: '%s' lacks '%s' or the path", i, cli_fail_words(), row->words);
    assert_null(array.data);
  }
}

// A sound file, cut after each of its bytes.
static void refuses_every_cut(void **state)
{
  (void)state;
  struct cli_npy array;
  put_file(1, SOUND, 6, 0);
  const long whole = 10 + (long)strlen(SOUND) + 24;
  for (long size = whole - 1; size >= 0; size--) {
    assert_int_equal(truncate(path, size), 0);
    assert_int_equal(cli_npy_read(path, &array), CLI_FAILED);
    if (size && !strstr(cli_fail_words(), "cut short")) fail_msg("%ld: %s", size, cli_fail_words());
  }
}

static void refuses_other_files(void **state)
{
  (void)state;
  struct cli_npy array;
  FILE *file = fopen(path, "wb");
  fputs("PK\3\4 an .npz, say", file);
  fclose(file);
  assert_int_equal(cli_npy_read(path, &array), CLI_FAILED);
  assert_non_null(strstr(cli_fail_words(), "not a .npy file"));
  assert_int_equal(cli_npy_read("/nowhere/a.npy", &array), CLI_FAILED);
  assert_non_null(strstr(cli_fail_words(), "/nowhere/a.npy cannot be opened: No such file"));
  assert_int_equal(cli_npy_read(directory, &array), CLI_FAILED);
}

// ---- Writing ------------------------------------------------------------------------------------

static void reads_back_what_it_wrote(void **state)
{
  (void)state;
  for (int axes = 0; axes <= 4; axes++) {
    float data[24];
    struct cli_npy written = { .axes = axes, .shape = { 1, 2, 3, 4 }, .elements = 1, .data = data };
    struct cli_npy array;
    for (int a = 0; a < axes; a++) written.elements *= written.shape[a];
    for (int i = 0; i < 24; i++) data[i] = (float)i / 7;
    assert_int_equal(cli_npy_write(path, &written), CLI_OK);
    assert_int_equal(cli_npy_read(path, &array), CLI_OK);
    assert_int_equal(array.axes, axes);
    assert_int_equal(array.elements, written.elements);
    for (int a = 0; a < axes; a++) assert_int_equal(array.shape[a], written.shape[a]);
    assert_memory_equal(array.data, data, (size_t)written.elements * sizeof *data);
    free(array.data);

    struct stat status;
    assert_int_equal(stat(path, &status), 0);
    assert_int_equal((status.st_size - 4 * written.elements) % HEADER_UNIT, 0);
  }
}

// The header NumPy itself writes, byte for byte.
static void writes_numpys_header(void **state)
{
  (void)state;
  static const char wanted[] =
      "\x93NUMPY\1\0v\0{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }";
  float data[3] = { 1, 2, 3 };
  const struct cli_npy array = { .axes = 1, .shape = { 3 }, .elements = 3, .data = data };
  char text[128];
  assert_int_equal(cli_npy_write(path, &array), CLI_OK);
  FILE *file = fopen(path, "rb");
  assert_int_equal(fread(text, 1, sizeof text, file), sizeof text);
  fclose(file);
  assert_memory_equal(text, wanted, sizeof wanted - 1);
  for (size_t i = sizeof wanted - 1; i < 127; i++) assert_int_equal(text[i], ' ');
  assert_int_equal(text[127], '\n');
}

// The old file stays whole when the new one cannot be finished, and nothing else is left behind.
static void keeps_the_old_file_when_writing_fails(void **state)
{
  (void)state;
  float data[1] = { 5 };
  struct cli_npy array = { .axes = 1, .shape = { 1 }, .elements = 1, .data = data };
  char beyond[160];
  snprintf(beyond, sizeof beyond, "%s/missing/a.npy", directory);
  assert_int_equal(cli_npy_write(beyond, &array), CLI_FAILED);
  assert_non_null(strstr(cli_fail_words(), "cannot be written: No such file"));

  snprintf(beyond, sizeof beyond, "%s/b.npy", directory);
  assert_int_equal(mkdir(beyond, 0700), 0);  // a rename onto a directory fails
  assert_int_equal(cli_npy_write(beyond, &array), CLI_FAILED);
  assert_int_equal(rmdir(beyond), 0);
  assert_int_equal(unlink(path), 0);
  assert_int_equal(rmdir(directory), 0);  // fails if a temporary file was left behind
  assert_int_equal(mkdir(directory, 0700), 0);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(reads_what_numpy_writes),
    cmocka_unit_test(refuses_with_words),
    cmocka_unit_test(refuses_every_cut),
    cmocka_unit_test(refuses_other_files),
    cmocka_unit_test(reads_back_what_it_wrote),
    cmocka_unit_test(writes_numpys_header),
    cmocka_unit_test(keeps_the_old_file_when_writing_fails),
  };
  return cmocka_run_group_tests(tests, make_directory, remove_directory);
}
