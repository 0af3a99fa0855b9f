// The CUDA driver's functions by name, and the few sequences of them that the engine needs.
#include "driver.h"

#include <dlfcn.h>

#include <algorithm>

#include "../table.h"

namespace factorlayer::cuda {
namespace {

constexpr int MULTIPROCESSOR_COUNT = 16, CAPABILITY_MAJOR = 75, CAPABILITY_MINOR = 76, MAX_SHARED_BYTES_OPTIN = 97;
constexpr int MEMORY_CLOCK_RATE = 36, MEMORY_BUS_WIDTH = 37;
constexpr int MAX_DYNAMIC_SHARED_BYTES = 8, ANY_CLUSTER = 14;  // attributes of a function
constexpr int MOST_OF_ANY_CLUSTER = 8;  // blocks, which every GPU with clusters takes
constexpr int CAPTURE_RELAXED = 2;
constexpr int SHARED_BYTES_WITHOUT_OPTIN = 48 << 10;
constexpr int COOPERATIVE = 2, CLUSTER_DIMENSION = 4, PROGRAMMATIC_SERIALIZATION = 6;  // attributes of a launch
constexpr int LEAST_DRIVER = 12030;            // that captures such launches
constexpr int MAP_OF_U16 = 1, MAP_OF_TF32 = 11, NO_INTERLEAVE = 0, SWIZZLE_128_BYTES = 3, PROMOTE_128_BYTES = 2, ZEROS_OUTSIDE = 0;

// CUlaunchAttribute and CUlaunchConfig of cuda.h
struct LaunchAttribute {
  int id;
  char pad[4];
  union {
    int allowed;
    unsigned cluster[3];
    char bytes[64];
  };
};
struct LaunchConfig {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
  Stream stream;
  const LaunchAttribute* attributes;
  unsigned attribute_count;
};

struct Driver {
  int (*init)(unsigned flags);
  int (*get_error_string)(int error, const char** text);
  int (*get_device)(int* device, int ordinal);
  int (*get_device_attribute)(int* value, int attribute, int device);
  int (*retain_primary_context)(Context* context, int device);
  int (*get_context)(Context* context);
  int (*set_context)(Context context);
  int (*exchange_capture_mode)(int* mode);
  int (*load_module)(Module* module, const void* image);
  int (*unload_module)(Module module);
  int (*get_function)(Function* function, Module module, const char* name);
  int (*set_function_attribute)(Function function, int attribute, int value);
  int (*launch_kernel)(Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                       unsigned block_y, unsigned block_z, unsigned shared_bytes, Stream stream, void** params,
                       void** extra);
  int (*load_function)(Function function);  // from CUDA 12.4 on, else null
  int (*encode_map)(void* map, int type, uint32_t rank, void* tensor, const uint64_t* sizes, const uint64_t* strides,
                    const uint32_t* box, const uint32_t* steps, int interleave, int swizzle, int promotion,
                    int fill);  // from CUDA 12 on, else null
  int (*launch_with)(const LaunchConfig* config, Function function, void** params, void** extra);  // null if too old
  int (*count_clusters)(int* clusters, Function function, const LaunchConfig* config);  // null if too old
};

Driver open_driver() {
  void* library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  if (!library)
    throw std::runtime_error(
        std::string("factorlayer: the fused CUDA kernels need NVIDIA's driver, libcuda.so.1, which cannot be opened (") +
        dlerror() + "); install the driver, or use implementation=\"batched\"");
  auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    return function != nullptr;
  };
  auto need = [&](auto& function, const char* name) {
    if (!find(function, name))
      throw std::runtime_error(std::string("factorlayer: NVIDIA's driver has no function ") + name +
                               "; update the driver to one for CUDA 11 or later");
  };
  Driver driver{};
  need(driver.init, "cuInit");
  need(driver.get_error_string, "cuGetErrorString");
  need(driver.get_device, "cuDeviceGet");
  need(driver.get_device_attribute, "cuDeviceGetAttribute");
  need(driver.retain_primary_context, "cuDevicePrimaryCtxRetain");
  need(driver.get_context, "cuCtxGetCurrent");
  need(driver.set_context, "cuCtxSetCurrent");
  need(driver.exchange_capture_mode, "cuThreadExchangeStreamCaptureMode");
  need(driver.load_module, "cuModuleLoadData");
  need(driver.unload_module, "cuModuleUnload");
  need(driver.get_function, "cuModuleGetFunction");
  need(driver.set_function_attribute, "cuFuncSetAttribute");
  need(driver.launch_kernel, "cuLaunchKernel");
  find(driver.load_function, "cuFuncLoad");
  find(driver.encode_map, "cuTensorMapEncodeTiled");
  int (*get_version)(int* version) = nullptr;
  int version = 0;
  need(get_version, "cuDriverGetVersion");
  if (!get_version(&version) && version >= LEAST_DRIVER) find(driver.launch_with, "cuLaunchKernelEx");
  find(driver.count_clusters, "cuOccupancyMaxActiveClusters");
  return driver;
}

const Driver& driver() {
  static const Driver found = open_driver();  // where this throws, the next call tries again
  return found;
}

void check(int error, const std::string& what) {
  if (!error) return;
  const char* text = nullptr;
  driver().get_error_string(error, &text);
  throw DriverError(error, "factorlayer: the CUDA driver could not " + what + ": " + (text ? text : "unknown error") +
                               " (error " + std::to_string(error) + ")");
}

Device describe_device(int index) {
  check(driver().init(0), "start");
  int handle = 0;
  check(driver().get_device(&handle, index), "find device " + std::to_string(index));
  auto attribute = [&](int which) {
    int value = 0;
    check(driver().get_device_attribute(&value, which, handle), "describe device " + std::to_string(index));
    return value;
  };
  Device device{};
  device.index = index;
  device.capability = 10 * attribute(CAPABILITY_MAJOR) + attribute(CAPABILITY_MINOR);
  device.processors = attribute(MULTIPROCESSOR_COUNT);
  device.shared_bytes = attribute(MAX_SHARED_BYTES_OPTIN);
  int kilohertz = 0, bits = 0;  // which a driver may not say: plans need no more than a guess then
  driver().get_device_attribute(&kilohertz, MEMORY_CLOCK_RATE, handle);
  driver().get_device_attribute(&bits, MEMORY_BUS_WIDTH, handle);
  device.memory_rate = int(int64_t(2) * kilohertz * (bits / 8) / 1000);  // at both edges of its clock
  check(driver().retain_primary_context(&device.context, handle), "use device " + std::to_string(index));
  return device;
}

// Lets this thread do what a capture by torch.cuda.graph forbids, of which loading a module is the harmless kind.
class RelaxedCapture {
 public:
  RelaxedCapture() { driver().exchange_capture_mode(&mode_); }
  ~RelaxedCapture() { driver().exchange_capture_mode(&mode_); }

