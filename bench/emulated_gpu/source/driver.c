/* libcuda.so.1, second half: the driver's interface, as far as torch calls it; the rest are generated stubs. */
#include "device.h"
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE       ((size_t)2 << 20)
#define DRIVER     EXPORT CUresult CUDAAPI
#define ANY_HANDLE ((void *)1) /* of a context: nobody looks inside */

DRIVER cuInit(unsigned flags) { return CUDA_SUCCESS; }

DRIVER cuDriverGetVersion(int *version) {
  *version = 13000;
  return CUDA_SUCCESS;
}

DRIVER cuDeviceGet(CUdevice *device, int ordinal) {
  *device = ordinal;
  return ordinal < emu_count() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

DRIVER cuDeviceGetCount(int *n) {
  *n = emu_count();
  return CUDA_SUCCESS;
}

DRIVER cuDeviceGetName(char *name, int length, CUdevice device) {
  snprintf(name, length, "%s", emu_card()->name);
  return CUDA_SUCCESS;
}

DRIVER cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  switch ((int)attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = emu_card()->major; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = emu_card()->minor; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = emu_card()->multiprocessors; break;
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: *value = 1; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = emu_card()->shared_optin; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 65536; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: *value = 1400000; break; /* kHz; nothing is timed */
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: *value = 1400000; break;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: *value = 384; break;
    default: *value = 0;
  }
  return CUDA_SUCCESS;
}

DRIVER cuCtxGetCurrent(CUcontext *context) {
  *context = ANY_HANDLE;
  return CUDA_SUCCESS;
}

DRIVER cuCtxGetDevice(CUdevice *device) {
  *device = emu_current_device();
  return CUDA_SUCCESS;
}

DRIVER cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}

DRIVER cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  *context = ANY_HANDLE;
  return CUDA_SUCCESS;
}

DRIVER cuGetErrorString(CUresult error, const char **text) {
  *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "error of the emulated device";
  return CUDA_SUCCESS;
}

DRIVER cuGetErrorName(CUresult error, const char **text) { return cuGetErrorString(error, text); }

DRIVER cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr p) {
  if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
    *(CUdeviceptr *)data = p;
  else
    memset(data, 0, sizeof(int));
  return CUDA_SUCCESS;
}

/* Expandable segments: addresses are reserved first, physical pages mapped to them later. */

typedef struct {
  size_t size;
  int device;
} physical;

DRIVER cuMemGetAllocationGranularity(size_t *size, const CUmemAllocationProp *prop,
                                     CUmemAllocationGranularity_flags option) {
  *size = PAGE;
  return CUDA_SUCCESS;
}

DRIVER cuMemAddressReserve(CUdeviceptr *out, size_t size, size_t alignment, CUdeviceptr address,
                           unsigned long long flags) {
  return emu_reserve_address(emu_current_device(), size, (void **)out);
}

DRIVER cuMemAddressFree(CUdeviceptr p, size_t size) {
  emu_free_address((void *)p);
  return CUDA_SUCCESS;
}

DRIVER cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,
                   unsigned long long flags) {
  int device = prop->location.id;
  if (!emu_take(device, size)) return CUDA_ERROR_OUT_OF_MEMORY;
  physical *made = malloc(sizeof *made);
  *made = (physical){size, device};
  *handle = (CUmemGenericAllocationHandle)(uintptr_t)made;
  return CUDA_SUCCESS;
}

DRIVER cuMemRelease(CUmemGenericAllocationHandle handle) {
  physical *gone = (physical *)(uintptr_t)handle;
  emu_give_back(gone->device, gone->size);
  free(gone);
  return CUDA_SUCCESS;
}

DRIVER cuMemMap(CUdeviceptr p, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                unsigned long long flags) {
  return CUDA_SUCCESS;
}

DRIVER cuMemSetAccess(CUdeviceptr p, size_t size, const CUmemAccessDesc *desc, size_t n) { return CUDA_SUCCESS; }

DRIVER cuMemUnmap(CUdeviceptr p, size_t size) {
  madvise((void *)p, size, MADV_DONTNEED);
  return CUDA_SUCCESS;
}
