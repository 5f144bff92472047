/* libnccl.so.2: ranks are processes of one host, each with an emulated card of its own.
 *
 * A collective whose ranks each contribute at most EMULATED_GPU_COPY bytes (64 KiB) is real: the ranks meet in shared
 * memory and everyone gets the true result, so that counts, votes and pickled objects mean something. A larger one
 * returns at once and leaves memory as it is: its values are nobody's, as no kernel computed them. All ranks take the
 * same branch, as they pass the same sizes. Point-to-point messages carry nothing (generated stubs).
 *
 * A real collective is waited for by the device, this one by the host, at the call. A rank whose process has ended is
 * an error for those who wait for it (ncclRemoteError); so is one that does not come within EMULATED_GPU_TIMEOUT
 * seconds.
 *
 * With a blank identifier a rank is alone, and all others are twins of it: what it contributes counts as everyone's.
 * Identifiers are blank where EMULATED_GPU_ALONE is set. */
#define _GNU_SOURCE
#include "device.h"
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS = 0, SYSTEM_ERROR = 2, REMOTE_ERROR = 6 };
enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, FLOAT8E4M3, FLOAT8E5M2 };
enum { SUM, PROD, MAX, MIN, AVG, OWN_SUM }; /* the last: a sum with a factor of the caller's, which is left out */

#define MOST_RANKS 64
typedef struct {
  char bytes[128];
} unique_id;

/* What the ranks of a communicator share; behind it two slots for each rank, used in turn. */
typedef struct {
  int pid[MOST_RANKS];
  uint64_t posted[MOST_RANKS]; /* how many collectives a rank has put its part of into its slots */
} shared;

typedef struct {
  int rank, size, error, splits;
  uint64_t number; /* of small collectives so far */
  size_t slot_bytes, mapped_bytes;
  shared *shared;
  char key[40];
} comm;

static size_t size_of(size_t n, int type) {
  static const int sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return n * sizes[type];
}

/* Waiting for each other. */

static bool is_running(int pid) { /* not a zombie */
  char path[32], state = 0;
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  FILE *file = fopen(path, "r");
  if (!file) return false;
  bool read = fscanf(file, "%*d (%*[^)]) %c", &state) == 1;
  fclose(file);
  return !read || (state != 'Z' && state != 'X');
}

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + 1e-9 * time.tv_nsec;
}

static bool is_alone(comm *c) { return !c->key[0]; }

static bool has_joined(comm *c, int rank, uint64_t unused) {
  return __atomic_load_n(&c->shared->pid[rank], __ATOMIC_ACQUIRE) != 0;
}

static bool has_posted(comm *c, int rank, uint64_t number) {
  return __atomic_load_n(&c->shared->posted[rank], __ATOMIC_ACQUIRE) >= number;
}

/* Until `done` is true of every rank: yield first, then sleep, and look now and then whether all still live. */
static int wait_for_all(comm *c, bool (*done)(comm *, int, uint64_t), uint64_t number) {
  if (is_alone(c)) return SUCCESS;
  double limit = now() + (double)emu_size_setting("TIMEOUT", 600), next_look = now() + 0.2;
  for (int rank = 0, turn = 0; rank < c->size;) {
    if (done(c, rank, number)) {
      rank++;
      continue;
    }
    if (++turn < 200) {
      sched_yield();
      continue;
    }
    usleep(turn < 2000 ? 50 : 1000);
    if (now() < next_look) continue;
    next_look = now() + 0.2;
    int pid = __atomic_load_n(&c->shared->pid[rank], __ATOMIC_ACQUIRE);
    bool gone = pid && !is_running(pid) && !done(c, rank, number);
    if (gone || now() > limit) {
      fprintf(stderr, "emulated_gpu: NCCL: rank %d of %d %s\n", rank, c->size, gone ? "has ended" : "did not come");
      return c->error = gone ? REMOTE_ERROR : SYSTEM_ERROR;
    }
  }
  return SUCCESS;
}

/* Communicators. */

