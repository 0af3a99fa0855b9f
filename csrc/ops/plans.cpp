// Questions without tensors: the table of plans, the planner, the compiler by itself and the kernel cache. What can fail
// to compile returns nothing, or message, source, log and plan: an exception would bring the message only.
#include <algorithm>
#include <iterator>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "../chain.h"
#include "../cpu/cpu.h"
#include "../decoder.h"
#include "../python.h"
#include "../runtime/cache.h"
#include "../runtime/nvrtc.h"
#include "launch.h"

namespace factorlayer {
namespace {

std::string instruction_set() { return cpu::instruction_set(); }

// Checks a question before the planner or the cache is asked it.
python::Limits check_question(const std::string& chain, const std::string& dtype, int64_t batch_class,
                              int64_t capability, int64_t processors, int64_t shared_bytes, int64_t memory_rate) {
  if (is_of_decoder(chain))
    find_decoder(chain);
  else if (!find_choice(chain))
    check_words(chain);
  dtype_named(dtype);
  auto check_number = [](const char* what, int64_t number, int64_t least, int64_t most) {
    STD_TORCH_CHECK(number >= least && number <= most, "factorlayer: ", what, " should be from ", least, " to ", most,
                    ", it is ", number);
  };
  check_number("a batch class", batch_class, 0, cuda::BATCH_CLASSES - 1);
  check_number("a compute capability", capability, 10, 999);
  check_number("the number of multiprocessors", processors, 1, 1 << 16);
  check_number("the bytes of shared memory", shared_bytes, 0, 1 << 24);
  check_number("the bytes that memory moves in a microsecond", memory_rate, 0, 1 << 30);
  return {int(capability), int(processors), int(shared_bytes), int(memory_rate)};
}

// Asks the planner for anything but a plan, such as has_plan. It may have to compare many plans, so its answers are kept, too.
std::string ask_planner(const Text& question, const Text& chain, const Text& dtype, int64_t batch_class, int64_t capability,
                        int64_t processors, int64_t shared_bytes, int64_t memory_rate) {
  const char* const questions[] = {"has_plan", "predicted", "times", "cut", "kept"};
  STD_TORCH_CHECK(std::find(std::begin(questions), std::end(questions), question.value) != std::end(questions),
                  "factorlayer: the planner is asked has_plan, predicted, times, cut or kept, not \"", shown(question.value), "\"");
  const python::Limits gpu =
      check_question(chain.value, dtype.value, batch_class, capability, processors, shared_bytes, memory_rate);
  const std::string name =
      question.value + " of " + chain.value + " in " + dtype.value + ", batch class " + std::to_string(batch_class);
  const cache::Key key{"plan", name, shown(gpu), "", "", python::planner()};
  if (std::optional<std::string> answer = cache::load(key)) return *answer;
  const std::string answer = python::ask_planner(question.value, chain.value, dtype.value, int(batch_class), gpu);
  cache::store(key, answer);
  return answer;
}

std::vector<std::string> in_parts(const cuda::Failure& failure) {
  return {failure.what(), failure.source, failure.log, failure.plan};
}

cuda::PlanKey key_of(const Text& chain, const Text& dtype, int64_t batch_class, int64_t device) {
  STD_TORCH_CHECK(batch_class >= 0 && batch_class < cuda::BATCH_CLASSES,
                  "factorlayer: a batch class should be from 0 to ", cuda::BATCH_CLASSES - 1, ", it is ", batch_class);
  STD_TORCH_CHECK(device >= 0 && device < 1 << 16, "factorlayer: a device should be its index, from 0 on, it is ", device);
  const void* described = find_choice(chain.value)        ? find_choice(chain.value)
                          : is_of_decoder(chain.value)    ? &find_decoder(chain.value)
                          : is_of_recurrence(chain.value) ? &find_asked(chain.value)
                          : is_stack(chain.value)         ? &find_stack(chain.value)
                                                          : static_cast<const void*>(&find_chain(chain.value));
  return {described, dtype_named(dtype.value), int(batch_class), int(device)};
}

int64_t batch_class(int64_t batch) { return cuda::batch_class(batch); }

std::string plan(const Text& chain, const Text& dtype, int64_t batch_class, int64_t capability, int64_t processors,
                 int64_t shared_bytes, int64_t memory_rate) {
  const python::Limits gpu =
      check_question(chain.value, dtype.value, batch_class, capability, processors, shared_bytes, memory_rate);
  return plan_of(chain.value, dtype_named(dtype.value), int(batch_class), gpu);
}

// A GPU's limits: what plans are asked for.
std::tuple<int64_t, int64_t, int64_t, int64_t> limits(int64_t device) {
  STD_TORCH_CHECK(device >= 0 && device < 1 << 16, "factorlayer: a device should be its index, from 0 on, it is ", device);
  const python::Limits gpu = limits_of(cuda::find_device(int(device)));
  return {gpu.capability, gpu.processors, gpu.shared_bytes, gpu.memory_rate};
}

std::vector<std::string> prepare(const Text& chain, const Text& dtype, int64_t batch_class, int64_t device) {
  try {
    program_of(key_of(chain, dtype, batch_class, device), chain.value);
    return {};
  } catch (const cuda::Failure& failure) {
    return in_parts(failure);
  }
}

std::vector<std::string> install(const Text& chain, const Text& dtype, int64_t batch_class, int64_t device,
                                 const Text& plan) {
  locate_compiler();
  try {
    cuda::build_program(key_of(chain, dtype, batch_class, device), plan.value, true, python::warn);
    return {};
  } catch (const cuda::Failure& failure) {
    return in_parts(failure);
  }
}

std::vector<std::string> failure(const Text& chain, const Text& dtype, int64_t batch_class, int64_t device) {
  const cuda::Failure* found = cuda::find_failure(key_of(chain, dtype, batch_class, device));
  return found ? in_parts(*found) : std::vector<std::string>();
}

std::vector<std::string> fill_cache(const Text& plan) {
  locate_compiler();
  const Plan parsed = parse_plan(plan.value);
  std::vector<std::future<cuda::Cubin>> cubins = cuda::cubins_of(parsed.passes);
  for (size_t i = 0; i < cubins.size(); ++i) {
    try {
      const cuda::Cubin cubin = cubins[i].get();
      if (!cubin.warning.empty()) python::warn(cubin.warning);
    } catch (const cuda::CompilationFailed& error) {
      return {error.what(), parsed.passes[i].source, error.log, plan.value};
    }
  }
  return {};
}

constexpr size_t MOST_OPTIONS = 64;

// Returns the cubin (empty if there is none), the log, and what went wrong.
std::tuple<Tensor, std::string, std::string> compile(const Text& source, const Text& kernel, const Text& architecture,
                                                     const std::vector<Text>& options) {
  STD_TORCH_CHECK(is_kernel_name(kernel.value), "factorlayer: a kernel's name should be at most ", MOST_NAME,
                  " letters, digits and underscores, it is \"", shown(kernel.value), "\"");
  STD_TORCH_CHECK(is_architecture(architecture.value), "factorlayer: an architecture should be such as sm_90 or sm_90a, it is \"",
                  shown(architecture.value), "\"");
  STD_TORCH_CHECK(int64_t(source.value.size()) <= MOST_SOURCE && options.size() <= MOST_OPTIONS,
                  "factorlayer: a kernel's source should have ", MOST_SOURCE, " bytes at most, with ", MOST_OPTIONS,
                  " options, it has ", source.value.size(), " and ", options.size());
  auto check_text = [](const std::string& text) {
    STD_TORCH_CHECK(text.find('\0') == std::string::npos, "factorlayer: source and options should be text, there is a byte that is 0");
  };
  check_text(source.value);
  for (const Text& option : options) check_text(option.value);
  locate_compiler();
  std::vector<std::string> words;
  for (const Text& option : options) words.push_back(option.value);
  cuda::Compiled compiled;
  std::string error;
  try {
    compiled = cuda::compile(source.value, kernel.value, architecture.value, words);
  } catch (const cuda::CompilationFailed& failed) {
    compiled.log = failed.log;
    error = failed.what();
  }
  Tensor cubin = torch::stable::empty({int64_t(compiled.cubin.size())}, ScalarType::Byte);
  std::copy(compiled.cubin.begin(), compiled.cubin.end(), static_cast<char*>(cubin.mutable_data_ptr()));
  return {cubin, compiled.log, error};
}

std::vector<std::string> compiler() {
  locate_compiler();
  return {cuda::find_compiler()->version, cuda::find_compiler()->path};
}

// A line for each file of the cache: its name, bytes, whole or damaged, kernel or plan, name, architecture, compiler, package.
std::vector<std::string> cache_entries() {
  std::vector<std::string> lines;
  for (const cache::Entry& entry : cache::entries())
    lines.push_back(entry.file + "\t" + std::to_string(entry.bytes) + "\t" +
                    (entry.whole ? "whole" : "damaged") + "\t" + entry.kind + "\t" + entry.name + "\t" +
                    entry.architecture + "\t" + entry.compiler + "\t" + entry.package);
  return lines;
}

std::string cache_folder() { return cache::folder(); }

int64_t remove_cache_entries(bool all) { return cache::remove_entries(all); }

int64_t cache_occupied() { return cache::occupied(); }

int64_t cache_limit() { return cache::limit(); }

std::string set_cache_limit(int64_t bytes) { return cache::set_limit(bytes); }

}  // namespace
}  // namespace factorlayer

