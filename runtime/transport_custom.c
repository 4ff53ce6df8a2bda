// transport_custom.c: the ranks reach each other through functions of the caller's, which may be
// torch.distributed, UCX or whatever carries bytes.  What the caller left out is made of what it
// gave: a wait of tests, a gather of messages.
#include "transport.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { WORDS_BYTES = 1024, NAP_NS = 50000 };

struct custom {
  struct swathe_transport transport;
  struct swathe_custom calls;
  struct swathe_transfer *transfers;  // [capacity] of the post in progress
  int32_t capacity;
  int64_t posted;                     // phases not known to be done
  enum swathe_status failed;          // for good
  char words[WORDS_BYTES];
};

static struct custom *custom_of(struct swathe_transport *transport)
{
  return (struct custom *)transport;
}

static double now_s(void)
{
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static enum swathe_status soundness(const struct custom *custom)
{
  if (!custom->failed) return SWATHE_OK;
  return sw_fail(custom->failed, "the transport of rank %d is unusable, it failed before: %s",
                 custom->transport.rank, custom->words);
}

// What a call of the caller's returned.  Messages that were posted may still be on their way.
static enum swathe_status told(struct custom *custom, int returned, const char *doing,
                               const char *words)
{
  if (!returned) return SWATHE_OK;
  const bool known = returned > 0 && returned < SWATHE_STATUS_COUNT;
  custom->failed = known ? (enum swathe_status)returned : SWATHE_TRANSPORT;
  custom->transport.holds_memory = custom->posted > 0;
  snprintf(custom->words, sizeof custom->words, "%s of rank %d failed %s: %.800s",
           custom->transport.name, custom->transport.rank, doing,
           *words ? words : swathe_status_text(custom->failed));
  return sw_fail(custom->failed, "%s", custom->words);
}

static enum swathe_status reserve(struct custom *custom, int32_t count)
{
  if (count <= custom->capacity) return SWATHE_OK;
  free(custom->transfers);
  custom->transfers = calloc((size_t)count, sizeof *custom->transfers);
  custom->capacity = custom->transfers ? count : 0;
  return custom->transfers ? SWATHE_OK
                           : sw_fail(SWATHE_NO_MEMORY, "no memory to post %d messages", count);
}

static enum swathe_status post(struct swathe_transport *transport,
                               const struct sw_transport_message *messages, int32_t count)
{
  struct custom *custom = custom_of(transport);
  char words[WORDS_BYTES] = "";
  enum swathe_status status = soundness(custom);
  for (int32_t i = 0; i < count && !status; i++)
    status = sw_transport_check(transport, &messages[i]);
  if (!status) status = reserve(custom, count);
  if (status || !count) return status;
  for (int32_t i = 0; i < count; i++)
    custom->transfers[i] = (struct swathe_transfer){ messages[i].data, messages[i].bytes,
                                                     messages[i].peer, messages[i].send };
  custom->posted++;
  return told(custom,
              custom->calls.post(custom->calls.user, custom->transfers, count, words, sizeof words),
              "to post", words);
}

static enum swathe_status test(struct swathe_transport *transport, bool *done)
{
  struct custom *custom = custom_of(transport);
  char words[WORDS_BYTES] = "";
  enum swathe_status status = soundness(custom);
  int finished = custom->posted == 0;
  if (!status && !finished && custom->calls.test)
    status = told(custom, custom->calls.test(custom->calls.user, &finished, words, sizeof words),
                  "to test", words);
  if (status) return status;
  if (finished) custom->posted = 0;
  *done = finished;
  return SWATHE_OK;
}

static enum swathe_status wait_by_tests(struct custom *custom)
{
  static const struct timespec nap = { 0, NAP_NS };
  const double until_s = now_s() + custom->calls.deadline_s;
  bool done = false;
  enum swathe_status status;
  while (!(status = test(&custom->transport, &done)) && !done) {
    char words[64];
    if (now_s() > until_s) {
      snprintf(words, sizeof words, "waited %g s", custom->calls.deadline_s);
      return told(custom, SWATHE_TIMEOUT, "to finish what was posted", words);
    }
    nanosleep(&nap, NULL);
  }
  return status;
}

static enum swathe_status wait(struct swathe_transport *transport)
{
  struct custom *custom = custom_of(transport);
  char words[WORDS_BYTES] = "";
  enum swathe_status status = soundness(custom);
  if (status || !custom->posted) return status;
  if (!custom->calls.wait) return wait_by_tests(custom);
  status = told(custom,
                custom->calls.wait(custom->calls.user, custom->calls.deadline_s, words,
                                   sizeof words),
                "to wait", words);
  if (!status) custom->posted = 0;
  return status;
}

static enum swathe_status gather_by_messages(struct swathe_transport *transport, const void *mine,
                                             size_t bytes, void *all)
{
  const int32_t ranks = transport->ranks;
  static char nothing;
  int32_t count = 0;
  // a message is never empty: a gather of nothing moves a byte
  char *parts = malloc((bytes + 1) * (size_t)ranks);
  struct sw_transport_message *messages = calloc(2 * (size_t)ranks, sizeof *messages);
  if (!parts || !messages) {
    free(parts);
    free(messages);
    return sw_fail(SWATHE_NO_MEMORY, "no memory for a gather");
  }
  const size_t part = bytes ? bytes : 1;
  memcpy(parts + (size_t)transport->rank * part, bytes ? mine : &nothing, part);
  for (int32_t r = 0; r < ranks; r++) {
    if (r == transport->rank) continue;
    messages[count++] =
        (struct sw_transport_message){ parts + (size_t)r * part, part, r, false, NULL };
    messages[count++] =
        (struct sw_transport_message){ parts + (size_t)transport->rank * part, part, r, true,
                                       NULL };
  }
  enum swathe_status status = post(transport, messages, count);
  if (!status) status = wait(transport);
  if (!status && bytes) memcpy(all, parts, bytes * (size_t)ranks);
  if (!transport->holds_memory) free(parts);
  free(messages);
  return status;
}

static enum swathe_status gather(struct swathe_transport *transport, const void *mine, size_t bytes,
                                 void *all)
{
  struct custom *custom = custom_of(transport);
  char words[WORDS_BYTES] = "";
  const enum swathe_status status = soundness(custom);
  if (status) return status;
  if (!custom->calls.gather) return gather_by_messages(transport, mine, bytes, all);
  return told(custom,
              custom->calls.gather(custom->calls.user, mine, bytes, all, words, sizeof words),
              "to gather", words);
}

static void give_up(struct swathe_transport *transport, const char *why)
{
  struct custom *custom = custom_of(transport);
  if (custom->calls.abort) custom->calls.abort(custom->calls.user, why ? why : "");
}

static void destroy(struct swathe_transport *transport)
{
  struct custom *custom = custom_of(transport);
  if (custom->calls.destroy) custom->calls.destroy(custom->calls.user);
  free(custom->transfers);
  free(custom);
}

static const struct sw_transport_operations operations = {
  .post = post,
  .test = test,
  .wait = wait,
  .gather = gather,
  .destroy = destroy,
  .abort = give_up,
};

enum swathe_status swathe_custom_create(const struct swathe_custom *calls,
                                        struct swathe_transport **transport)
{
  if (calls->ranks < 1 || calls->rank < 0 || calls->rank >= calls->ranks)
    return sw_fail(SWATHE_BAD_USE, "there is no rank %d of %d", calls->rank, calls->ranks);
  if (!calls->post || (!calls->test && !calls->wait))
    return sw_fail(SWATHE_BAD_USE, "a transport needs `post`, and `test` or `wait`");
  if (!(calls->deadline_s >= 0))
    return sw_fail(SWATHE_BAD_USE, "a deadline of %g s", calls->deadline_s);
  struct custom *custom = calloc(1, sizeof *custom);
  if (!custom) return sw_fail(SWATHE_NO_MEMORY, "no memory for a transport");
  custom->calls = *calls;
  if (calls->deadline_s == 0) custom->calls.deadline_s = 60;
  custom->transport = (struct swathe_transport){
    .operations = &operations,
    .name = calls->name ? calls->name : "custom",
    .rank = calls->rank,
    .ranks = calls->ranks,
  };
  *transport = &custom->transport;
  return SWATHE_OK;
}
