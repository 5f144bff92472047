/* The emulated device: state that lives in libcuda.so.1 and that the other libraries use. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

/* A row of bench/emulated_gpu/cards.py; sizes in bytes. */
typedef struct {
  const char *key, *name;
  int major, minor, multiprocessors;
  size_t memory;
  int shared, shared_optin, l2, threads, blocks; /* of a multiprocessor, but for the level 2 cache */
} emulated_card;

/* Settings: EMULATED_GPU_<name> of the environment. A size may end in M or G. */
EXPORT const char *emu_setting(const char *name);
EXPORT size_t emu_size_setting(const char *name, size_t otherwise);

EXPORT const emulated_card *emu_card(void);
EXPORT int emu_count(void);
EXPORT size_t emu_total(void);
EXPORT size_t emu_free_bytes(int device);
EXPORT int emu_current_device(void);
EXPORT void emu_set_device(int device);

/* Memory. 0, or CUDA's error for a full card (2) or a wrong pointer (1); the two APIs number them alike. */
EXPORT int emu_malloc(int device, size_t size, void **out);
EXPORT int emu_free(void *p);
EXPORT bool emu_take(int device, size_t size); /* physical memory without an address; false: the card is full */
EXPORT void emu_give_back(int device, size_t size);
EXPORT int emu_reserve_address(int device, size_t size, void **out);
EXPORT void emu_free_address(void *p);
EXPORT bool emu_is_device(const void *p, int *device);
EXPORT bool emu_is_host(const void *p); /* pinned */
EXPORT int emu_host_alloc(size_t size, void **out);
EXPORT int emu_host_free(void *p);
EXPORT void emu_host_register(void *p, size_t size);
EXPORT void emu_host_unregister(void *p);

/* Values: small copies are done, everything else of device memory reads as zero. */
EXPORT size_t emu_most_copied(void);
EXPORT void emu_copy(void *to, const void *from, size_t size);
EXPORT void emu_set(void *to, int value, size_t size);
EXPORT void emu_forget(void *p, size_t size); /* a fresh block begins there: it reads as zero */

/* Launches of kernels, and waits of the host, counted by kind and name if EMULATED_GPU_KERNELS names a file, which is
 * written at the end; or when a program calls emulated_gpu_kernels, which then begins to count anew. */
EXPORT bool emu_counts(void);
EXPORT void emu_launched(const char *kind, const char *name);
EXPORT void emulated_gpu_kernels(const char *path);

EXPORT void emu_stub(const char *name); /* says that a generated stub was called, if EMULATED_GPU_TRACE is set */
EXPORT void emu_log(const char *format, ...);
