/* libcuda.so.1, first half: the emulated device. Its memory is address space, which costs nothing until something is
 * written to it. What is counted is what a driver counts: pages of 2 MiB that some process holds. Written for
 * torch 2.13 (CUDA 13.0), whose allocator asks for memory here as it would on a card. */
#define _GNU_SOURCE
#include "device.h"
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define MIB           ((size_t)1 << 20)
#define PAGE          (2 * MIB)         /* physical memory comes in pages of 2 MiB */
#define ARENA         ((size_t)4 << 40) /* address space of a device; its upper half is for expandable segments */
#define MOST_DEVICES  8
#define FIRST_ADDRESS ((void *)0x100000000000ul)

static const emulated_card CARDS[] = {
#include "cards.inc" /* written by bench/emulated_gpu/libraries.py */
};
#define NUM_CARDS (sizeof CARDS / sizeof *CARDS)

/* Taken by allocations and frees of threads; never held while another lock is. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const emulated_card *card;
static char *arena;
static size_t total, context_bytes, most_copied, used[MOST_DEVICES];
static int count = 1, trace;
static __thread int current;

typedef struct block {
  char *start;
  size_t size;
  struct block *next;
} block;
static block *blocks[MOST_DEVICES], *ranges[MOST_DEVICES]; /* sorted by address: memory, and reserved addresses */
static block *host_blocks;

/* Settings. */

const char *emu_setting(const char *name) {
  char full[64];
  snprintf(full, sizeof full, "EMULATED_GPU_%s", name);
  const char *text = getenv(full);
  return text && *text ? text : NULL;
}

size_t emu_size_setting(const char *name, size_t otherwise) {
  const char *text = emu_setting(name);
  if (!text) return otherwise;
  char *end;
  double value = strtod(text, &end);
  if (*end == 'G') value *= 1ul << 30;
  if (*end == 'M') value *= 1ul << 20;
  return (size_t)value;
}

static void refuse(const char *what, const char *given) {
  fprintf(stderr, "error: emulated GPU: %s%s\n", what, given);
  exit(2);
}

static const emulated_card *chosen_card(void) {
  const char *asked = emu_setting("CARD");
  if (!asked) asked = "a100-80g";
  for (size_t i = 0; i < NUM_CARDS; i++)
    if (!strcmp(asked, CARDS[i].key)) return &CARDS[i];
  refuse("no such card: ", asked);
  return NULL;
}

