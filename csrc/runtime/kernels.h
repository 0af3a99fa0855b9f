// The plans that this process has, with their kernels compiled and loaded, and their launches.
//
// The way of a call: find_program, which takes no lock, then run. Only where there is none yet is the planner asked
// (by ops, as it needs Python) and its text given to build_program.
#pragma once
#include <functional>
#include <future>
#include <string>
#include <vector>

#include "../chain.h"
#include "../dtype.h"
#include "driver.h"
#include "plan.h"

namespace factorlayer::cuda {

constexpr int MAX_WEIGHTS = 62;

// The one argument of every kernel, by value. csrc/engine has the same struct.
struct Params {
  const void* x;
  void* y;
  const void* bias;  // null without one
  long long batch;
  const void* weights[MAX_WEIGHTS];
  void* sums;  // the plan's buffer s2
};

// Plans depend on the batch by its class alone (kernels/batches.py).
constexpr int64_t MOST_OF_CLASS[] = {4, 64, 256, 2048, 8192};  // samples; the last class has no end
constexpr int BATCH_CLASSES = int(std::size(MOST_OF_CLASS)) + 1;
int batch_class(int64_t batch);

struct PlanKey {
  const void* chain;  // of find_chain, or the stack of find_stack
  DType dtype;
  int batch_class;
  int device;
  bool operator==(const PlanKey& other) const;
};

struct KeyHash {
  size_t operator()(const PlanKey& key) const;
};

// Why there can be no program for a key: its plan or a kernel of it is impossible.
struct Failure : std::runtime_error {
  Failure(const std::string& message, const std::string& source, const std::string& log, const std::string& plan)
      : std::runtime_error(message), source(source), log(log), plan(plan) {}
  std::string source, log, plan;
};

struct Program {
  Plan plan;
  std::vector<Function> functions;  // one for each pass
  std::vector<int64_t> places;      // for blocks on the device at once, one for each multiprocessor
};

// Null if nobody has asked for it. Throws the Failure remembered for the key.
const Program* find_program(const PlanKey& key);

const Failure* find_failure(const PlanKey& key);
void remember_failure(const PlanKey& key, const Failure& failure);

using Warn = std::function<void(const std::string&)>;

// Compiles what the cache does not have, loads it, and enters it in the table; `replace` also where there is one.
// Throws Failure, which is remembered. Needs locate_compiler. `warn` is called when no lock is held.
const Program& build_program(const PlanKey& key, const std::string& plan, bool replace, const Warn& warn);

struct Cubin {
  std::string code, warning;
};

// The kernels of passes, which have to live as long, from the cache or from NVRTC, side by side. Getting one throws
// CompilationFailed.
std::vector<std::future<Cubin>> cubins_of(const std::vector<Pass>& passes);

// Passes that read weights alone, or those that read x, or both.
enum class Part { weights, samples, all };

// Weights from `first` on that have rows, one for each sample, of so many bytes.
struct Rows {
  size_t first = 0;
  std::vector<int64_t> bytes;
};

// Launches a plan's passes, chunk by chunk. params.x, y and batch are those of the whole call, whose rows have x_row and y_row
// bytes, as have those weights; buffers of `scratch` hold min(batch, chunk) samples, but for that of sums, and `second` is the second output. The
// device's context is current.
void run(const Program& program, Part part, int64_t x_row, int64_t y_row, const Device& device, const Params& params,
         void* const (&scratch)[MOST_SCRATCH], void* second, Stream stream, const Rows& rows = {});

}  // namespace factorlayer::cuda