 private:
  int mode_ = CAPTURE_RELAXED;
};

}  // namespace

const Device& find_device(int index) {
  static Table<int, Device> devices;
  return devices.find_or_add(index, [&] { return describe_device(index); });
}

ContextScope::ContextScope(const Device& device) : before_(nullptr), changed_(false) {
  check(driver().get_context(&before_), "name the current context");
  if (before_ == device.context) return;
  check(driver().set_context(device.context), "switch to device " + std::to_string(device.index));
  changed_ = true;
}

ContextScope::~ContextScope() {
  if (changed_) driver().set_context(before_);
}

Function load_function(const std::string& cubin, const std::string& name, int shared_bytes, int cluster) {
  const RelaxedCapture relaxed;
  Module module = nullptr;
  check(driver().load_module(&module, cubin.data()), "load kernel " + name);
  try {
    Function function = nullptr;
    check(driver().get_function(&function, module, name.c_str()), "find kernel " + name + " in its module");
    if (shared_bytes > SHARED_BYTES_WITHOUT_OPTIN)
      check(driver().set_function_attribute(function, MAX_DYNAMIC_SHARED_BYTES, shared_bytes),
            "give kernel " + name + " " + std::to_string(shared_bytes) + " bytes of shared memory");
    if (cluster > MOST_OF_ANY_CLUSTER)
      check(driver().set_function_attribute(function, ANY_CLUSTER, 1),
            "let kernel " + name + " have clusters of " + std::to_string(cluster) + " blocks");
    // The driver loads lazily by default, and would do so inside the first launch.
    if (driver().load_function) check(driver().load_function(function), "load kernel " + name);
    return function;
  } catch (...) {
    driver().unload_module(module);
    throw;
  }
}