__attribute__((constructor)) static void start(void) {
  card = chosen_card();
  total = emu_size_setting("MEM", card->memory);
  context_bytes = emu_size_setting("CONTEXT", 500 * MIB);
  most_copied = emu_size_setting("COPY", 64 << 10);
  count = (int)emu_size_setting("COUNT", 1);
  trace = (int)emu_size_setting("TRACE", 0);
  if (count < 0 || count > MOST_DEVICES)
    refuse("0 to 8 cards can be had, EMULATED_GPU_COUNT is ", emu_setting("COUNT"));
  if (total <= context_bytes) refuse("EMULATED_GPU_MEM is less than the context: ", emu_setting("MEM"));
  if (count == 0) return;
  arena = mmap(FIRST_ADDRESS, ARENA * count, PROT_READ | PROT_WRITE,
               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
  if (arena == MAP_FAILED) refuse("no address space for its memory (is `ulimit -v` set?)", "");
  madvise(arena, ARENA * count, MADV_NOHUGEPAGE);
  madvise(arena, ARENA * count, MADV_DONTDUMP);
}

const emulated_card *emu_card(void) { return card; }
int emu_count(void) { return count; }
size_t emu_total(void) { return total; }
size_t emu_free_bytes(int device) { return total - context_bytes - used[device]; }
int emu_current_device(void) { return current; }
void emu_set_device(int device) { current = device; }

/* What is said with EMULATED_GPU_TRACE=1 (each stub once) or 2 (each call). */

void emu_log(const char *format, ...) {
  if (!trace) return;
  va_list args;
  va_start(args, format);
  vfprintf(stderr, format, args);
  va_end(args);
}

/* Launches, by name, if EMULATED_GPU_KERNELS names a file. */
typedef struct {
  const char *kind, *name;
  unsigned long launches;
} counter;
static counter *counters;
static size_t num_counters, room;
static pthread_mutex_t counting = PTHREAD_MUTEX_INITIALIZER;

bool emu_counts(void) {
  static int answer = -1;
  if (answer < 0) answer = emu_setting("KERNELS") != NULL;
  return answer;
}

void emu_launched(const char *kind, const char *name) {
  if (!emu_counts()) return;
  pthread_mutex_lock(&counting);
  size_t i = 0;
  while (i < num_counters && (strcmp(counters[i].name, name) || strcmp(counters[i].kind, kind))) i++;
  if (i == num_counters) {
    if (num_counters == room) counters = realloc(counters, (room = room ? 2 * room : 256) * sizeof *counters);
    counters[num_counters++] = (counter){kind, strdup(name), 0};
  }
  counters[i].launches++;
  pthread_mutex_unlock(&counting);
}

/* Writes what was launched since the last call, a line a name. */
void emulated_gpu_kernels(const char *path) {
  FILE *file = fopen(path, "w");
  pthread_mutex_lock(&counting);
  for (size_t i = 0; i < num_counters; i++) {
    if (file && counters[i].launches) fprintf(file, "%lu %s%s\n", counters[i].launches, counters[i].kind, counters[i].name);
    counters[i].launches = 0;
  }
  pthread_mutex_unlock(&counting);
  if (file) fclose(file);
}

__attribute__((destructor)) static void tell(void) {
  if (emu_counts()) emulated_gpu_kernels(emu_setting("KERNELS"));
}

/* Of the generated stubs, these launch. */
static bool is_launch(const char *name) {
  if (!strcmp(name, "cudnnBackendExecute")) return true;
  return !strncmp(name, "cublas", 6) && (strstr(name, "emm") || strstr(name, "emv") || strstr(name, "Matmul")) &&
         !strstr(name, "Create") && !strstr(name, "Destroy") && !strstr(name, "Set") && !strstr(name, "Get");
}

void emu_stub(const char *name) {
  if (emu_counts() && is_launch(name)) emu_launched("library:", name);
  static const char *seen[2048];
  if (!trace) return;
  unsigned i = (unsigned)((uintptr_t)name * 2654435761u) % 2048;
  if (seen[i] == name && trace < 2) return;
  seen[i] = name;
  fprintf(stderr, "emulated_gpu: stub %s\n", name);
}

/* Device memory. */

bool emu_is_device(const void *p, int *device) {
  size_t offset = (const char *)p - arena;
  if ((const char *)p < arena || offset >= ARENA * count) return false;
  if (device) *device = (int)(offset / ARENA);
  return true;
}

static bool take(int device, size_t size) {
  if (used[device] + size > total - context_bytes) return false;
  used[device] += size;
  return true;
}

bool emu_take(int device, size_t size) {
  pthread_mutex_lock(&lock);
  bool taken = take(device, size);
  pthread_mutex_unlock(&lock);
  return taken;
}

void emu_give_back(int device, size_t size) {
  pthread_mutex_lock(&lock);
  used[device] -= size;
  pthread_mutex_unlock(&lock);
}

/* A block in the first gap of the sorted list that is large enough; the list begins at `start`. */
static block *place(block **list, char *start, size_t size) {
  while (*list && (size_t)((*list)->start - start) < size) {
    start = (*list)->start + (*list)->size;
    list = &(*list)->next;
  }
  block *made = malloc(sizeof *made);
  *made = (block){start, size, *list};
  return *list = made;
}

/* Take the block that begins at `p` out of the list; its size, or 0 if there is none. */
static size_t unlink_block(block **list, const void *p) {
  for (; *list; list = &(*list)->next)
    if ((*list)->start == p) {
      block *gone = *list;
      size_t size = gone->size;
      *list = gone->next;
      free(gone);
      return size;
    }
  return 0;
}

int emu_malloc(int device, size_t size, void **out) {
  size = (size + PAGE - 1) / PAGE * PAGE;
  pthread_mutex_lock(&lock);
  bool taken = take(device, size);
  if (taken) *out = place(&blocks[device], arena + ARENA * device, size)->start;
  size_t now = used[device];
  pthread_mutex_unlock(&lock);
  emu_log("emulated_gpu: malloc %zu %s, used %zu\n", size, taken ? "done" : "refused", now);
  return taken ? 0 : 2;
}

int emu_free(void *p) {
  int device;
  if (!p) return 0;
  if (!emu_is_device(p, &device)) return 1;
  pthread_mutex_lock(&lock);
  size_t size = unlink_block(&blocks[device], p);
  used[device] -= size;
  if (size) madvise(p, size, MADV_DONTNEED);
  size_t now = used[device];
  pthread_mutex_unlock(&lock);
  emu_log("emulated_gpu: free %zu, used %zu\n", size, now);
  return size ? 0 : 1;
}

int emu_reserve_address(int device, size_t size, void **out) {
  char *start = arena + ARENA * device + ARENA / 2;
  pthread_mutex_lock(&lock);
  char *p = place(&ranges[device], start, (size + PAGE - 1) / PAGE * PAGE)->start;
  bool fits = p + size <= start + ARENA / 2;
  if (!fits) unlink_block(&ranges[device], p);
  pthread_mutex_unlock(&lock);
  *out = p;
  return fits ? 0 : 2;
}

void emu_free_address(void *p) {
  int device;
  if (!emu_is_device(p, &device)) return;
  pthread_mutex_lock(&lock);
  unlink_block(&ranges[device], p);
  pthread_mutex_unlock(&lock);
}

/* Pinned memory of the host. */

static void host_add(void *p, size_t size) {
  block *made = malloc(sizeof *made);
  pthread_mutex_lock(&lock);
  *made = (block){p, size, host_blocks};
  host_blocks = made;
  pthread_mutex_unlock(&lock);
}

static size_t host_remove(void *p) {
  pthread_mutex_lock(&lock);
  size_t size = unlink_block(&host_blocks, p);
  pthread_mutex_unlock(&lock);
  return size;
}

bool emu_is_host(const void *p) {
  bool found = false;
  pthread_mutex_lock(&lock);
  for (block *at = host_blocks; at && !found; at = at->next)
    found = (const char *)p >= at->start && (const char *)p < at->start + at->size;
  pthread_mutex_unlock(&lock);
  return found;
}

int emu_host_alloc(size_t size, void **out) {
  size = (size + 4095) / 4096 * 4096;
  void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return 2;
  host_add(p, size);
  *out = p;
  return 0;
}

int emu_host_free(void *p) {
  size_t size = p ? host_remove(p) : 0;
  if (size) munmap(p, size);
  return 0;
}

void emu_host_register(void *p, size_t size) { host_add(p, size); }
void emu_host_unregister(void *p) { host_remove(p); }

/* Values. What a kernel would compute, nobody knows: device memory reads as zero, but for what small copies put there.
 * Without `emu_forget` a result would be what an earlier tenant of its block had been given, and a finite check might
 * skip a step: tracker.cpp tells of each block that torch's allocator hands out. */
#define MOST_WRITTEN 4096
static struct {
  char *start;
  size_t size;
} written[MOST_WRITTEN];
static int num_written;
static pthread_mutex_t values = PTHREAD_MUTEX_INITIALIZER;

size_t emu_most_copied(void) { return most_copied; }

static void erase(int i) {
  memset(written[i].start, 0, written[i].size);
  written[i] = written[--num_written];
}

void emu_forget(void *p, size_t size) {
  pthread_mutex_lock(&values);
  for (int i = num_written - 1; i >= 0; i--)
    if (written[i].start >= (char *)p && written[i].start < (char *)p + size) erase(i);
  pthread_mutex_unlock(&values);
}

static void will_write(void *to, size_t size) {
  if (!emu_is_device(to, NULL)) return;
  pthread_mutex_lock(&values);
  for (int i = num_written - 1; i >= 0; i--)
    if (written[i].start == to) {
      if (written[i].size > size) size = written[i].size;
      written[i] = written[--num_written];
    }
  if (num_written == MOST_WRITTEN) erase(0);
  written[num_written].start = to;
  written[num_written++].size = size;
  pthread_mutex_unlock(&values);
}

void emu_copy(void *to, const void *from, size_t size) {
  if (!size || size > most_copied) return;
  will_write(to, size);
  memmove(to, from, size);
}

void emu_set(void *to, int value, size_t size) {
  if (!size || size > most_copied) return;
  if (value) will_write(to, size);
  memset(to, value, size);
}
