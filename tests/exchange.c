// exchange.c: random messages between ranks.  See exchange.h.
#include "exchange.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

uint64_t exchange_mix(uint64_t x)
{
  x ^= x >> 33, x *= 0xff51afd7ed558ccdu, x ^= x >> 33, x *= 0xc4ceb9fe1a85ec53u;
  return x ^ x >> 33;
}

int exchange_below(uint64_t *seed, int bound)
{
  *seed = *seed * 6364136223846793005u + 1442695040888963407u;
  return (int)((exchange_mix(*seed) >> 8) % (uint64_t)bound);
}

struct rank {
  struct swathe_transport *transport;
  uint64_t seed;
  int number, ranks;
  enum swathe_status status;
  char failure[256];
};

enum { MOST_MESSAGES = 5, GUARD_BYTES = 32, ROUNDS = 4 };

static uint64_t pair_seed(uint64_t seed, int round, int from, int to)
{
  return exchange_mix(seed + (uint64_t)(round * 10000 + from * 100 + to));
}

// The n-th message of a round between two ranks: both ends know its size and bytes from the seed.
static size_t message_bytes(uint64_t pair, int n)
{
  uint64_t seed = pair + (uint64_t)n;
  return (size_t)(exchange_below(&seed, 25) ? 1 + exchange_below(&seed, 3000)
                                            : 1 + exchange_below(&seed, 600000));
}

static char message_byte(uint64_t pair, int n, size_t at)
{
  return (char)((pair >> 8) + (uint64_t)n * 31 + at * 7 + (at >> 8));
}

struct box {
  char *data;
  size_t bytes;
  int from, n;
};

// One round: every pair exchanges up to five messages, posted by each rank in its own order and in
// several calls.  Returns the receives in `boxes`.
static int post_round(struct rank *rank, uint64_t *mine, int round, struct box *sent,
                      int *sent_count, struct box *boxes)
{
  struct sw_transport_message batch[4];
  int next[2][EXCHANGE_MOST_RANKS] = { { 0 } }, batched = 0, received = 0;
  for (int left = 1; left;) {
    left = 0;
    for (int i = 0; i < 2 * rank->ranks; i++) {
      const int peer = exchange_below(mine, rank->ranks), send = exchange_below(mine, 2);
      const int from = send ? rank->number : peer, to = send ? peer : rank->number;
      uint64_t pair = pair_seed(rank->seed, round, from, to), counted = pair;
      const int count = exchange_below(&counted, MOST_MESSAGES + 1), n = next[send][peer];
      if (peer == rank->number || n >= count) continue;
      next[send][peer]++;
      struct box *box = send ? &sent[(*sent_count)++] : &boxes[received++];
      *box = (struct box){ NULL, message_bytes(pair, n), from, n };
      box->data = malloc(box->bytes + GUARD_BYTES);
      memset(box->data, 0x5a, box->bytes + GUARD_BYTES);
      for (size_t at = 0; send && at < box->bytes; at++) box->data[at] = message_byte(pair, n, at);
      batch[batched++] = (struct sw_transport_message){ box->data, box->bytes, peer, send, NULL };
      if (batched == 4 || exchange_below(mine, 3) == 0) {
        rank->status = rank->transport->operations->post(rank->transport, batch, batched);
        if (rank->status) return received;
        batched = 0;
      }
    }
    for (int peer = 0; peer < rank->ranks; peer++)
      for (int send = 0; send < 2 && peer != rank->number; send++) {
        uint64_t counted =
            pair_seed(rank->seed, round, send ? rank->number : peer, send ? peer : rank->number);
        left |= next[send][peer] < exchange_below(&counted, MOST_MESSAGES + 1);
      }
  }
  if (batched) rank->status = rank->transport->operations->post(rank->transport, batch, batched);
  return received;
}

static void check_boxes(struct rank *rank, int round, struct box *boxes, int count)
{
  for (int i = 0; i < count; i++) {
    const uint64_t pair = pair_seed(rank->seed, round, boxes[i].from, rank->number);
    for (size_t at = 0; at < boxes[i].bytes + GUARD_BYTES; at++)
      if (boxes[i].data[at] != (at < boxes[i].bytes ? message_byte(pair, boxes[i].n, at) : 0x5a))
        snprintf(rank->failure, sizeof rank->failure,
                 "round %d: byte %zu of %zu of message %d from %d", round, at, boxes[i].bytes,
                 boxes[i].n, boxes[i].from);
  }
}

static void gather_numbers(struct rank *rank, int round)
{
  uint64_t all[EXCHANGE_MOST_RANKS + 1],
      mine = exchange_mix((uint64_t)(round * 100 + rank->number));
  all[rank->ranks] = 0x5a5a;
  rank->status = rank->transport->operations->gather(rank->transport, &mine, sizeof mine, all);
  for (int r = 0; r < rank->ranks && !rank->status; r++)
    if (all[r] != exchange_mix((uint64_t)(round * 100 + r)))
      snprintf(rank->failure, sizeof rank->failure, "gather %d: part of rank %d", round, r);
  if (all[rank->ranks] != 0x5a5a)
    snprintf(rank->failure, sizeof rank->failure, "gather wrote too far");
}

bool exchange_randomly(struct swathe_transport *transport, uint64_t seed, char *failure,
                       size_t size)
{
  enum { MOST_BOXES = EXCHANGE_MOST_RANKS * MOST_MESSAGES };
  struct rank here = { transport, seed, transport->rank, transport->ranks, SWATHE_OK, "" };
  struct rank *rank = &here;
  const struct sw_transport_operations *calls = transport->operations;
  uint64_t mine = exchange_mix(rank->seed + (uint64_t)rank->number);
  for (int round = 0; round < ROUNDS && !rank->status; round++) {
    struct box sent[MOST_BOXES], boxes[MOST_BOXES];
    int sent_count = 0;
    const int count = post_round(rank, &mine, round, sent, &sent_count, boxes);
    bool done = false;
    for (int i = exchange_below(&mine, 4); i > 0 && !rank->status; i--)
      rank->status = calls->test(transport, &done);
    // Gathers may lie between the posts and the wait, or after it, but for all ranks alike.
    if (!rank->status && round % 2) gather_numbers(rank, 2 * round);
    if (!rank->status && exchange_below(&mine, 2))
      // some transports only finish in wait
      for (int tests = 0; !done && !rank->status && tests < 100000; tests++)
        rank->status = calls->test(transport, &done);
    if (!rank->status) rank->status = calls->wait(transport);
    if (!rank->status) gather_numbers(rank, 2 * round + 1);
    if (rank->status) snprintf(rank->failure, sizeof rank->failure, "%.250s", swathe_error());
    else check_boxes(rank, round, boxes, count);
    for (int i = 0; i < count; i++) free(boxes[i].data);
    for (int i = 0; i < sent_count; i++) free(sent[i].data);
  }
  snprintf(failure, size, "%s", here.failure);
  return !*here.failure;
}