int clusters_at_once(Function function, unsigned blocks, unsigned threads, unsigned shared_bytes) {
  LaunchAttribute attribute{CLUSTER_DIMENSION, {}, {}};
  attribute.cluster[0] = attribute.cluster[2] = 1;
  attribute.cluster[1] = blocks;
  const LaunchConfig config{1, blocks, 1, threads, 1, 1, shared_bytes, nullptr, &attribute, 1};
  int clusters = 0;
  if (driver().count_clusters) check(driver().count_clusters(&clusters, function, &config), "count clusters");
  return clusters;
}

void encode_map(void* to, const void* tensor, bool is_tf32, const int64_t (&sizes)[5], const int64_t (&strides)[4],
                const int64_t (&box)[5]) {
  static constexpr uint32_t SIDE_BY_SIDE[] = {1, 1, 1, 1, 1};
  if (!driver().encode_map)
    throw std::runtime_error("factorlayer: NVIDIA's driver has no function cuTensorMapEncodeTiled; update the driver to one "
                             "for CUDA 12 or later");
  uint64_t of_tensor[5], bytes[4];
  uint32_t of_box[5];
  std::copy(sizes, sizes + 5, of_tensor), std::copy(strides, strides + 4, bytes), std::copy(box, box + 5, of_box);
  check(driver().encode_map(to, is_tf32 ? MAP_OF_TF32 : MAP_OF_U16, 5, const_cast<void*>(tensor), of_tensor, bytes, of_box,
                            SIDE_BY_SIDE, NO_INTERLEAVE, SWIZZLE_128_BYTES, PROMOTE_128_BYTES, ZEROS_OUTSIDE),
        "describe a tensor to the copy engine");
}

void launch(Function function, unsigned grid_x, unsigned grid_y, unsigned threads, unsigned shared_bytes, Manner manner,
            Stream stream, void* params, void* maps) {
  static constexpr LaunchAttribute EARLY{PROGRAMMATIC_SERIALIZATION, {}, {1}}, COOPERATIVE_LAUNCH{COOPERATIVE, {}, {1}};
  void* arguments[] = {params, maps};
  int error = 0;
  if (manner == Manner::together && !driver().launch_with)
    throw std::runtime_error("factorlayer: this driver is too old to launch blocks that wait for one another; update it");
  if (manner != Manner::plain && driver().launch_with) {
    const LaunchAttribute* attribute = manner == Manner::early ? &EARLY : &COOPERATIVE_LAUNCH;
    const LaunchConfig config{grid_x, grid_y, 1, threads, 1, 1, shared_bytes, stream, attribute, 1};
    error = driver().launch_with(&config, function, arguments, nullptr);
  } else {
    error = driver().launch_kernel(function, grid_x, grid_y, 1, threads, 1, 1, shared_bytes, stream, arguments, nullptr);
  }
  if (error)
    check(error, "launch " + std::to_string(grid_x) + " x " + std::to_string(grid_y) + " blocks of " +
                     std::to_string(threads) + " threads with " + std::to_string(shared_bytes) +
                     " bytes of shared memory");
}

}  // namespace factorlayer::cuda
