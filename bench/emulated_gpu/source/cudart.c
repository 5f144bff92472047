/* libcudart.so.13 for the emulated device of device.c. */
#define _GNU_SOURCE
#include "device.h"
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define API EXPORT cudaError_t

/* Events are done at once, or with EMULATED_GPU_EVENTS=lazy only when the host waits for something. */
static uint64_t recorded, completed;
static void wait_for_all(const char *caller) {
  emu_launched("wait:", caller);
  completed = recorded;
}
static bool is_done(uint64_t number) {
  static int lazy = -1;
  if (lazy < 0) lazy = emu_setting("EVENTS") && !strcmp(emu_setting("EVENTS"), "lazy");
  return !lazy || number <= completed;
}

/* The newest architecture of the wheel (torch.cuda.get_arch_list) that the card can run. */
static int binary_version(void) {
  static const int archs[] = {120, 100, 90, 86, 80, 75};
  int own = 10 * emu_card()->major + emu_card()->minor;
  for (size_t i = 0; i < sizeof archs / sizeof *archs; i++)
    if (archs[i] <= own && archs[i] / 10 == emu_card()->major) return archs[i];
  return own;
}

static __thread cudaError_t last;
static cudaError_t failed(cudaError_t error) {
  if (error) last = error;
  return error;
}

API cudaGetLastError(void) {
  cudaError_t error = last;
  last = cudaSuccess;
  return error;
}
API cudaPeekAtLastError(void) { return last; }
EXPORT const char *cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess                 ? "no error"
         : error == cudaErrorMemoryAllocation ? "out of memory"
         : error == cudaErrorNotReady         ? "device not ready"
                                              : "emulated device error";
}
EXPORT const char *cudaGetErrorName(cudaError_t error) {
  return error == cudaSuccess                 ? "cudaSuccess"
         : error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation"
                                              : "cudaErrorUnknown";
}

/* Devices. */
API cudaGetDeviceCount(int *n) {
  *n = emu_count();
  return *n == 0 ? failed(cudaErrorNoDevice) : 0;
}
API cudaGetDevice(int *device) {
  *device = emu_current_device();
  return 0;
}
API cudaSetDevice(int device) {
  if (device < 0 || device >= emu_count()) return failed(cudaErrorInvalidDevice);
  emu_set_device(device);
  return 0;
}
API cudaDriverGetVersion(int *version) {
  *version = 13000;
  return 0;
}
API cudaRuntimeGetVersion(int *version) {
  *version = 13000;
  return 0;
}
API cudaDeviceSynchronize(void) {
  wait_for_all(__func__);
  return 0;
}
API cudaDeviceCanAccessPeer(int *can, int a, int b) {
  *can = a != b;
  return 0;
}
API cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  return 0;
}
API cudaDeviceGetPCIBusId(char *id, int length, int device) {
  snprintf(id, length, "0000:%02X:00.0", device + 1);
  return 0;
}
API cudaMemGetInfo(size_t *free_bytes, size_t *total) {
  *free_bytes = emu_free_bytes(emu_current_device());
  *total = emu_total();
  return 0;
}
API cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
  const emulated_card *card = emu_card();
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "%s", card->name);
  p->uuid.bytes[0] = (char)(device + 1);
  p->totalGlobalMem = emu_total();
  p->sharedMemPerBlock = 49152;
  p->regsPerBlock = 65536;
  p->warpSize = 32;
  p->memPitch = 2147483647;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536;
  p->major = card->major;
  p->minor = card->minor;
  p->textureAlignment = 512;
  p->texturePitchAlignment = 32;
  p->multiProcessorCount = card->multiprocessors;
  p->canMapHostMemory = p->concurrentKernels = p->unifiedAddressing = p->streamPrioritiesSupported = 1;
  p->pciBusID = device + 1;
  p->asyncEngineCount = 3;
  p->memoryBusWidth = 384;
  p->l2CacheSize = card->l2;
  p->maxThreadsPerMultiProcessor = card->threads;
  p->globalL1CacheSupported = p->localL1CacheSupported = p->managedMemory = p->cooperativeLaunch = 1;
  p->sharedMemPerMultiprocessor = card->shared;
  p->regsPerMultiprocessor = 65536;
  p->sharedMemPerBlockOptin = card->shared_optin;
  p->maxBlocksPerMultiProcessor = card->blocks;
  p->reservedSharedMemPerBlock = 1024;
  p->hostRegisterSupported = p->memoryPoolsSupported = 1;
  p->clusterLaunch = card->major >= 9;
  return 0;
}
API cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  const emulated_card *card = emu_card();
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = card->major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = card->minor; break;
    case cudaDevAttrMultiProcessorCount: *value = card->multiprocessors; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxBlockDimX: *value = 1024; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = card->shared_optin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = card->shared; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = card->threads; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = card->blocks; break;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
    case cudaDevAttrL2CacheSize: *value = card->l2; break;
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrMemoryPoolsSupported:
    case cudaDevAttrConcurrentKernels: *value = 1; break;
    default: *value = 0; emu_log("emulated_gpu: attribute %d\n", (int)attribute);
  }
  return 0;
}

