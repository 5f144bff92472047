/* libcuda.so.1, third part: kernels that are compiled at run time, by Triton or NVRTC. They are loaded by name and their
 * launches counted, see emu_launched; none runs. */
#include "device.h"
#include <cuda.h>
#include <stdlib.h>
#include <string.h>

#define DRIVER     EXPORT CUresult CUDAAPI
#define ANY_HANDLE ((void *)1) /* of a module: nobody looks inside */

DRIVER cuModuleLoadData(CUmodule *module, const void *image) {
  *module = ANY_HANDLE;
  return CUDA_SUCCESS;
}
DRIVER cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned n, CUjit_option *options, void **values) {
  return cuModuleLoadData(module, image);
}
DRIVER cuModuleLoad(CUmodule *module, const char *path) { return cuModuleLoadData(module, path); }
DRIVER cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }

/* A function is its name, kept for the life of the process. */
DRIVER cuModuleGetFunction(CUfunction *f, CUmodule module, const char *name) {
  *f = (CUfunction)strdup(name);
  return CUDA_SUCCESS;
}

DRIVER cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction f) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
           : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS            ? 32
                                                                : 0;
  return CUDA_SUCCESS;
}
DRIVER cuFuncSetAttribute(CUfunction f, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
DRIVER cuFuncSetCacheConfig(CUfunction f, CUfunc_cache config) { return CUDA_SUCCESS; }

DRIVER cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, CUfunction f, int block, size_t shared) {
  *n = 2;
  return CUDA_SUCCESS;
}
DRIVER cuOccupancyMaxActiveClusters(int *n, CUfunction f, const CUlaunchConfig *config) {
  *n = 1;
  return CUDA_SUCCESS;
}

static CUresult launched(CUfunction f) {
  emu_launched("compiled:", (const char *)f);
  return CUDA_SUCCESS;
}
DRIVER cuLaunchKernel(CUfunction f, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned x, unsigned y, unsigned z,
                      unsigned shared, CUstream stream, void **parameters, void **extra) {
  return launched(f);
}
DRIVER cuLaunchCooperativeKernel(CUfunction f, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned x, unsigned y,
                                 unsigned z, unsigned shared, CUstream stream, void **parameters) {
  return launched(f);
}
DRIVER cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **parameters, void **extra) {
  return launched(f);
}

DRIVER cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                              const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                              const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                              CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  return CUDA_SUCCESS;
}

DRIVER cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
DRIVER cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
DRIVER cuCtxGetLimit(size_t *value, CUlimit limit) {
  *value = (size_t)1 << 20;
  return CUDA_SUCCESS;
}
