// nccl.c: libnccl_emulated.so: NCCL's point-to-point calls between ranks that are threads of one
// process, each on its own emulated device, in the order of emulated streams.
//
// A group is one task of its stream.  It offers its sends and receives and is done when all of them
// are; each pair of ranks matches them in order.  Until then what is to be received holds 0xff, and
// what is sent is read only when its match is there.  A rank that never posts keeps its peers
// waiting until they abort.
//
// Environment: EMULATOR_SEED; EMULATOR_NCCL_FAIL=ncclSend:3=2 makes a function's third call return
// 2; EMULATOR_NCCL_SILENT=1:2 makes rank 1 leave out its second group; EMULATOR_NCCL_ERROR=1:2=6
// makes rank 1's second group end with the asynchronous error 6.
#include "words.h"
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))

// Of the emulated driver.
int cuLaunchHostFunc(void *stream, void (*call)(void *), void *argument);
int cuCtxGetDevice(int *device);
int emulator_copy(uint64_t into, uint64_t from, size_t bytes);
int emulator_fill(uint64_t into, int byte, size_t bytes);

typedef enum {
  ncclSuccess = 0, ncclUnhandledCudaError = 1, ncclSystemError = 2, ncclInternalError = 3,
  ncclInvalidArgument = 4, ncclInvalidUsage = 5, ncclRemoteError = 6, ncclInProgress = 7,
} ncclResult_t;
typedef struct { char internal[128]; } ncclUniqueId;
typedef struct comm *ncclComm_t;

enum { VERSION = 22809, MOST_RANKS = 64 };

struct message {
  uint64_t address;
  size_t bytes;
  int peer;
  bool send, done;
  struct message *next;        // of its pair's queue
};

// What a group does on one stream.
struct work {
  struct comm *comm;
  struct message *messages;
  int count;
  int number;                  // of the communicator's groups, from 1
  struct work *next;           // all of the communicator's
};

// The ranks that share an id.
struct clique {
  ncclUniqueId id;
  int ranks, joined;
  struct comm *comms[MOST_RANKS];
  struct { struct message *first, *last; } sends[MOST_RANKS][MOST_RANKS];      // from, to
  struct { struct message *first, *last; } receives[MOST_RANKS][MOST_RANKS];
  struct clique *next;
};

struct comm {
  struct clique *clique;
  int rank, device, groups;
  bool blocking, gone, aborted;
  ncclResult_t error;
  char words[256];
  struct work *works;
  struct comm *next;           // of the process
};

struct entry { struct comm *comm; void *stream; struct message message; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t change = PTHREAD_COND_INITIALIZER;
static struct clique *cliques;
static struct comm *comms;
static uint64_t ids, chance;
static _Thread_local struct entry *entries;
static _Thread_local int entry_count, depth;
static _Thread_local ncclResult_t group_status;
static char last_words[256];
static struct { const char *name; int calls; } calls[32];

static void remember(struct comm *comm, ncclResult_t error, const char *words)
{
  snprintf(last_words, sizeof last_words, "%s", words);
  if (!comm) return;
  if (!comm->error) comm->error = error;
  snprintf(comm->words, sizeof comm->words, "%s", words);
}

static ncclResult_t refuse(ncclResult_t error, const char *words)
{
  remember(NULL, error, words);
  words_say("NCCL: %s", words);
  return error;
}

static ncclResult_t injected(const char *name)
{
  const char *given = getenv("EMULATOR_NCCL_FAIL");
  int result = 0;
  if (!given) return ncclSuccess;
  pthread_mutex_lock(&lock);
  int i = 0;
  while (i < 31 && calls[i].name && strcmp(calls[i].name, name)) i++;
  calls[i].name = name;
  int call = ++calls[i].calls, which, status;
  size_t length = strlen(name);
  for (const char *at = given; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL)
    if (!strncmp(at, name, length) && sscanf(at + length, ":%d=%d", &which, &status) == 2 &&
        which == call)
      result = status;
  pthread_mutex_unlock(&lock);
  return (ncclResult_t)result;
}

#define ENTER do { \
    ncclResult_t fails_ = injected(__func__); \
    if (fails_) return fails_; \
  } while (0)

// Whether "rank:number[=code]" in the environment means this group; its code.
static bool chosen(const char *variable, const struct work *work, int *code)
{
  const char *given = getenv(variable);
  int rank, number;
  *code = 0;
  return given && sscanf(given, "%d:%d=%d", &rank, &number, code) >= 2 &&
         rank == work->comm->rank && number == work->number;
}

