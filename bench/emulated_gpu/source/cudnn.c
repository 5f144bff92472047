/* libcudnn.so.9: the graph interface (backend descriptors), as far as cudnn-frontend asks while torch builds and
 * executes attention. Descriptors are opaque to it: of what it sets, the shapes of tensors are kept, and what it gets is
 * answered below. There is one engine, which supports everything, so that what torch refuses is refused by torch's own
 * rules only.
 *
 * Workspace. What the frontend itself asks for (sums of the softmax, fp32 gradients of the queries) is added up by the
 * frontend, in torch. The engine of an H200 under cuDNN 9.19 asked for 16 bytes on top, which are the default of
 * EMULATED_GPU_CUDNN_WORKSPACE, and in the backward of grouped keys and values for their gradients in full heads: in the
 * graph they are the tensors that are summed over heads. */
#include "device.h"
#include <stdlib.h>
#include <string.h>

/* Of cudnnBackendAttributeName_t, in cudnn_graph.h. */
enum {
  ENGINEHEUR_RESULTS = 202,
  ENGINECFG_ENGINE = 300,
  ENGINECFG_WORKSPACE_SIZE = 303,
  ENGINECFG_SHARED_MEMORY_USED = 304,
  EXECUTION_PLAN_WORKSPACE_SIZE = 402,
  OPERATIONGRAPH_ENGINE_GLOBAL_COUNT = 802,
  TENSOR_DIMENSIONS = 902,
  ENGINE_GLOBAL_INDEX = 1301,
  OPERATION_REDUCTION_XDESC = 1610,
  OPERATION_REDUCTION_YDESC = 1611,
};

/* A tensor has dimensions: samples, heads, rows, size; a sum has tensors. */
struct descriptor {
  int64_t dimensions[4];
  struct descriptor *summed, *sum;
};

static _Thread_local int64_t full_heads; /* bytes of the graph that is being built */
static _Thread_local int is_built;

/* 9.20.0, as the wheel requires; built for CUDA 13.0. */
EXPORT size_t cudnnGetVersion(void) { return 92000; }
EXPORT size_t cudnnGetCudartVersion(void) { return 13000; }
EXPORT const char *cudnnGetErrorString(int status) { return "error of the emulated cuDNN"; }
EXPORT void cudnnGetLastErrorString(char *message, size_t size) {
  if (size) *message = 0;
}

EXPORT int cudnnCreate(void **handle) {
  *handle = calloc(1, 64);
  return 0;
}

EXPORT int cudnnDestroy(void *handle) {
  free(handle);
  return 0;
}

EXPORT int cudnnBackendCreateDescriptor(int type, void **descriptor) {
  *descriptor = calloc(1, sizeof(struct descriptor));
  return 0;
}

EXPORT int cudnnBackendDestroyDescriptor(void *descriptor) {
  free(descriptor);
  return 0;
}

EXPORT int cudnnBackendSetAttribute(void *pointer, int name, int type, int64_t num, const void *values) {
  struct descriptor *descriptor = pointer;
  if (name == TENSOR_DIMENSIONS && num == 4) {
    if (is_built) full_heads = is_built = 0; /* the first tensor of another graph */
    memcpy(descriptor->dimensions, values, sizeof descriptor->dimensions);
  }
  if (name != OPERATION_REDUCTION_XDESC && name != OPERATION_REDUCTION_YDESC) return 0;
  *(name == OPERATION_REDUCTION_XDESC ? &descriptor->summed : &descriptor->sum) = *(struct descriptor *const *)values;
  if (descriptor->summed && descriptor->sum) {
    const int64_t *from = descriptor->summed->dimensions, *to = descriptor->sum->dimensions;
    if (to[1] < from[1] && to[3] == from[3]) full_heads += 2 * from[0] * from[1] * from[2] * from[3]; /* of 16 bits */
  }
  return 0;
}

/* `values` may be NULL: then only their number is asked for. Descriptors that are asked for exist already. */
EXPORT int cudnnBackendGetAttribute(void *descriptor, int name, int type, int64_t asked, int64_t *num, void *values) {
  int64_t answered = 0;
  switch (name) {
    case ENGINEHEUR_RESULTS:
    case ENGINECFG_ENGINE: answered = 1; break;
    case EXECUTION_PLAN_WORKSPACE_SIZE:
    case ENGINECFG_WORKSPACE_SIZE:
      answered = 1;
      is_built = 1;
      if (values) *(int64_t *)values = (int64_t)emu_size_setting("CUDNN_WORKSPACE", 16) + full_heads;
      break;
    case OPERATIONGRAPH_ENGINE_GLOBAL_COUNT:
      answered = 1;
      if (values) *(int64_t *)values = 1;
      break;
    case ENGINE_GLOBAL_INDEX:
      answered = 1;
      if (values) *(int64_t *)values = 0;
      break;
    case ENGINECFG_SHARED_MEMORY_USED:
      answered = 1;
      if (values) *(int32_t *)values = 0;
      break;
    default: emu_log("emulated_gpu: cudnn attribute %d asked for\n", name);
  }
  if (num) *num = answered;
  return 0;
}

/* Batch normalisation of fp32 has an interface of its own. What it needs beyond its results is closed: 0. */

static int none(size_t *size) {
  *size = 0;
  return 0;
}

EXPORT int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *handle, int mode, int operations, void *x,
                                                                    void *z, void *y, void *scale, void *activation,
                                                                    size_t *size) {
  return none(size);
}

EXPORT int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *handle, int mode, int operations, void *x, void *y,
                                                             void *dy, void *dz, void *dx, void *scale,
                                                             void *activation, size_t *size) {
  return none(size);
}

EXPORT int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *handle, int mode, int operations,
                                                                void *activation, void *x, size_t *size) {
  return none(size);
}