STABLE_TORCH_LIBRARY_IMPL(factorlayer, CompositeExplicitAutograd, m) {
  m.impl("instruction_set", TORCH_BOX(&factorlayer::instruction_set));
  m.impl("batch_class", TORCH_BOX(&factorlayer::batch_class));
  m.impl("plan", TORCH_BOX(&factorlayer::plan));
  m.impl("ask_planner", TORCH_BOX(&factorlayer::ask_planner));
  m.impl("limits", TORCH_BOX(&factorlayer::limits));
  m.impl("prepare", TORCH_BOX(&factorlayer::prepare));
  m.impl("install", TORCH_BOX(&factorlayer::install));
  m.impl("failure", TORCH_BOX(&factorlayer::failure));
  m.impl("compile", TORCH_BOX(&factorlayer::compile));
  m.impl("compiler", TORCH_BOX(&factorlayer::compiler));
  m.impl("fill_cache", TORCH_BOX(&factorlayer::fill_cache));
  m.impl("cache_entries", TORCH_BOX(&factorlayer::cache_entries));
  m.impl("cache_folder", TORCH_BOX(&factorlayer::cache_folder));
  m.impl("remove_cache_entries", TORCH_BOX(&factorlayer::remove_cache_entries));
  m.impl("cache_occupied", TORCH_BOX(&factorlayer::cache_occupied));
  m.impl("cache_limit", TORCH_BOX(&factorlayer::cache_limit));
  m.impl("set_cache_limit", TORCH_BOX(&factorlayer::set_cache_limit));
}