// ---- communicators

API ncclResult_t ncclGetVersion(int *version)
{
  *version = VERSION;
  return ncclSuccess;
}

API ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
  ENTER;
  pthread_mutex_lock(&lock);
  memset(id, 0, sizeof *id);
  snprintf(id->internal, sizeof id->internal, "emulated %llu", (unsigned long long)++ids);
  pthread_mutex_unlock(&lock);
  return ncclSuccess;
}

static struct clique *find_clique(const ncclUniqueId *id, int ranks)
{
  for (struct clique *at = cliques; at; at = at->next)
    if (!memcmp(&at->id, id, sizeof *id)) return at;
  struct clique *clique = calloc(1, sizeof *clique);
  if (!clique) abort();
  clique->id = *id;
  clique->ranks = ranks;
  clique->next = cliques;
  cliques = clique;
  return clique;
}

static ncclResult_t join(ncclComm_t *comm, int ranks, const ncclUniqueId *id, int rank,
                         bool blocking)
{
  int device;
  if (!comm || ranks < 1 || ranks > MOST_RANKS || rank < 0 || rank >= ranks)
    return refuse(ncclInvalidArgument, "rank or number of ranks is out of range");
  if (cuCtxGetDevice(&device)) return refuse(ncclUnhandledCudaError, "no device is current");
  pthread_mutex_lock(&lock);
  struct clique *clique = find_clique(id, ranks);
  const char *words = clique->ranks != ranks ? "ranks disagree on their number"
                    : clique->comms[rank] ? "the rank has joined before" : NULL;
  for (int i = 0; i < ranks && !words; i++)
    if (clique->comms[i] && clique->comms[i]->device == device)
      words = "Duplicate GPU detected: two ranks on one device";
  struct comm *made = NULL;
  if (!words) {
    made = calloc(1, sizeof *made);
    if (!made) abort();
    *made = (struct comm){ .clique = clique, .rank = rank, .device = device,
                           .blocking = blocking, .next = comms };
    comms = made;
    clique->comms[rank] = made;
    clique->joined++;
    *comm = made;
    pthread_cond_broadcast(&change);
    while (blocking && clique->joined < clique->ranks) pthread_cond_wait(&change, &lock);
  }
  bool complete = clique->joined == clique->ranks;
  pthread_mutex_unlock(&lock);
  if (words) return refuse(ncclInvalidUsage, words);
  return complete ? ncclSuccess : ncclInProgress;
}

API ncclResult_t ncclCommInitRank(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank)
{
  ENTER;
  return join(comm, ranks, &id, rank, true);
}

// The beginning of ncclConfig_t.
struct config { size_t size; unsigned magic, version; int blocking; };

API ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank,
                                        const struct config *config)
{
  ENTER;
  if (config && config->magic != 0xcafebeef)
    return refuse(ncclInvalidArgument, "the config has not been initialised");
  bool blocking = !config || config->blocking != 0;  // undefined is INT_MIN, which means 1
  return join(comm, ranks, &id, rank, blocking);
}

static bool is_known(const struct comm *comm)
{
  for (const struct comm *at = comms; at; at = at->next)
    if (at == comm) return !at->gone;
  return false;
}

static ncclResult_t leave(struct comm *comm, bool aborts)
{
  pthread_mutex_lock(&lock);
  bool known = is_known(comm);
  if (known) {
    comm->gone = true;
    comm->aborted = aborts;
    pthread_cond_broadcast(&change);
  }
  pthread_mutex_unlock(&lock);
  return known ? ncclSuccess : refuse(ncclInvalidArgument, "there is no such communicator");
}

API ncclResult_t ncclCommFinalize(ncclComm_t comm)
{
  ENTER;
  (void)comm;
  return ncclSuccess;
}

API ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
  ENTER;
  return leave(comm, false);
}

API ncclResult_t ncclCommAbort(ncclComm_t comm)
{
  ENTER;
  return leave(comm, true);
}

API ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error)
{
  ENTER;
  pthread_mutex_lock(&lock);
  bool known = is_known(comm);
  if (known)
    *error = comm->error ? comm->error
           : comm->clique->joined < comm->clique->ranks ? ncclInProgress : ncclSuccess;
  pthread_mutex_unlock(&lock);
  return known ? ncclSuccess : ncclInvalidArgument;
}

