/* What the math and communication libraries must answer; everything else of them is a generated stub that returns 0. */
#include "device.h"
#include <stdlib.h>
#include <string.h>

#ifdef LIB_cublas
EXPORT int cublasCreate_v2(void **handle) {
  *handle = calloc(1, 64);
  return 0;
}
EXPORT int cublasGetMathMode(void *handle, int *mode) {
  *mode = 0;
  return 0;
}
EXPORT int cublasGetPointerMode_v2(void *handle, int *mode) {
  *mode = 0;
  return 0;
}
#endif

#ifdef LIB_cublasLt
typedef struct {
  uint64_t algo[8];
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
} heuristic;
EXPORT size_t cublasLtGetVersion(void) { return 130100; }
EXPORT int cublasLtMatmulDescCreate(void **p, int compute, int scale) {
  *p = calloc(1, 512);
  return 0;
}
EXPORT int cublasLtMatrixLayoutCreate(void **p, int type, uint64_t rows, uint64_t cols, int64_t ld) {
  *p = calloc(1, 512);
  return 0;
}
EXPORT int cublasLtMatmulPreferenceCreate(void **p) {
  *p = calloc(1, 512);
  return 0;
}
EXPORT int cublasLtMatmulDescDestroy(void *p) {
  free(p);
  return 0;
}
EXPORT int cublasLtMatrixLayoutDestroy(void *p) {
  free(p);
  return 0;
}
EXPORT int cublasLtMatmulPreferenceDestroy(void *p) {
  free(p);
  return 0;
}
EXPORT int cublasLtMatmulAlgoGetHeuristic(void *h, void *d, void *a, void *b, void *c, void *e, void *pref, int asked,
                                          heuristic *out, int *found) {
  memset(out, 0, sizeof *out);
  *found = 1;
  return 0;
}
#endif

#ifdef LIB_nvrtc
EXPORT int nvrtcVersion(int *major, int *minor) {
  *major = 13;
  *minor = 0;
  return 0;
}
EXPORT int nvrtcGetCUBINSize(void *p, size_t *n) {
  *n = 16;
  return 0;
}
EXPORT int nvrtcGetPTXSize(void *p, size_t *n) {
  *n = 16;
  return 0;
}
EXPORT int nvrtcGetProgramLogSize(void *p, size_t *n) {
  *n = 1;
  return 0;
}
EXPORT int nvrtcCreateProgram(void **p, const char *s, const char *n, int k, const char *const *h,
                              const char *const *i) {
  *p = calloc(1, 8);
  return 0;
}
EXPORT int nvrtcGetLoweredName(void *p, const char *name, const char **out) {
  *out = "kernel";
  return 0;
}
EXPORT const char *nvrtcGetErrorString(int e) { return "emulated nvrtc"; }
#endif

#ifdef LIB_cufft
EXPORT int cufftCreate(int *plan) {
  *plan = 1;
  return 0;
}
EXPORT int cufftXtMakePlanMany(int p, int r, long long *n, long long *ie, long long is, long long id, int it,
                               long long *oe, long long os, long long od, int ot, long long b, size_t *work, int et) {
  *work = 0;
  return 0;
}
#endif

#ifdef LIB_nvshmem_host
/* Its initialisation state is a variable. */
EXPORT int nvshmemid_init_status(void) { return 0; }
#endif