/* Memory. */
API cudaMalloc(void **p, size_t size) { return failed(emu_malloc(emu_current_device(), size, p)); }
API cudaFree(void *p) {
  wait_for_all(__func__);
  return failed(emu_free(p));
}
API cudaMallocAsync(void **p, size_t size, cudaStream_t stream) { return cudaMalloc(p, size); }
API cudaFreeAsync(void *p, cudaStream_t stream) { return cudaFree(p); }
API cudaHostAlloc(void **p, size_t size, unsigned flags) { return failed(emu_host_alloc(size, p)); }
API cudaFreeHost(void *p) { return emu_host_free(p); }
API cudaHostRegister(void *p, size_t size, unsigned flags) {
  emu_host_register(p, size);
  return 0;
}
API cudaHostUnregister(void *p) {
  emu_host_unregister(p);
  return 0;
}
API cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
  int device = 0;
  memset(a, 0, sizeof *a);
  a->type = emu_is_device(p, &device) ? cudaMemoryTypeDevice
            : emu_is_host(p)          ? cudaMemoryTypeHost
                                      : cudaMemoryTypeUnregistered;
  a->device = device;
  if (a->type == cudaMemoryTypeDevice) a->devicePointer = (void *)p;
  if (a->type != cudaMemoryTypeDevice) a->hostPointer = (void *)p;
  return 0;
}
API cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
  wait_for_all(__func__);
  emu_copy(to, from, size);
  return 0;
}
API cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
  emu_launched("library:", "cudaMemcpyAsync");
  emu_copy(to, from, size);
  return 0;
}
API cudaMemcpyPeerAsync(void *to, int a, const void *from, int b, size_t size, cudaStream_t stream) {
  emu_copy(to, from, size);
  return 0;
}
API cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                      enum cudaMemcpyKind kind, cudaStream_t stream) {
  if (width * height <= 65536)
    for (size_t i = 0; i < height; i++) emu_copy((char *)to + i * to_pitch, (const char *)from + i * from_pitch, width);
  return 0;
}
API cudaMemset(void *p, int value, size_t size) {
  emu_set(p, value, size);
  return 0;
}
API cudaMemsetAsync(void *p, int value, size_t size, cudaStream_t stream) {
  emu_launched("library:", "cudaMemsetAsync");
  emu_set(p, value, size);
  return 0;
}
static char symbol[1 << 16];
API cudaGetSymbolAddress(void **p, const void *s) {
  *p = symbol;
  return 0;
}

/* Streams and events. */
API cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
  *stream = calloc(1, 64);
  return 0;
}
API cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
API cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, 0, 0);
}
API cudaStreamDestroy(cudaStream_t stream) { return 0; }
API cudaStreamQuery(cudaStream_t stream) { return 0; }
API cudaStreamSynchronize(cudaStream_t stream) {
  wait_for_all(__func__);
  return 0;
}
API cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) { return 0; }
API cudaStreamGetPriority(cudaStream_t stream, int *priority) {
  *priority = 0;
  return 0;
}
API cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  *status = cudaStreamCaptureStatusNone;
  return 0;
}
API cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                             cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                             size_t *n) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  return 0;
}
API cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return 0; }
API cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
  *event = calloc(1, sizeof(uint64_t));
  return 0;
}
API cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
API cudaEventDestroy(cudaEvent_t event) {
  free(event);
  return 0;
}
API cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  *(uint64_t *)event = __atomic_add_fetch(&recorded, 1, __ATOMIC_SEQ_CST);
  return 0;
}
API cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  return cudaEventRecord(event, stream);
}
API cudaEventQuery(cudaEvent_t event) { return is_done(*(uint64_t *)event) ? 0 : failed(cudaErrorNotReady); }
API cudaEventSynchronize(cudaEvent_t event) {
  wait_for_all(__func__);
  return 0;
}
API cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) {
  *ms = 1.0f;
  return 0;
}
API cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
  function(data);
  return 0;
}
API cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void *data, unsigned flags) {
  function(stream, 0, data);
  return 0;
}

