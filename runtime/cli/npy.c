// npy.c: reads and writes .npy files.
//
// A file is "\x93NUMPY", two version bytes, the header's length (2 bytes in version 1, 4 later,
// little endian), the header, then the elements.  The header is the text of a Python dict:
//   {'descr': '<f4', 'fortran_order': False, 'shape': (4096, 64, 128), }
#include "npy.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "elements are copied as they lie in the file");

enum { MAGIC_BYTES = 6, MOST_HEADER_BYTES = 1 << 20, HEADER_UNIT = 64 };
static const char magic[MAGIC_BYTES] = { '\x93', 'N', 'U', 'M', 'P', 'Y' };

struct cli_npy_shape cli_npy_shape(const struct cli_npy *array)
{
  struct cli_npy_shape shape = { "[" };
  for (int i = 0; i < array->axes; i++) {
    const size_t used = strlen(shape.text);
    snprintf(shape.text + used, sizeof shape.text - used, "%s%" PRId64, i ? ", " : "",
             array->shape[i]);
  }
  strcat(shape.text, "]");
  return shape;
}

// ---- The header's dict --------------------------------------------------------------------------

struct header {
  char descr[64];
  bool has_descr, has_order, has_shape, fortran_order;
  struct cli_npy *array;
};

static const char *skip_blanks(const char *at)
{
  return at + strspn(at, " \t\r\n");
}

// A quoted word; NULL if there is none, or if it is too long.
static const char *take_string(const char *at, char *text, size_t size)
{
  const char quote = *at;
  if (quote != '\'' && quote != '"') return NULL;
  const char *end = strchr(at + 1, quote);
  if (!end || (size_t)(end - at) > size) return NULL;
  memcpy(text, at + 1, (size_t)(end - at - 1));
  text[end - at - 1] = 0;
  return end + 1;
}

// "(4096, 64, 128)", "(7,)" or "()".  Python 2 wrote numbers as 4096L.
static const char *take_shape(const char *at, struct cli_npy *array)
{
  if (*at++ != '(') return NULL;
  for (at = skip_blanks(at); *at != ')'; at = skip_blanks(at)) {
    char *end;
    if (array->axes == CLI_NPY_MOST_AXES || *at < '0' || *at > '9') return NULL;
    errno = 0;
    array->shape[array->axes++] = strtoll(at, &end, 10);
    if (errno) return NULL;
    at = skip_blanks(end + (*end == 'L'));
    if (*at == ',') at++;
    else if (*at != ')') return NULL;
  }
  return at + 1;
}

static const char *take_value(const char *name, const char *at, struct header *header)
{
  if (!strcmp(name, "descr")) {
    const char *end = take_string(at, header->descr, sizeof header->descr);
    header->has_descr = end || *at == '[';
    if (*at != '[') return end;
    snprintf(header->descr, sizeof header->descr,
             "a record");  // nothing behind it matters: refused
    return "}";
  }
  if (!strcmp(name, "fortran_order")) {
    header->has_order = true;
    header->fortran_order = !strncmp(at, "True", 4);
    return header->fortran_order ? at + 4 : !strncmp(at, "False", 5) ? at + 5 : NULL;
  }
  if (!strcmp(name, "shape")) {
    header->has_shape = true;
    header->array->axes = 0;
    return take_shape(at, header->array);
  }
  return NULL;
}

// False if the text is no such dict.
static bool parse_dict(const char *at, struct header *header)
{
  char name[32];

  at = skip_blanks(at);
  if (*at++ != '{') return false;
  for (at = skip_blanks(at); *at != '}'; at = skip_blanks(at)) {
    at = take_string(at, name, sizeof name);
    if (!at) return false;
    at = skip_blanks(at);
    if (*at++ != ':') return false;
    at = take_value(name, skip_blanks(at), header);
    if (!at) return false;
    at = skip_blanks(at);
    if (*at == ',') at++;
    else if (*at != '}') return false;
  }
  return true;
}

static enum cli_exit check_header(const char *path, const char *text, struct cli_npy *array)
{
  struct header header = { .array = array };
  const bool parsed = parse_dict(text, &header);

  if (header.has_descr && strcmp(header.descr, "<f4"))
    return cli_fail(CLI_FAILED, "%s holds %s, not float32 (<f4); convert it: "
                    "numpy.save(path, array.astype('<f4'))", path,
                    *header.descr ? header.descr : "another type");
  if (!parsed || !header.has_descr || !header.has_order || !header.has_shape)
    return cli_fail(CLI_FAILED, "%s: the .npy header cannot be read: %.120s", path, text);
  if (header.fortran_order && array->axes > 1)
    return cli_fail(CLI_FAILED, "%s is in Fortran order; convert it: "
                    "numpy.save(path, numpy.ascontiguousarray(array))", path);
  array->elements = 1;
  for (int i = 0; i < array->axes; i++) {
    if (array->shape[i] == 0)
      return cli_fail(CLI_FAILED, "%s is empty: its shape is %s", path, cli_npy_shape(array).text);
    if (array->shape[i] > (INT64_MAX / 8) / array->elements)
      return cli_fail(CLI_FAILED, "%s: no file holds the shape %s", path,
                      cli_npy_shape(array).text);
    array->elements *= array->shape[i];
  }
  return CLI_OK;
}

// ---- Reading ------------------------------------------------------------------------------------

static enum cli_exit cut_short(const char *path, FILE *file, const char *what)
{
  if (ferror(file)) return cli_fail(CLI_FAILED, "%s cannot be read: %s", path, strerror(errno));
  return cli_fail(CLI_FAILED, "%s is cut short: it ends within its %s", path, what);
}

