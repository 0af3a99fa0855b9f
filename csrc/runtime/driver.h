// The CUDA driver, opened when it is first needed and never linked: importing the package touches no CUDA, and one
// build serves machines with and without it. Failed calls throw DriverError with the driver's own words.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>

namespace factorlayer::cuda {

// The driver's opaque handles and the few numbers of cuda.h in use here; both are part of its stable binary interface.
using Context = void*;
using Module = void*;
using Function = void*;
using Stream = void*;

struct DriverError : std::runtime_error {
  DriverError(int code, const std::string& message) : std::runtime_error(message), code(code) {}
  int code;
};

struct Device {
  int index;
  int capability;      // 90 for 9.0
  int processors;      // streaming multiprocessors
  int shared_bytes;    // that one block may ask for at most
  int memory_rate;     // bytes in a microsecond by memory's clock and the width of its bus; 0 where the driver does not say
  Context context;     // the primary one, which is PyTorch's
};

// Throws where there is no driver or no such device.
const Device& find_device(int index);

// Makes the device's primary context current for as long as it lives; a new thread has none.
class ContextScope {
 public:
  explicit ContextScope(const Device& device);
  ~ContextScope();
  ContextScope(const ContextScope&) = delete;

 private:
  Context before_;
  bool changed_;
};

// Loads a cubin into the current context, also while a stream of this thread is being captured. The module is never
// unloaded: a captured graph may hold it.
Function load_function(const std::string& cubin, const std::string& name, int shared_bytes, int cluster);

// Clusters of so many blocks, along y of the grid, that have room on the device, whose parts may not divide by them; 0 if the
// driver does not know.
int clusters_at_once(Function function, unsigned blocks, unsigned threads, unsigned shared_bytes);

// How the copy engine finds boxes of a tensor, of floats that it rounds to tf32 on their way or of 16 bits as they are: 128 bytes
// at `to`, which is a multiple of 64. Rows of a box are 128 bytes, whose pieces change places as the matrix unit takes them.
void encode_map(void* to, const void* tensor, bool is_tf32, const int64_t (&sizes)[5], const int64_t (&strides)[4],
                const int64_t (&box)[5]);

// `early` blocks start while the kernel before in the stream ends, and have to wait for it themselves; on sm_90 and later.
// Blocks `together` are all on the GPU at once, or the launch fails.
enum class Manner { plain, early, together };

// `maps` are what kernels have that take two parameters.
void launch(Function function, unsigned grid_x, unsigned grid_y, unsigned threads, unsigned shared_bytes, Manner manner,
            Stream stream, void* params, void* maps);

}  // namespace factorlayer::cuda