/* Kernels: known by name, counted by emu_launched, never run. */
typedef struct {
  const void *function;
  const char *name;
} kernel;
static kernel *kernels;
static size_t num_kernels, room;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int sorted;

static int by_address(const void *a, const void *b) {
  const char *x = ((const kernel *)a)->function, *y = ((const kernel *)b)->function;
  return (x > y) - (x < y);
}
static void launched(const void *function) {
  if (!emu_counts()) return;
  pthread_mutex_lock(&lock);
  if (!sorted) {
    qsort(kernels, num_kernels, sizeof *kernels, by_address);
    sorted = 1;
  }
  kernel key = {function, NULL};
  kernel *found = bsearch(&key, kernels, num_kernels, sizeof *kernels, by_address);
  pthread_mutex_unlock(&lock);
  if (found) emu_launched("", found->name);
}
EXPORT void **__cudaRegisterFatBinary(void *cubin) {
  static void *handle[1];
  return handle;
}
EXPORT void __cudaRegisterFatBinaryEnd(void **handle) {}
EXPORT void __cudaUnregisterFatBinary(void **handle) {}
EXPORT char __cudaInitModule(void **handle) { return 1; }
EXPORT void __cudaRegisterVar(void **h, char *v, char *a, const char *n, int e, size_t s, int c, int g) {}
EXPORT void __cudaRegisterFunction(void **handle, const char *function, char *device, const char *name, int limit,
                                   void *tid, void *bid, void *bdim, void *gdim, int *wsize) {
  pthread_mutex_lock(&lock);
  if (num_kernels == room) kernels = realloc(kernels, (room = room ? 2 * room : 4096) * sizeof *kernels);
  kernels[num_kernels++] = (kernel){function, name};
  sorted = 0;
  pthread_mutex_unlock(&lock);
}
static __thread struct {
  dim3 grid, block;
  size_t shared;
  void *stream;
} call;
EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
  call.grid = grid;
  call.block = block;
  call.shared = shared;
  call.stream = stream;
  return 0;
}
API __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  *grid = call.grid;
  *block = call.block;
  *shared = call.shared;
  *(void **)stream = call.stream;
  return 0;
}
API __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
  *kernel = (cudaKernel_t)function;
  return 0;
}
API __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream) {
  launched(kernel);
  return 0;
}
API cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream) {
  launched(function);
  return 0;
}
API cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **args, size_t shared,
                                cudaStream_t stream) {
  launched(function);
  return 0;
}
API cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **args) {
  launched(function);
  return 0;
}
API cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *function) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 32;
  a->ptxVersion = a->binaryVersion = binary_version();
  a->maxDynamicSharedSizeBytes = 49152;
  return 0;
}
API cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *function, int block, size_t shared) {
  const emulated_card *card = emu_card();
  int most = card->threads / (block > 0 ? block : 1);
  if (most > card->blocks) most = card->blocks;
  if (shared && (size_t)most > card->shared / (shared + 1024)) most = card->shared / (shared + 1024);
  *n = most;
  return 0;
}
API cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *function, int block, size_t shared,
                                                           unsigned flags) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(n, function, block, shared);
}

API cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags,
                                     enum cudaDriverEntryPointQueryResult *status) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (!*function) {
    static void *driver;
    if (!driver) driver = dlopen("libcuda.so.1", RTLD_NOW);
    *function = dlsym(driver, name);
  }
  if (status) *status = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  if (!*function) emu_log("emulated_gpu: no driver entry point %s\n", name);
  return 0;
}
