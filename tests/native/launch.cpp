// launch CHAIN DTYPE BATCH DEVICE PLAN_FILE NVRTC PART: builds the plan's program twice and runs it once, on pointers that
// nobody follows: x at 0x10000000, y at 0x20000000, scratch at 0x30000000, 0x40000000, 0x60000000 and 0x80000000, w at
// 0x70000000, weights from 0x50 on.
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "../../csrc/runtime/kernels.h"
#include "../../csrc/runtime/nvrtc.h"

using namespace factorlayer;

static void* at(size_t address) { return reinterpret_cast<void*>(address); }

int main(int, char** words) {
  try {
    cuda::locate_compiler({words[6]});
    std::ostringstream plan;
    plan << std::ifstream(words[5]).rdbuf();
    const Chain& chain = find_chain(words[1]);
    const DType dtype = std::string(words[2]) == "float64" ? DType::float64 : DType::bfloat16;
    const int64_t batch = std::atoll(words[3]);
    const cuda::PlanKey key{&chain, dtype, cuda::batch_class(batch), std::atoi(words[4])};
    auto warn = [](const std::string& text) { std::fprintf(stderr, "warning %s\n", text.c_str()); };
    for (int turn = 0; turn < 2; ++turn) {
      try {
        cuda::build_program(key, plan.str(), false, warn);
      } catch (const cuda::Failure& failure) {
        std::fprintf(stderr, "failure %s\nsource %zu log %zu plan %zu\n", failure.what(), failure.source.size(),
                     failure.log.size(), failure.plan.size());
      }
    }
    const cuda::Program* program = cuda::find_program(key);
    if (!program) throw std::runtime_error("there is no program");
    const cuda::Device& device = cuda::find_device(key.device);
    const cuda::ContextScope scope(device);
    cuda::Params params{};
    params.x = at(0x10000000), params.y = at(0x20000000), params.batch = batch;
    for (int i = 0; i < cuda::MAX_WEIGHTS; ++i) params.weights[i] = at(0x50 + i);
    void* scratch[MOST_SCRATCH] = {at(0x30000000), at(0x40000000), at(0x60000000), at(0x80000000)};
    const std::string part = words[7];
    const cuda::Part which = part == "weights"   ? cuda::Part::weights
                             : part == "samples" ? cuda::Part::samples
                                                 : cuda::Part::all;
    cuda::run(*program, which, chain.in_features() * bytes_of(dtype), chain.out_features() * bytes_of(dtype), device, params, scratch,
              at(0x70000000), at(0x77));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error %s\n", error.what());
    return 1;
  }
  return 0;
}
