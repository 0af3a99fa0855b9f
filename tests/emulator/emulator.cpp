// Runs one kernel on a CPU and says what is wrong with it: called by driver.py, which makes a library of the kernel.
//
//     emulator KERNEL FOLDER SEED BATCH OUTPUT_BYTES SHARED THREADS CLUSTER GRID_X GRID_Y BIAS WEIGHTS SUMS STATE...
//
// reads x, bias, w0 ... from the folder, writes y there, and prints a line for each kind of error. Where a kernel has sums
// beside its output, they are its bytes from SUMS on; states that it stores as well begin at STATE. Of its tensor maps, each
// has a line in maps. Blocks run one after the
// other (those of a cluster at once), their warps in random order.
#include <dlfcn.h>
#include <sys/mman.h>

#include <fstream>
#include <iterator>

#include "machine.h"

Index3 threadIdx, blockIdx, gridDim;

struct Params {  // as in params.cuh
  const void* x;
  void* y;
  const void* bias;
  long long batch;
  const void* weights[62];
  void* sums;
} params;
std::vector<emulator::TensorMap> maps;
void (*run_kernel)(const void* params, const void* maps);  // of the library

asm(R"(
.text
.globl switch_fiber
switch_fiber:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi); movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
)");

namespace emulator {
namespace {

u8* map(size_t bytes) {
  return static_cast<u8*>(
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
}
// Touching the page ends the process. Linux 6.13 marks it; before, the mapping is split in two, which takes longer.
void forbid(u8* page) {
  constexpr int kInstallGuard = 102;  // MADV_GUARD_INSTALL, which older headers do not have
  if (madvise(page, kPage, kInstallGuard)) mprotect(page, kPage, PROT_NONE);
}
// A tensor whose end, rounded up to 16 bytes, is the end of a page behind which nothing may be touched.
u8* map_tensor(const std::string& path, size_t bytes) {
  vector<char> data(bytes, char(0xff));
  if (!path.empty()) {
    std::ifstream file(path, std::ios::binary);
    data.assign(std::istreambuf_iterator<char>(file), {});
  }
  const size_t padded = (data.size() + 15) / 16 * 16, whole = (padded + kPage - 1) / kPage * kPage;
  u8* memory = map(whole + 2 * kPage);
  memset(memory + kPage, 0xff, whole);
  mprotect(memory, kPage, PROT_NONE), mprotect(memory + kPage + whole, kPage, PROT_NONE);
  u8* begin = memory + kPage + whole - padded;
  memcpy(begin, data.data(), data.size());
  buffers.push_back({begin, data.size(), path.empty(), false});
  return begin;
}

void begin_thread() {
  run_kernel(&params, maps.data());
  self().done = true;
  progress();
  pause();
}

void run_blocks(u8* stacks) {
  blocks.assign(cluster, Block());
  for (Block& block : blocks) {
    block.cells.resize(shared_bytes / 2 + 8), block.products.resize((shared_bytes / 16 + 1) * (threads / 32));
    block.memory = static_cast<u8*>(aligned_alloc(1024, (shared_bytes + 2047) / 1024 * 1024));
    memset(block.memory, 0xff, shared_bytes);
  }
  barriers.clear(), counts.clear(), still_to_land = 0;
  for (auto& puts : due_in) puts.clear();
  all.assign(threads, Thread());
  for (int i = 0; i < threads; ++i) {
    all[i].clock.seen()[i] = 1;
    // Beginnings that lie apart by one and the same power of two would meet in the processor's cache.
    void** stack = reinterpret_cast<void**>(stacks + kStack * (i + 1) - 64 - i % 61 * kStagger);
    *--stack = nullptr, *--stack = reinterpret_cast<void*>(begin_thread);
    for (int saved = 0; saved < 6; ++saved) *--stack = nullptr;
    all[i].stack = stack;
  }
  // Warps run in any order; one, or a whole warpgroup, may be held back for long.
  const int warps = threads / 32;
  vector<int> order(warps), held(warps, 0);
  for (int i = 0; i < warps; ++i) order[i] = i;
  hesitation = 4 + random_below(40), slowest_landing = 1 + random_below(100);
  const int longest = random_below(2) ? 200 : 4;
  const bool holds_groups = warps % 4 == 0 && random_below(2);
  rounds = last_progress = 0;
  for (int left = threads; left > 0; ++rounds) {
    if (rounds % 16 == 0)
      for (int i = warps - 1; i > 0; --i) std::swap(order[i], order[random_below(i + 1)]);
    if (random_below(16) == 0) held[random_below(warps)] = random_below(longest);
    if (holds_groups && random_below(64) == 0) {
      const int group = random_below(warps / 4) * 4, count = random_below(400);
      for (int i = 0; i < 4; ++i) held[group + i] = count;
    }
    land_what_is_due();
    for (int warp : order) {
      if (held[warp] > 0) {
        --held[warp];
        continue;
      }
      for (int i = 0, first = random_below(32); i < 32; ++i) {
        current = warp * 32 + (first + i) % 32;
        if (self().done || waits(self())) continue;
        const Index3 first_block = blockIdx;
        threadIdx = {u32(current % block_threads), 0, 0}, blockIdx.y += current / block_threads;
        switch_fiber(&scheduler, self().stack);
        blockIdx = first_block;
        left -= self().done;
      }
    }
  }
  for (current = 0; current < threads; ++current) {
    const Thread& thread = self();
    bool has_copies = !thread.copies.empty();
    for (const auto& group : thread.copy_groups) has_copies |= !group.empty();
    if (has_copies) error("copies that nobody has waited for");
    if (!thread.stores.empty()) error("stores that nobody has waited for");
    if (thread.arrived >= 0) error("an arrival at the cluster's barrier that nobody has waited for");
    if (!thread.groups.empty() || !thread.products.empty()) error("products that nobody has waited for");
  }
  current = 0;
  if (still_to_land) error("copies that nobody has waited for");
  for (Block& block : blocks) free(block.memory);
}

}  // namespace
}  // namespace emulator

int main(int count, char** arguments) {
  using namespace emulator;
  const char* const kernel = *++arguments;
  --count;
  const std::string folder = arguments[1];
  const auto number = [&](int i) { return atoll(arguments[i]); };
  state = number(2) * 0x9e3779b97f4a7c15u + 1;
  for (int i = 0; i < 20; ++i) random_below(1);
  params.batch = number(3);
  const size_t bytes = number(4);
  shared_bytes = int(number(6)), block_threads = int(number(7)), cluster = int(number(8));
  threads = block_threads * cluster;
  if (threads > kMostThreads) error("%d threads of a cluster, the emulator has room for %d", threads, kMostThreads), std::_Exit(1);
  gridDim = {unsigned(number(9)), unsigned(number(10)), 1};
  void* const library = dlopen(kernel, RTLD_NOW);
  if (!library) error("%s", dlerror()), std::_Exit(1);
  run_kernel = reinterpret_cast<decltype(run_kernel)>(dlsym(library, "run_kernel"));
  params.x = map_tensor(folder + "/x", 0);
  if (number(11)) params.bias = map_tensor(folder + "/bias", 0);
  for (int i = 0; i < number(12); ++i) {
    if (int64_t value; std::ifstream(folder + "/n" + std::to_string(i)) >> value)  // a number in a tensor's place
      params.weights[i] = reinterpret_cast<void*>(value);
    else
      params.weights[i] = map_tensor(folder + "/w" + std::to_string(i), 0);
  }
  if (number(11)) params.weights[number(12)] = params.bias;  // where a stack's layer has it
  params.y = map_tensor("", bytes);
  std::ifstream before(folder + "/before", std::ios::binary);  // what a pass before this one has written there
  buffers.back().is_given = bool(before.read(static_cast<char*>(params.y), bytes));
  params.sums = number(13) < 0 ? map_tensor(folder + "/chunks", 0) : static_cast<u8*>(params.y) + number(13);
  if (const std::string scratch = folder + "/scratch"; std::ifstream(scratch))
    params.sums = map_tensor(scratch, 0), buffers.back().is_scratch = true;
  for (int i = 14; i < count; ++i) params.weights[number(12) + i - 14] = static_cast<u8*>(params.y) + number(i);
  u8* const output = static_cast<u8*>(params.y);
  if (std::ifstream left(folder + "/left"); left) {  // scratch: who makes it has it as x, and who reads it as y
    if (left.peek() == std::ifstream::traits_type::eof())
      params.x = output + number(14), params.weights[number(12)] = nullptr;
    else
      params.y = map_tensor(folder + "/left", 0);
  }
  std::ifstream of_maps(folder + "/maps");  // of each x or the weight's number, its elements, sizes, strides and box
  for (std::string of, elements; of_maps >> of >> elements;) {
    maps.push_back({of == "x" ? params.x : params.weights[std::stoi(of)], elements == "tf32"});
    for (auto& size : maps.back().sizes) of_maps >> size;
    for (auto& stride : maps.back().strides) of_maps >> stride;
    for (auto& size : maps.back().box) of_maps >> size;
    if (of == "x" || of.back() == '*') maps.back().sizes[2] *= params.batch;
  }
  times_written.assign(bytes, 0);

  u8* stacks = map(kStack * threads);
  for (int i = 0; i < threads; ++i) forbid(stacks + kStack * i);
  for (unsigned y = 0; y < gridDim.y; y += cluster)
    for (unsigned x = 0; x < gridDim.x; ++x) {
      blockIdx = {x, y, 0};
      run_blocks(stacks);
    }
  const long missing = std::count(times_written.begin(), times_written.end(), 0);
  if (missing != number(5)) error("%ld bytes of the output not written, and %ld behind tensors", missing, number(5));
  std::ofstream(folder + "/y", std::ios::binary).write(reinterpret_cast<const char*>(output), bytes);
  return said.empty() ? 0 : 1;
}