static int open_shared(comm *c) {
  c->slot_bytes = (emu_most_copied() + 4095) / 4096 * 4096;
  c->mapped_bytes = sizeof(shared) + 2 * c->size * c->slot_bytes;
  if (is_alone(c)) {
    c->shared = mmap(NULL, c->mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return c->shared == MAP_FAILED ? SYSTEM_ERROR : SUCCESS;
  }
  char name[64];
  snprintf(name, sizeof name, "/emulated_gpu_%s", c->key);
  int file = shm_open(name, O_CREAT | O_RDWR, 0600);
  if (file < 0 || ftruncate(file, (off_t)c->mapped_bytes)) return SYSTEM_ERROR;
  void *p = mmap(NULL, c->mapped_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (p == MAP_FAILED) return SYSTEM_ERROR;
  c->shared = p;
  __atomic_store_n(&c->shared->pid[c->rank], (int)getpid(), __ATOMIC_RELEASE);
  int error = wait_for_all(c, has_joined, 0);
  shm_unlink(name); /* all have it mapped: the name is needed no more, and nothing is left behind */
  return error;
}

static int join(comm **out, const char *key, int size, int rank) {
  if (size > MOST_RANKS) return SYSTEM_ERROR;
  comm *c = calloc(1, sizeof *c);
  c->rank = rank;
  c->size = size;
  snprintf(c->key, sizeof c->key, "%s", key);
  *out = c;
  return size > 1 ? open_shared(c) : SUCCESS;
}

EXPORT int ncclGetVersion(int *version) {
  *version = 22907;
  return SUCCESS;
}

EXPORT int ncclGetUniqueId(unique_id *id) {
  unsigned char random[8];
  memset(id, 0, sizeof *id);
  if (getenv("EMULATED_GPU_ALONE")) return SUCCESS;
  if (getrandom(random, sizeof random, 0) != sizeof random) return SYSTEM_ERROR;
  for (int i = 0; i < 8; i++) sprintf(id->bytes + 2 * i, "%02x", random[i]);
  return SUCCESS;
}

EXPORT int ncclCommInitRank(comm **c, int size, unique_id id, int rank) { return join(c, id.bytes, size, rank); }
EXPORT int ncclCommInitRankConfig(comm **c, int size, unique_id id, int rank, void *config) {
  return join(c, id.bytes, size, rank);
}
EXPORT int ncclCommInitRankScalable(comm **c, int size, int rank, int n, unique_id *ids, void *config) {
  return join(c, ids[0].bytes, size, rank);
}

static int leave(comm *c) {
  if (c && c->shared) munmap(c->shared, c->mapped_bytes);
  free(c);
  return SUCCESS;
}
EXPORT int ncclCommDestroy(comm *c) { return leave(c); }
EXPORT int ncclCommAbort(comm *c) { return leave(c); }

EXPORT int ncclCommGetAsyncError(comm *c, int *error) {
  *error = c->error;
  return SUCCESS;
}
EXPORT int ncclCommCount(comm *c, int *n) {
  *n = c->size;
  return SUCCESS;
}
EXPORT int ncclCommUserRank(comm *c, int *n) {
  *n = c->rank;
  return SUCCESS;
}
EXPORT int ncclCommCuDevice(comm *c, int *device) {
  *device = emu_current_device();
  return SUCCESS;
}
EXPORT const char *ncclGetErrorString(int error) {
  return error == REMOTE_ERROR ? "a rank of the emulated communicator has ended" : "error of the emulated NCCL";
}
EXPORT const char *ncclGetLastError(void *c) { return ""; }
EXPORT int ncclRedOpCreatePreMulSum(int *op, void *factor, int type, int where, comm *c) {
  *op = OWN_SUM;
  return SUCCESS;
}

/* Small collectives: everyone's part is put where all can read it, then each makes its own result. */

static char *slot(comm *c, int rank, uint64_t number) {
  return (char *)(c->shared + 1) + (2 * rank + number % 2) * c->slot_bytes;
}

/* Slot `number % 2` is free: whoever posted number - 1 has read number - 2, and all did before anyone got here. */
static int exchange(comm *c, const void *mine, size_t size) {
  if (c->error) return c->error;
  uint64_t number = ++c->number;
  for (int rank = 0; rank < c->size; rank++) {
    if (rank == c->rank || is_alone(c)) memcpy(slot(c, rank, number), mine, size);
  }
  __atomic_store_n(&c->shared->posted[c->rank], number, __ATOMIC_RELEASE);
  return wait_for_all(c, has_posted, number);
}

EXPORT int ncclCommSplit(comm *c, int color, int key, comm **out, void *config) {
  *out = NULL;
  int mine[2] = {color, key}, rank = 0, size = 0, error = exchange(c, mine, sizeof mine);
  if (error || color < 0) return error;
  for (int other = 0; other < c->size; other++) {
    int *of_other = (int *)slot(c, other, c->number);
    if (of_other[0] != color) continue;
    size++;
    rank += of_other[1] < key || (of_other[1] == key && other < c->rank);
  }
  char name[40];
  snprintf(name, sizeof name, "%.16s_%d_%d", c->key, ++c->splits, color);
  return join(out, is_alone(c) ? "" : name, size, rank);
}

static double from_float16(uint16_t bits) {
  _Float16 value;
  memcpy(&value, &bits, sizeof value);
  return (double)value;
}

static uint16_t to_float16(double value) {
  _Float16 half = (_Float16)value;
  uint16_t bits;
  memcpy(&bits, &half, sizeof bits);
  return bits;
}

static double from_bfloat16(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

static uint16_t to_bfloat16(double value) { /* to the nearest, ties to even */
  float narrow = (float)value;
  uint32_t bits;
  memcpy(&bits, &narrow, sizeof bits);
  if (narrow != narrow) return 0x7fc0;
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#define COMBINE(a, b) \
  (op == PROD ? (a) * (b) : op == MAX ? ((a) > (b) ? (a) : (b)) : op == MIN ? ((a) < (b) ? (a) : (b)) : (a) + (b))
/* Element `i` of all ranks' parts, as type `wide`; `get` and `put` convert from and to the type it is sent as. */
#define REDUCE(sent, wide, get, put)                                  \
  for (size_t i = 0; i < n; i++) {                                    \
    wide sum = get(((sent *)slot(c, 0, c->number))[first + i]);       \
    for (int rank = 1; rank < c->size; rank++) {                      \
      wide part = get(((sent *)slot(c, rank, c->number))[first + i]); \
      sum = COMBINE(sum, part);                                       \
    }                                                                 \
    if (op == AVG) sum = sum / c->size;                               \
    ((sent *)out)[i] = put(sum);                                      \
  }

/* Elements `first` to `first + n` of what the last exchange brought, combined. */
static void reduce(comm *c, void *out, size_t first, size_t n, int type, int op) {
  switch (type) {
    case INT8: REDUCE(int8_t, int64_t, , ) break;
    case UINT8: REDUCE(uint8_t, uint64_t, , ) break;
    case INT32: REDUCE(int32_t, int64_t, , ) break;
    case UINT32: REDUCE(uint32_t, uint64_t, , ) break;
    case INT64: REDUCE(int64_t, int64_t, , ) break;
    case UINT64: REDUCE(uint64_t, uint64_t, , ) break;
    case FLOAT16: REDUCE(uint16_t, double, from_float16, to_float16) break;
    case FLOAT32: REDUCE(float, double, , ) break;
    case FLOAT64: REDUCE(double, double, , ) break;
    case BFLOAT16: REDUCE(uint16_t, double, from_bfloat16, to_bfloat16) break;
    default: memcpy(out, slot(c, 0, c->number) + size_of(first, type), size_of(n, type)); /* 8-bit floats: not added */
  }
}

static bool is_small(comm *c, size_t size) { return size && size <= emu_most_copied(); }

EXPORT int ncclAllGather(const void *from, void *to, size_t n, int type, comm *c, void *stream) {
  size_t size = size_of(n, type);
  if (!is_small(c, size)) return SUCCESS;
  if (c->size == 1) return emu_copy(to, from, size), SUCCESS;
  int error = exchange(c, from, size);
  for (int rank = 0; !error && rank < c->size; rank++)
    emu_copy((char *)to + rank * size, slot(c, rank, c->number), size);
  return error;
}

EXPORT int ncclBroadcast(const void *from, void *to, size_t n, int type, int root, comm *c, void *stream) {
  size_t size = size_of(n, type);
  if (!is_small(c, size)) return SUCCESS;
  if (c->size == 1) return emu_copy(to, from, size), SUCCESS;
  int error = exchange(c, c->rank == root ? from : to, size);
  if (!error) emu_copy(to, slot(c, root, c->number), size);
  return error;
}
EXPORT int ncclBcast(void *data, size_t n, int type, int root, comm *c, void *stream) {
  return ncclBroadcast(data, data, n, type, root, c, stream);
}

/* `part` elements of the result, from element `first`, go to those who `get` them. */
static int reduced(const void *from, void *to, size_t n, size_t first, size_t part, int type, int op, bool get,
                   comm *c) {
  size_t size = size_of(n, type);
  if (!is_small(c, size)) return SUCCESS;
  if (c->size == 1) return emu_copy(to, from, size), SUCCESS;
  int error = exchange(c, from, size);
  if (error || !get) return error;
  void *out = malloc(size);
  reduce(c, out, first, part, type, op);
  emu_copy(to, out, size_of(part, type));
  free(out);
  return SUCCESS;
}

EXPORT int ncclAllReduce(const void *from, void *to, size_t n, int type, int op, comm *c, void *stream) {
  return reduced(from, to, n, 0, n, type, op, true, c);
}
EXPORT int ncclReduce(const void *from, void *to, size_t n, int type, int op, int root, comm *c, void *stream) {
  return reduced(from, to, n, 0, n, type, op, c->rank == root, c);
}
EXPORT int ncclReduceScatter(const void *from, void *to, size_t n, int type, int op, comm *c, void *stream) {
  return reduced(from, to, n * c->size, c->rank * n, n, type, op, true, c);
}