API ncclResult_t ncclCommCount(ncclComm_t comm, int *count)
{
  ENTER;
  *count = comm->clique->ranks;
  return ncclSuccess;
}

API ncclResult_t ncclCommUserRank(ncclComm_t comm, int *rank)
{
  ENTER;
  *rank = comm->rank;
  return ncclSuccess;
}

API ncclResult_t ncclCommCuDevice(ncclComm_t comm, int *device)
{
  ENTER;
  *device = comm->device;
  return ncclSuccess;
}

API const char *ncclGetErrorString(ncclResult_t result)
{
  static const char *const words[] = {
    "no error", "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
    "unhandled system error (run with NCCL_DEBUG=INFO for details)", "internal error",
    "invalid argument (run with NCCL_DEBUG=WARN for details)",
    "invalid usage (run with NCCL_DEBUG=WARN for details)",
    "remote process exited or there was a network error", "NCCL operation in progress",
  };
  return result >= 0 && result <= ncclInProgress ? words[result] : "unknown result code";
}

API const char *ncclGetLastError(ncclComm_t comm)
{
  return comm && *comm->words ? comm->words : last_words;
}

// ---- messages

static void put(struct message **first, struct message **last, struct message *message)
{
  message->next = NULL;
  if (*last) (*last)->next = message;
  else *first = message;
  *last = message;
}

static void take_first(struct message **first, struct message **last)
{
  *first = (*first)->next;
  if (!*first) *last = NULL;
}

static void match(struct clique *clique, int from, int to)
{
  for (;;) {
    struct message *send = clique->sends[from][to].first;
    struct message *receive = clique->receives[from][to].first;
    if (!send || !receive) return;
    take_first(&clique->sends[from][to].first, &clique->sends[from][to].last);
    take_first(&clique->receives[from][to].first, &clique->receives[from][to].last);
    if (send->bytes != receive->bytes) {
      char words[160];
      snprintf(words, sizeof words, "rank %d sends %zu bytes where rank %d receives %zu", from,
               send->bytes, to, receive->bytes);
      words_say("NCCL: %s", words);
      remember(clique->comms[from], ncclInvalidUsage, words);
      remember(clique->comms[to], ncclInvalidUsage, words);
    } else if (emulator_copy(receive->address, send->address, send->bytes)) {
      remember(clique->comms[to], ncclUnhandledCudaError, "an illegal memory access");
    }
    send->done = receive->done = true;
    pthread_cond_broadcast(&change);
  }
}

// What the work has put into queues and nobody has taken goes out of them.
static void withdraw(struct message **first, struct message **last, const struct work *work)
{
  *last = NULL;
  while (*first) {
    struct message *at = *first;
    if (at >= work->messages && at < work->messages + work->count) {
      *first = at->next;
    } else {
      *last = at;
      first = &at->next;
    }
  }
}

static bool all_done(const struct work *work)
{
  for (int i = 0; i < work->count; i++)
    if (!work->messages[i].done) return false;
  return true;
}

static void run(void *argument)
{
  struct work *work = argument;
  struct comm *comm = work->comm;
  struct clique *clique = comm->clique;
  int code;
  pthread_mutex_lock(&lock);
  bool silent = chosen("EMULATOR_NCCL_SILENT", work, &code) || comm->aborted || comm->error;
  for (int i = 0; i < work->count && !silent; i++) {
    struct message *message = &work->messages[i];
    message->done = false;
    if (message->send) {
      put(&clique->sends[comm->rank][message->peer].first,
          &clique->sends[comm->rank][message->peer].last, message);
    } else {
      emulator_fill(message->address, 0xff, message->bytes);
      put(&clique->receives[message->peer][comm->rank].first,
          &clique->receives[message->peer][comm->rank].last, message);
    }
  }
  for (int i = 0; i < work->count && !silent; i++) {
    int peer = work->messages[i].peer;
    if (work->messages[i].send) match(clique, comm->rank, peer);
    else match(clique, peer, comm->rank);
  }
  // a silent rank's stream stands still like its peers'
  while ((silent || !all_done(work)) && !comm->aborted && !comm->error)
    pthread_cond_wait(&change, &lock);
  for (int r = 0; r < clique->ranks; r++) {
    withdraw(&clique->sends[comm->rank][r].first, &clique->sends[comm->rank][r].last, work);
    withdraw(&clique->receives[r][comm->rank].first, &clique->receives[r][comm->rank].last, work);
  }
  if (chosen("EMULATOR_NCCL_ERROR", work, &code)) {
    remember(comm, (ncclResult_t)code, "an error on demand");
    pthread_cond_broadcast(&change);
  }
  pthread_mutex_unlock(&lock);
}

