// A stand-in for libcuda.so.1 on machines without a GPU: it writes what it is asked for to stderr, a line for each.
// CUDA_CAPABILITY=90, SHARED=232448, LOAD_ERROR=2 … in the environment say what it answers.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int number(const char* name, int otherwise) {
  const char* value = getenv(name);
  return value ? atoi(value) : otherwise;
}

static __thread void* current;
static __thread int capture_mode;

int cuInit(unsigned flags) { return number("INIT_ERROR", 0); }
int cuGetExportTable(const void** table, const void* id) { return 500; }  // NVRTC asks; it can do without
int cuGetErrorString(int error, const char** text) {
  *text = error == 2 ? "out of memory" : error == 900 ? "operation not permitted when stream is capturing" : "bad luck";
  return 0;
}
int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return ordinal < 2 ? 0 : 101;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  const int capability = number("CUDA_CAPABILITY", 90);
  *value = attribute == 75   ? capability / 10
           : attribute == 76 ? capability % 10
           : attribute == 16 ? 132
           : attribute == 36 ? number("MEMORY_CLOCK", 0)
           : attribute == 37 ? number("MEMORY_BUS", 0)
           : attribute == 97 ? number("SHARED", 232448)
                             : -1;
  return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = (void*)(size_t)(0x1000 + device);
  return 0;
}
int cuCtxGetCurrent(void** context) {
  *context = current;
  return 0;
}
int cuCtxSetCurrent(void* context) {
  current = context;
  return 0;
}
int cuThreadExchangeStreamCaptureMode(int* mode) {
  const int before = capture_mode;
  capture_mode = *mode;
  *mode = before;
  return 0;
}
int cuModuleLoadData(void** module, const void* image) {
  fprintf(stderr, "load context %p capture mode %d\n", current, capture_mode);
  *module = (void*)0x2000;
  return number("LOAD_ERROR", 0);
}
int cuModuleUnload(void* module) { return fprintf(stderr, "unload\n") < 0; }
int cuModuleGetFunction(void** function, void* module, const char* name) {
  fprintf(stderr, "function %s\n", name);
  *function = strdup(name);
  return 0;
}
int cuFuncSetAttribute(void* function, int attribute, int value) {
  fprintf(stderr, "attribute %d = %d\n", attribute, value);
  return value > number("SHARED", 232448);
}
int cuDriverGetVersion(int* version) {
  *version = number("DRIVER_VERSION", 13000);
  return 0;
}
static int launch(const char* how, void* function, const unsigned (*sizes)[3], unsigned shared, void* stream,
                  void** params) {
  const struct {
    void *x, *y, *bias;
    long long batch;
    void* weights[62];
    void* sums;
  }* p = params[0];
  fprintf(stderr, "launch %s grid %u %u %u block %u %u %u shared %u stream %p context %p x %p y %p bias %p batch %lld"
                  " weight_0 %p weight_1 %p sums %p how %s\n",
          (char*)function, sizes[0][0], sizes[0][1], sizes[0][2], sizes[1][0], sizes[1][1], sizes[1][2], shared, stream,
          current, p->x, p->y, p->bias, p->batch, p->weights[0], p->weights[1], p->sums, how);
  return number("LAUNCH_ERROR", 0);
}
int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void* stream, void** params, void** extra) {
  const unsigned sizes[2][3] = {{gx, gy, gz}, {bx, by, bz}};
  return launch("behind", function, sizes, shared, stream, params);
}

int cuTensorMapEncodeTiled(void* map, int type, unsigned rank, void* tensor, const unsigned long long* sizes,
                           const unsigned long long* strides, const unsigned* box, const unsigned* steps, int interleave,
                           int swizzle, int promotion, int fill) {
  fprintf(stderr, "map %s type %d of %p sizes", (size_t)map % 64 ? "not aligned" : "aligned", type, tensor);
  for (unsigned i = 0; i < rank; ++i) fprintf(stderr, " %llu", sizes[i]);
  fprintf(stderr, " strides");
  for (unsigned i = 0; i + 1 < rank; ++i) fprintf(stderr, " %llu", strides[i]);
  fprintf(stderr, " box");
  for (unsigned i = 0; i < rank; ++i) fprintf(stderr, " %u", box[i]);
  fprintf(stderr, " options %d %d %d %d\n", interleave, swizzle, promotion, fill);
  snprintf(map, 128, "%p", tensor);
  return number("MAP_ERROR", 0);
}

struct attribute {  // CUlaunchAttribute
  unsigned id;
  char pad[4];
  union {
    char bytes[64];
    int allowed;
    unsigned cluster[3];
  } value;
};
struct config {  // CUlaunchConfig
  unsigned sizes[2][3], shared;
  void* stream;
  struct attribute* attributes;
  unsigned attribute_count;
};
int cuLaunchKernelEx(const struct config* c, void* function, void** params, void** extra) {
  const struct attribute* a = c->attributes;
  const int allowed = c->attribute_count == 1 && a->value.allowed;
  const int early = allowed && a->id == 6, together = allowed && a->id == 2;
  const char* how = early ? "early" : together ? "together" : "unknown";
  const int error = launch(how, function, c->sizes, c->shared, c->stream, params);
  return together && c->sizes[0][0] * c->sizes[0][1] * c->sizes[0][2] > (unsigned)number("RESIDENT", 132) ? 720 : error;
}
int cuOccupancyMaxActiveClusters(int* clusters, void* function, const struct config* c) {
  const struct attribute* a = c->attributes;
  const int known = c->attribute_count == 1 && a->id == 4 && a->value.cluster[0] == 1 && a->value.cluster[2] == 1;
  *clusters = known && c->sizes[0][1] == a->value.cluster[1] ? number("CLUSTERS", 15) : -1;
  return number("CLUSTERS", 15) < 0;
}
