// The table of programs, how one is built, and how it is launched.
#include "kernels.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>

#include "../table.h"
#include "cache.h"
#include "nvrtc.h"
#include "sha256.h"

namespace factorlayer::cuda {
namespace {

const std::vector<std::string> OPTIONS = {"--std=c++17", "--device-as-default-execution-space"};

// Replaced values are not deleted: another thread may be using them.
struct Slot {
  std::atomic<const Program*> program{nullptr};
  std::atomic<const Failure*> failure{nullptr};
  std::mutex building;
};

Table<PlanKey, Slot, KeyHash> table;

Slot& slot_of(const PlanKey& key) {
  return table.find_or_add(key, [] { return Slot(); });
}

// Bytes of a block's shared memory where blocks have multiprocessors of their own: no two of them fit into one. Without that, a
// kernel that starts while the one before it ends has its blocks side by side on the first multiprocessors that are free.
int64_t bytes_apart(const Pass& pass, const Device& device) {
  return pass.apart ? std::max<int64_t>(pass.shared_bytes, device.shared_bytes / 2 + 1) : pass.shared_bytes;
}

// Plans of several chains and batch classes share kernels.
Function function_of(const Pass& pass, const std::string& cubin, const Device& device) {
  static Table<std::string, std::atomic<Function>> functions;
  const int64_t shared_bytes = bytes_apart(pass, device);
  const std::string key = std::to_string(device.index) + " " + std::to_string(shared_bytes) + " " + pass.kernel + " " +
                          sha256(cubin);
  std::atomic<Function>& function = functions.find_or_add(key, [] { return std::atomic<Function>(nullptr); });
  if (!function) function = load_function(cubin, pass.kernel, int(shared_bytes), int(pass.cluster));
  return function;
}

int64_t places_of(const Pass& pass, Function function, const Device& device) {
  if (pass.cluster == 1) return device.processors;
  const unsigned shared_bytes = unsigned(bytes_apart(pass, device));
  const int clusters = clusters_at_once(function, unsigned(pass.cluster), unsigned(pass.threads), shared_bytes);
  return clusters ? std::min<int64_t>(clusters * pass.cluster, device.processors) : device.processors;
}

[[noreturn]] void fail(Slot& slot, const Failure& failure) {
  slot.failure.store(new Failure(failure), std::memory_order_release);
  throw failure;
}

// Invalid values (such as too much shared memory), images that do not fit the GPU, missing names. Other errors, such as
// a lack of memory or the crash of an earlier kernel, say nothing about this one.
bool is_lasting(const DriverError& error) {
  return error.code == 1 || (error.code >= 200 && error.code < 300) || error.code == 500;
}

// 900 to 909 are the driver's complaints about captures.
bool is_about_capture(const DriverError& error) { return error.code >= 900 && error.code < 910; }

const Program* build(Slot& slot, const PlanKey& key, const std::string& text, std::string& warning) {
  Program program;
  try {
    program.plan = parse_plan(text);
  } catch (const std::invalid_argument& error) {
    fail(slot, Failure(error.what(), "", "", text));
  }
  const Device& device = find_device(key.device);
  const ContextScope scope(device);
  std::vector<std::future<Cubin>> cubins = cubins_of(program.plan.passes);
  for (size_t i = 0; i < cubins.size(); ++i) {
    Pass& pass = program.plan.passes[i];
    try {
      const Cubin cubin = cubins[i].get();
      if (!cubin.warning.empty()) warning = cubin.warning;
      program.functions.push_back(function_of(pass, cubin.code, device));
    } catch (const CompilationFailed& error) {
      fail(slot, Failure(error.what(), pass.source, error.log, text));
    } catch (const DriverError& error) {
      if (is_lasting(error)) fail(slot, Failure(error.what(), pass.source, "", text));
      if (is_about_capture(error))
        throw std::runtime_error(std::string(error.what()) + "; call layer.warmup(batch) before the capture");
      throw;
    }
    program.places.push_back(places_of(pass, program.functions.back(), device));
    pass.source.clear();
  }
  return new Program(std::move(program));
}

}  // namespace

int batch_class(int64_t batch) {
  return int(std::lower_bound(std::begin(MOST_OF_CLASS), std::end(MOST_OF_CLASS), batch) - std::begin(MOST_OF_CLASS));
}

size_t KeyHash::operator()(const PlanKey& key) const {
  const size_t small = size_t(key.device) * 16 + size_t(key.batch_class) * 4 + size_t(key.dtype);
  return reinterpret_cast<size_t>(key.chain) / sizeof(Chain) * 31 + small;
}

bool PlanKey::operator==(const PlanKey& other) const {
  return chain == other.chain && dtype == other.dtype && batch_class == other.batch_class && device == other.device;
}

const Program* find_program(const PlanKey& key) {
  const Slot* slot = table.find(key);
  if (!slot) return nullptr;
  if (const Program* program = slot->program.load(std::memory_order_acquire)) return program;
  if (const Failure* failure = slot->failure.load(std::memory_order_acquire)) throw *failure;
  return nullptr;
}

const Failure* find_failure(const PlanKey& key) {
  const Slot* slot = table.find(key);
  return slot ? slot->failure.load(std::memory_order_acquire) : nullptr;
}

void remember_failure(const PlanKey& key, const Failure& failure) {
  slot_of(key).failure.store(new Failure(failure), std::memory_order_release);
}

const Program& build_program(const PlanKey& key, const std::string& plan, bool replace, const Warn& warn) {
  Slot& slot = slot_of(key);
  std::string warning;
  {
    std::lock_guard<std::mutex> lock(slot.building);
    const Failure* failure = slot.failure.load(std::memory_order_acquire);
    if (failure && !replace) throw *failure;  // of the thread that this one waited for
    if (replace || !slot.program) {
      slot.program.store(build(slot, key, plan, warning), std::memory_order_release);
      slot.failure.store(nullptr, std::memory_order_release);
    }
  }
  if (!warning.empty()) warn(warning);
  return *slot.program;
}

static Cubin cubin_of(const Pass& pass) {
  std::string options;
  for (const std::string& option : OPTIONS) options += (options.empty() ? "" : " ") + option;
  const cache::Key key{"kernel", pass.kernel, pass.architecture, options, find_compiler()->version, pass.source};
  if (std::optional<std::string> cubin = cache::load(key)) return {*cubin, ""};
  const std::string cubin = compile(pass.source, pass.kernel, pass.architecture, OPTIONS).cubin;
  static std::atomic<bool> warned{false};
  const std::string trouble = cache::store(key, cubin);
  return {cubin, !trouble.empty() && !warned.exchange(true) ? trouble : ""};
}

std::vector<std::future<Cubin>> cubins_of(const std::vector<Pass>& passes) {
  std::vector<std::future<Cubin>> cubins;
  for (const Pass& pass : passes) {
    const bool has_processor = cubins.size() < std::max(1u, std::thread::hardware_concurrency());
    const auto way = has_processor ? std::launch::async | std::launch::deferred : std::launch::deferred;
    cubins.push_back(std::async(way, [&pass] { return cubin_of(pass); }));
  }
  return cubins;
}

// What a kernel has behind its parameters.
struct Maps {
  alignas(64) char bytes[MOST_MAPS][128];

