/* A stand-in for NVIDIA's driver, libcuda.so.1, as far as netweight calls it: it notes every call and runs nothing.

   A module's image is text, the sizes of its kernels' parameters, such as "8 8 1"; launches note the parameters' bytes. The
   number of blocks chooses what a launch returns: 13 an illegal address, 14 no memory, anything else success. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int CUresult;
enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_FOUND = 500, ILLEGAL_ADDRESS = 700 };

static char notes[1 << 16];
static size_t noted;
#define NOTE(...) (noted += (size_t)snprintf(notes + noted, sizeof notes - noted, __VA_ARGS__))

const char* stand_in_notes(void) { return notes; }

CUresult cuInit(unsigned flags) { return NOTE("init %u\n", flags), SUCCESS; }
CUresult cuDriverGetVersion(int* version) { return *version = 13050, SUCCESS; }
CUresult cuDeviceGet(int* device, int index) { return *device = index, SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(void** context, int device) {
  NOTE("retain %d\n", device);
  return *context = (void*)(intptr_t)(0x1000 + device), SUCCESS;
}
CUresult cuCtxPushCurrent(void* context) { return NOTE("push %p\n", context), SUCCESS; }
CUresult cuCtxSetCurrent(void* context) { return NOTE("current %p\n", context), SUCCESS; }
CUresult cuCtxPopCurrent(void** context) { return NOTE("pop\n"), *context = NULL, SUCCESS; }
CUresult cuModuleLoadData(void** module, const void* image) {
  NOTE("load %s\n", (const char*)image);
  return *module = strdup(image), SUCCESS;
}
CUresult cuModuleGetFunction(void** function, void* module, const char* name) {
  if (!strcmp(name, "missing")) return NOT_FOUND;
  NOTE("function %s\n", name);
  return *function = module, SUCCESS;
}

static long parameter(const char* image, size_t index) {
  for (char* at = (char*)image;; index--) {
    char* end;
    long size = strtol(at, &end, 10);
    if (end == at) return 0;
    if (index == 0) return size;
    at = end;
  }
}
CUresult cuFuncGetParamInfo(void* function, size_t index, size_t* offset, size_t* size) {
  *offset = 0;
  *size = (size_t)parameter(function, index);
  return *size ? SUCCESS : INVALID_VALUE;
}
CUresult cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                        void* stream, void** parameters, void** extra) {
  if (gx == 13) return ILLEGAL_ADDRESS;
  if (gx == 14) return OUT_OF_MEMORY;
  NOTE("launch %u %u %u, %u %u %u, %u, %p, %d:", gx, gy, gz, bx, by, bz, shared, stream, extra != NULL);
  for (size_t i = 0; parameter(function, i); i++) {
    NOTE(" ");
    for (long byte = 0; byte < parameter(function, i); byte++) NOTE("%02x", ((unsigned char*)parameters[i])[byte]);
  }
  NOTE("\n");
  return SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char** words) {
  return *words = error == ILLEGAL_ADDRESS ? "an illegal memory access was encountered" : "out of memory", SUCCESS;
}

CUresult cuGetProcAddress_v2(const char* symbol, void** found, int version, uint64_t flags, int* status) {
#define HERE(name) \
  if (!strcmp(symbol, #name)) return *found = (void*)name, SUCCESS;
  HERE(cuInit) HERE(cuDriverGetVersion) HERE(cuDeviceGet) HERE(cuDevicePrimaryCtxRetain) HERE(cuCtxSetCurrent) HERE(cuCtxPushCurrent) HERE(cuCtxPopCurrent)
  HERE(cuModuleLoadData) HERE(cuModuleGetFunction) HERE(cuFuncGetParamInfo) HERE(cuLaunchKernel) HERE(cuGetErrorString)
  HERE(cuGetProcAddress_v2)
  (void)version, (void)flags, (void)status;
  return *found = NULL, NOT_FOUND;
}