static size_t bytes_of(int type)
{
  static const size_t bytes[] = { 1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1 };
  return type >= 0 && type < 12 ? bytes[type] : 0;
}

// The messages of one communicator on one stream become one task.
static ncclResult_t launch(struct comm *comm, void *stream)
{
  struct work *work = calloc(1, sizeof *work);
  if (!work) abort();
  work->comm = comm;
  for (int i = 0; i < entry_count; i++)
    work->count += entries[i].comm == comm && entries[i].stream == stream;
  work->messages = calloc((size_t)work->count, sizeof *work->messages);
  int count = 0;
  for (int i = 0; i < entry_count; i++) {
    if (entries[i].comm != comm || entries[i].stream != stream) continue;
    work->messages[count++] = entries[i].message;
    entries[i].comm = NULL;
  }
  pthread_mutex_lock(&lock);
  work->number = ++comm->groups;
  work->next = comm->works;
  comm->works = work;
  pthread_mutex_unlock(&lock);
  if (cuLaunchHostFunc(stream, run, work))
    return refuse(ncclUnhandledCudaError, "the stream does not take the group");
  return ncclSuccess;
}

API ncclResult_t ncclGroupStart(void)
{
  ENTER;
  depth++;
  return ncclSuccess;
}

static bool draw(void)
{
  if (!chance) {
    const char *seed = getenv("EMULATOR_SEED");
    chance = (seed ? strtoull(seed, NULL, 10) : 1) * UINT64_C(0x9e3779b97f4a7c15) | 1;
  }
  chance ^= chance << 13;
  chance ^= chance >> 7;
  chance ^= chance << 17;
  return chance >> 20 & 1;
}

static ncclResult_t end_group(void)
{
  ncclResult_t status = group_status;
  bool waits = true;
  for (int i = 0; i < entry_count && !status; i++) {
    if (!entries[i].comm) continue;
    waits = waits && entries[i].comm->blocking;
    status = launch(entries[i].comm, entries[i].stream);
  }
  free(entries);
  entries = NULL;
  entry_count = 0;
  group_status = ncclSuccess;
  if (!status && !waits) {  // a communicator that does not block may say that it is not done yet
    pthread_mutex_lock(&lock);
    if (draw()) status = ncclInProgress;
    pthread_mutex_unlock(&lock);
  }
  return status;
}

API ncclResult_t ncclGroupEnd(void)
{
  ncclResult_t fails = injected(__func__);
  if (fails) {
    free(entries);
    entries = NULL;
    entry_count = depth = 0;
    return fails;
  }
  if (!depth) return refuse(ncclInvalidUsage, "ncclGroupEnd with no ncclGroupStart");
  return --depth ? ncclSuccess : end_group();
}

static ncclResult_t add(uint64_t address, size_t count, int type, int peer, ncclComm_t comm,
                        void *stream, bool send)
{
  pthread_mutex_lock(&lock);
  bool known = is_known(comm);
  const char *words = !known ? "there is no such communicator"
                    : comm->clique->joined < comm->clique->ranks ? "not all ranks have joined"
                    : peer < 0 || peer >= comm->clique->ranks ? "the peer is out of range"
                    : !bytes_of(type) ? "the type is not known" : NULL;
  ncclResult_t error = known ? comm->error : ncclSuccess;
  pthread_mutex_unlock(&lock);
  if (words) {
    group_status = refuse(ncclInvalidArgument, words);
    return group_status;
  }
  if (error) return group_status = error;
  entries = realloc(entries, ((size_t)entry_count + 1) * sizeof *entries);
  if (!entries) abort();
  entries[entry_count++] = (struct entry){ .comm = comm, .stream = stream,
    .message = { .address = address, .bytes = count * bytes_of(type), .peer = peer,
                 .send = send } };
  return depth ? ncclSuccess : end_group();
}

API ncclResult_t ncclSend(const void *data, size_t count, int type, int peer, ncclComm_t comm,
                          void *stream)
{
  ENTER;
  return add((uint64_t)(uintptr_t)data, count, type, peer, comm, stream, true);
}

API ncclResult_t ncclRecv(void *data, size_t count, int type, int peer, ncclComm_t comm,
                          void *stream)
{
  ENTER;
  return add((uint64_t)(uintptr_t)data, count, type, peer, comm, stream, false);
}