  Maps(const Pass& pass, const Params& params) {
    for (size_t i = 0; i < pass.maps.size(); ++i) {
      TensorMap map = pass.maps[i];
      if (map.has_samples) map.sizes[2] *= params.batch;
      const void* const tensor = map.weight < 0 ? params.x : params.weights[map.weight];
      encode_map(bytes[i], tensor, map.is_tf32, map.sizes, map.strides, map.box);
    }
  }
};

constexpr int64_t CHUNK = 8;

void run(const Program& program, Part part, int64_t x_row, int64_t y_row, const Device& device, const Params& params,
         void* const (&scratch)[MOST_SCRATCH], void* second, Stream stream, const Rows& rows) {
  const int64_t batch = params.batch, most = program.plan.chunk ? std::min(program.plan.chunk, batch) : batch;
  // Of about the same size, and of multiples of CHUNK samples, whose rows begin where kernels and the copy engine want them
  const int64_t chunks = (batch + most - 1) / most, each = (batch + chunks - 1) / chunks;
  const int64_t chunk = std::min(most, (each + CHUNK - 1) / CHUNK * CHUNK);
  Params given = params;
  given.sums = scratch[SUMS];
  for (int64_t first = 0; first < batch; first += chunk) {
    given.batch = std::min(chunk, batch - first);
    for (size_t i = 0; i < rows.bytes.size(); ++i)
      given.weights[rows.first + i] = static_cast<const char*>(params.weights[rows.first + i]) + first * rows.bytes[i];
    for (size_t i = 0; i < program.functions.size(); ++i) {
      const Pass& pass = program.plan.passes[i];
      if (part == (pass.in == Pass::none ? Part::samples : Part::weights)) continue;
      given.x = pass.in == Pass::none      ? nullptr
                : pass.in == Pass::outside ? static_cast<const char*>(params.x) + first * x_row
                : pass.in == Pass::weight  ? params.weights[pass.place]
                                           : scratch[pass.in - Pass::s0];
      if (pass.beside != Pass::none) given.weights[pass.beside_place] = scratch[pass.beside - Pass::s0];
      given.y = pass.out == Pass::outside  ? static_cast<char*>(params.y) + first * y_row
                : pass.out == Pass::second ? second
                : pass.out == Pass::weight ? const_cast<void*>(given.weights[pass.out_place])
                                           : scratch[pass.out - Pass::s0];
      int64_t blocks = 0;
      if (__builtin_mul_overflow(given.batch, pass.units_per_sample, &blocks)) blocks = INT64_MAX;
      blocks = blocks / pass.units_per_block + (blocks % pass.units_per_block != 0);
      if (pass.blocks_per_processor)  // all that the grid has, in both directions
        blocks = std::min(blocks, std::max<int64_t>(1, pass.blocks_per_processor * program.places[i] / pass.grid_y));
      if (blocks > INT32_MAX)
        throw std::runtime_error("factorlayer: a batch of " + std::to_string(batch) + " makes " +
                                 std::to_string(blocks) + " blocks, a launch can have 2147483647; split the batch");
      // Where all blocks start at once. Those of a longer grid come and go, and would all wait for what has long ended.
      const bool have_places = blocks * pass.grid_y <= program.places[i], at_once = pass.blocks_per_processor || have_places;
      Maps maps(pass, given);
      launch(program.functions[i], unsigned(blocks), unsigned(pass.grid_y), unsigned(pass.threads),
             unsigned(have_places ? bytes_apart(pass, device) : pass.shared_bytes),
             pass.together              ? Manner::together
             : pass.waits && at_once ? Manner::early
                                        : Manner::plain,
             stream, &given, &maps);
      given.weights[pass.beside_place] = params.weights[pass.beside_place];
    }
  }
}

}  // namespace factorlayer::cuda
