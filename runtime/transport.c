// transport.c: what holds for every transport: the public calls, and the check of what is posted.
#include "transport.h"

#include <stdlib.h>

enum swathe_status sw_transport_check(const struct swathe_transport *transport,
                                      const struct sw_transport_message *message)
{
  if (message->peer < 0 || message->peer >= transport->ranks || message->peer == transport->rank)
    return sw_fail(SWATHE_BAD_USE, "rank %d has no peer %d among %d ranks", transport->rank,
                   message->peer, transport->ranks);
  if (!message->bytes || !message->data)
    return sw_fail(SWATHE_BAD_USE, "rank %d: an empty message %s rank %d", transport->rank,
                   message->send ? "to" : "from", message->peer);
  return SWATHE_OK;
}

int32_t swathe_transport_rank(const struct swathe_transport *transport) { return transport->rank; }

int32_t swathe_transport_ranks(const struct swathe_transport *transport)
{
  return transport->ranks;
}

enum swathe_status swathe_transport_exchange(struct swathe_transport *transport,
                                             const struct swathe_transfer *transfers, int32_t count)
{
  struct sw_transport_message *messages = calloc((size_t)count + 1, sizeof *messages);
  if (!messages) return sw_fail(SWATHE_NO_MEMORY, "no memory for %d messages", count);
  for (int32_t i = 0; i < count; i++)
    messages[i] = (struct sw_transport_message){ transfers[i].data, transfers[i].bytes,
                                                 transfers[i].peer, transfers[i].send,
                                                 NULL };
  enum swathe_status status = transport->operations->post(transport, messages, count);
  free(messages);
  return status ? status : transport->operations->wait(transport);
}

enum swathe_status swathe_transport_wait(struct swathe_transport *transport)
{
  return transport->operations->wait(transport);
}

enum swathe_status swathe_transport_gather(struct swathe_transport *transport, const void *mine,
                                           size_t bytes, void *all)
{
  return transport->operations->gather(transport, mine, bytes, all);
}

void swathe_transport_abort(struct swathe_transport *transport, const char *why)
{
  if (transport->operations->abort) transport->operations->abort(transport, why);
}

void swathe_transport_destroy(struct swathe_transport *transport)
{
  if (transport) transport->operations->destroy(transport);
}