static enum cli_exit read_header(const char *path, FILE *file, struct cli_npy *array)
{
  unsigned char start[MAGIC_BYTES + 2], length_bytes[4] = { 0 };
  const size_t got = fread(start, 1, sizeof start, file);

  if (memcmp(start, magic, got < MAGIC_BYTES ? got : MAGIC_BYTES))
    return cli_fail(CLI_FAILED, "%s is not a .npy file", path);
  if (got < sizeof start) return cut_short(path, file, "header");
  const int version = start[MAGIC_BYTES];
  if (version < 1 || version > 3)
    return cli_fail(CLI_FAILED, "%s has .npy format version %d; versions 1 to 3 are read", path,
                    version);
  const size_t length_size = version == 1 ? 2 : 4;
  if (fread(length_bytes, 1, length_size, file) != length_size)
    return cut_short(path, file, "header");
  const uint32_t length = (uint32_t)length_bytes[0] | (uint32_t)length_bytes[1] << 8 |
                          (uint32_t)length_bytes[2] << 16 | (uint32_t)length_bytes[3] << 24;
  if (length > MOST_HEADER_BYTES)
    return cli_fail(CLI_FAILED, "%s: a .npy header of %" PRIu32 " bytes", path, length);

  char *text = calloc(length + 1, 1);
  if (!text) return cli_fail(CLI_FAILED, "out of memory for the header of %s", path);
  enum cli_exit code = CLI_OK;
  if (fread(text, 1, length, file) != length) code = cut_short(path, file, "header");
  if (!code) code = check_header(path, text, array);
  free(text);
  return code;
}

// What is left of a regular file must be the elements exactly; a pipe is only read.
static enum cli_exit check_size(const char *path, FILE *file, const struct cli_npy *array)
{
  struct stat status;
  const int64_t wanted = array->elements * (int64_t)sizeof(float);
  const long at = ftell(file);

  if (fstat(fileno(file), &status) || !S_ISREG(status.st_mode) || at < 0) return CLI_OK;
  const int64_t left = status.st_size - at;
  if (left < wanted)
    return cli_fail(CLI_FAILED,
                    "%s is cut short: the shape %s needs %" PRId64 " bytes of data, %" PRId64
                    " are there",
                    path, cli_npy_shape(array).text, wanted, left);
  if (left > wanted)
    return cli_fail(CLI_FAILED, "%s holds %" PRId64 " bytes more than the shape %s needs", path,
                    left - wanted, cli_npy_shape(array).text);
  return CLI_OK;
}

static enum cli_exit read_elements(const char *path, FILE *file, struct cli_npy *array)
{
  const size_t count = (size_t)array->elements;
  enum cli_exit code = check_size(path, file, array);

  if (code) return code;
  array->data = malloc(count * sizeof *array->data);
  if (!array->data)
    return cli_fail(CLI_FAILED, "out of memory for %zu elements of %s", count, path);
  if (fread(array->data, sizeof *array->data, count, file) == count) return CLI_OK;
  code = cut_short(path, file, "data");
  free(array->data);
  array->data = NULL;
  return code;
}

enum cli_exit cli_npy_read(const char *path, struct cli_npy *array)
{
  FILE *file = fopen(path, "rb");
  if (!file) return cli_fail(CLI_FAILED, "%s cannot be opened: %s", path, strerror(errno));

  *array = (struct cli_npy){ 0 };
  enum cli_exit code = read_header(path, file, array);
  if (!code) code = read_elements(path, file, array);
  fclose(file);
  return code;
}

// ---- Writing ------------------------------------------------------------------------------------

// Version, length and dict, filled with blanks so that the elements begin at a multiple of
// HEADER_UNIT.
static bool write_header(FILE *file, const struct cli_npy *array)
{
  char text[256] = "{'descr': '<f4', 'fortran_order': False, 'shape': (";

  for (int i = 0; i < array->axes; i++) {
    const size_t used = strlen(text);
    snprintf(text + used, sizeof text - used, "%s%" PRId64 "%s", i ? ", " : "", array->shape[i],
             array->axes == 1 ? "," : "");
  }
  strcat(text, "), }");
  const size_t before = MAGIC_BYTES + 4;
  const size_t whole = (before + strlen(text) + 1 + HEADER_UNIT - 1) / HEADER_UNIT * HEADER_UNIT;
  const int length = (int)(whole - before);
  const unsigned char start[4] = { 1, 0, (unsigned char)(length & 255),
                                   (unsigned char)(length >> 8) };
  return fwrite(magic, 1, MAGIC_BYTES, file) == MAGIC_BYTES && fwrite(start, 1, 4, file) == 4 &&
         fprintf(file, "%-*s\n", length - 1, text) == length;
}

enum cli_exit cli_npy_write(const char *path, const struct cli_npy *array)
{
  const size_t count = (size_t)array->elements;
  char *temporary = NULL;

  if (asprintf(&temporary, "%s.%ld.tmp", path, (long)getpid()) < 0)
    return cli_fail(CLI_FAILED, "out of memory");
  FILE *file = fopen(temporary, "wb");
  bool written = file && write_header(file, array) &&
                 fwrite(array->data, sizeof *array->data, count, file) == count;
  int reason = errno;
  if (file && fclose(file) && written) {
    written = false;
    reason = errno;
  }
  if (written && rename(temporary, path)) {
    written = false;
    reason = errno;
  }
  if (!written) unlink(temporary);
  free(temporary);
  return written ? CLI_OK
                 : cli_fail(CLI_FAILED, "%s cannot be written: %s", path, strerror(reason));
}
