#include "launch.h"

#include <dlfcn.h>

#include <algorithm>
#include <optional>

#include "../runtime/cache.h"
#include "../runtime/nvrtc.h"

namespace factorlayer {

// PyTorch's stable CPU library, which this one is linked with, has no name for it.
cuda::Stream current_stream(int device) {
  using Find = AOTITorchError (*)(int32_t, void**);
  static const Find find = [] {
    const char* name = "aoti_torch_get_current_cuda_stream";
    void* symbol = dlsym(RTLD_DEFAULT, name);
    if (void* library = symbol ? nullptr : dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD))
      symbol = dlsym(library, name);
    STD_TORCH_CHECK(symbol, "factorlayer: this PyTorch cannot name its current CUDA stream; use a CUDA build of 2.11 ",
                    "or later");
    return reinterpret_cast<Find>(symbol);
  }();
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(find(device, &stream));
  return stream;
}

void locate_compiler() {
  if (!cuda::find_compiler()) cuda::locate_compiler(python::nvrtc_paths());
}

python::Limits limits_of(const cuda::Device& device) {
  return {device.capability, device.processors, device.shared_bytes, device.memory_rate};
}

std::string shown(const python::Limits& gpu) {
  return "sm_" + std::to_string(gpu.capability) + " with " + std::to_string(gpu.processors) + " SMs of " +
         std::to_string(gpu.shared_bytes) + " bytes" +
         (gpu.memory_rate ? " and " + std::to_string(gpu.memory_rate) + " MB/s" : "");
}

std::string plan_of(const std::string& chain, DType dtype, int batch_class, const python::Limits& gpu) {
  const std::string name = chain + " in " + name_of(dtype) + ", batch class " + std::to_string(batch_class);
  const cache::Key key{"plan", name, shown(gpu), "", "", python::planner()};
  if (std::optional<std::string> plan = cache::load(key)) return *plan;
  const std::string plan = python::plan_text(chain, name_of(dtype), batch_class, gpu);
  cache::store(key, plan);
  return plan;
}

const cuda::Program& program_of(const cuda::PlanKey& key, const std::string& chain) {
  if (const cuda::Program* found = cuda::find_program(key)) return *found;
  locate_compiler();
  const cuda::Device& device = cuda::find_device(key.device);
  std::string plan;
  try {
    plan = plan_of(chain, key.dtype, key.batch_class, limits_of(device));
  } catch (const python::Error& error) {
    const cuda::Failure failure("factorlayer: chain \"" + chain + "\" has no plan: " + error.what(), "", "", "");
    if (error.lasting) cuda::remember_failure(key, failure);
    throw failure;
  }
  return cuda::build_program(key, plan, false, python::warn);
}

void run_on_cuda(const Text& text, const void* chain, const Tensor& x, int64_t in, int64_t out, const cuda::Params& params,
                 std::vector<Tensor>& kept, void* second, void* prepared, const cuda::Rows& rows) {
  const cuda::PlanKey key{chain, dtype_of(x), cuda::batch_class(params.batch), x.get_device_index()};
  const cuda::Program& program = program_of(key, text.value);
  const cuda::Device& device = cuda::find_device(key.device);
  void* scratch[MOST_SCRATCH] = {};
  scratch[SUMS] = prepared;
  for (int i = 0; i < MOST_SCRATCH; ++i) {
    if (!program.plan.scratch[i] || scratch[i]) continue;
    const int64_t batch = params.batch, samples = program.plan.chunk ? std::min(program.plan.chunk, batch) : batch;
    kept.push_back(new_matrix(x, i == SUMS ? 1 : samples, program.plan.scratch[i], aoti_torch_dtype_uint8()));
    scratch[i] = kept.back().mutable_data_ptr();
  }
  const cuda::ContextScope scope(device);
  const int64_t bytes = bytes_of(key.dtype);
  const cuda::Part part = prepared ? cuda::Part::samples : cuda::Part::all;
  cuda::run(program, part, in * bytes, out * bytes, device, params, scratch, second, current_stream(key.device), rows);
}

}  // namespace factorlayer
