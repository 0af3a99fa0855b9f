// The state of the emulated GPU, and what is allowed in its shared memory. Vector clocks say what happened before what, so
// that a race shows in whatever order its two accesses came.
#pragma once
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

#include "emulator.h"

struct Index3 { unsigned x, y, z; };
extern Index3 threadIdx, blockIdx, gridDim;

// Goes on with the fiber whose stack pointer is `to`, and leaves that of this one at `from`.
extern "C" void switch_fiber(void** from, void* to);

namespace emulator {

using std::vector;
using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;

constexpr int kMostThreads = 2048, kMostWarps = kMostThreads / 32, kNobody = -1;
constexpr long kPatience = 20000;  // rounds of all threads in which nothing happens
constexpr size_t kStack = 256 << 10, kStagger = 1088, kPage = 4096;
constexpr u32 kPoison = 0x7fbadbad;  // of sums in flight: a NaN

inline int block_threads, cluster, shared_bytes;
inline int threads;  // of all blocks that run at once; the copy engine counts as one more
inline int current;  // thread
inline long rounds, last_progress;

inline u64 state;
inline u32 random_below(u32 limit) {
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return u32(state >> 32) % limit;
}

// Up to which step of each thread this thread knows all that was done (seen), knows it to be visible to the copy engine
// and the matrix unit, too (fenced), and which reads of each warp's matrix unit are over (products).
// The numbers of a kernel's threads lie side by side, and behind them nothing is ever touched: a clock is copied at every turn.
struct Clock {
  u32 numbers[2 * (kMostThreads + 1) + kMostWarps];
  Clock() { clear(); }
  Clock(const Clock& other) { *this = other; }
  Clock& operator=(const Clock& other) {
    std::copy_n(other.numbers, count(), numbers);
    return *this;
  }
  static int count() { return 2 * (threads + 1) + threads / 32; }
  u32* seen() { return numbers; }
  u32* fenced() { return numbers + threads + 1; }
  u32* products() { return numbers + 2 * (threads + 1); }
  void clear() { std::fill_n(numbers, count(), 0); }
  // Many numbers at a time, as how many there are is nothing that the loop might change.
  void join(const Clock& other) {
    for (int i = 0, end = count(); i < end; ++i) numbers[i] = std::max(numbers[i], other.numbers[i]);
  }
  void meet(const Clock& other) {  // which is nothing of products
    for (int i = 0, end = 2 * (threads + 1); i < end; ++i) numbers[i] = std::min(numbers[i], other.numbers[i]);
  }
};
using Snapshot = std::shared_ptr<Clock>;

struct Copy {
  u32 to, bytes;
  const void* from;
  u32 read;  // zeros behind these bytes
};
struct Store {
  void* to;
  u32 from, bytes;
};
// Products of one group, with what was known when it was committed.
struct GroupProduct {
  Kind kind;
  int n;
  float* sums;
  const u32* registers;
  u32 held[4];  // what they were
  u64 a, b;
  bool add, left_turned, turned;  // A, if it is in shared memory, and B
};
struct Group {
  vector<GroupProduct> products;
  Snapshot clock;
};
struct Thread {
  void* stack = nullptr;
  bool done = false;
  bool (*is_ready)(const void* awaited) = nullptr;  // whether it need not wait any more, without its own turn
  alignas(8) u8 awaited[32];
  long arrived = -1;  // at the cluster's barrier, and waits for more meetings than these
  long met = 0;  // how often, at barriers of its block
  vector<Copy> copies;  // since the last commit
  std::deque<vector<Copy>> copy_groups;
  vector<Store> stores;
  bool opened = false;
  long committed = 0;
  u32 waits = 0;  // for products
  vector<GroupProduct> products;
  std::deque<Group> groups;
  std::map<float*, vector<float>> in_flight;  // sums
  int landings = 0;  // of its own that are still to come
  Clock clock;
};
inline vector<Thread> all;
inline void* scheduler;

inline std::set<std::string> said;
template <class... Args> void error(const char* format, Args... args) {
  if (!said.insert(format).second) return;
  printf("thread %d of block %u, %u: ", current % block_threads, blockIdx.x, blockIdx.y);
  if constexpr (sizeof...(args) > 0)
    printf(format, args...);
  else
    fputs(format, stdout);
  puts("");
  fflush(stdout);
}

inline Thread& self() { return all[current]; }
inline u32& step() { return self().clock.seen()[current]; }
inline void progress() { last_progress = rounds; }
inline void pause() { switch_fiber(&self().stack, scheduler); }
inline int hesitation = 8;
inline void hesitate() {
  if (random_below(hesitation) == 0) pause();
}
inline bool is_patient() { return rounds - last_progress <= kPatience; }
template <class Ready> void wait_until(const char* what, Ready ready) {
  static_assert(std::is_trivially_copyable_v<Ready> && sizeof ready <= sizeof self().awaited);
  while (!ready()) {
    if (!is_patient()) {
      error("nobody goes on; this one waits for %s", what);
      std::_Exit(1);
    }
    memcpy(self().awaited, &ready, sizeof ready);
    self().is_ready = [](const void* awaited) { return (*static_cast<const Ready*>(awaited))(); };
    pause();
  }
  self().is_ready = nullptr;
  progress();
}
inline bool waits(const Thread& thread) {
  return thread.is_ready && is_patient() && !thread.is_ready(thread.awaited);
}

// Whether this thread comes after what another one did at some step.
inline bool after(int thread, u32 at) {
  return thread == kNobody || thread == current || self().clock.seen()[thread] >= at;
}
inline bool after_fence(int thread, u32 at) {
  return thread == kNobody || thread == threads || self().clock.fenced()[thread] >= at;
}

// Two bytes of shared memory: who wrote and read them last, and when; asynchronous copies that write and read them.
struct Cell {
  short writer = kNobody, reader = kNobody;
  u32 written = 0, read = 0;
  u8 arriving = 0, leaving = 0;
  bool is_barrier = false;
};
struct Barrier {
  int count, left;
  long bytes = 0;  // that are still to come
  u32 phase = 0;
  Clock gathered, done;
  int maker;
  u32 made;
};
struct Meeting {
  int here = 0, wanted = 0;
  long met = 0;  // how often those here have
  bool any = false, any_then = false;  // of those here, and of the last meeting
  long count = 0;
  Clock gathered, done;
};
struct Block {
  vector<Cell> cells;
  vector<u32> products;  // for 16 bytes and each warp: its last wait for products that read them
  bool has_products = false;
  u8* memory;
  Meeting meetings[16];
};
inline vector<Block> blocks;
inline std::map<u32, Barrier> barriers;  // by block and address
inline std::map<const void*, Clock> counts;  // what is known to who has counted, by the counter

// Blocks of a cluster see each other's memory at addresses with the block in the upper bits.
inline int block_of(u32 address) { return address >> 24 ? int(address >> 24) - 1 : current / block_threads; }
inline u32 offset_of(u32 address) { return (address & 0xffffff) - kBase; }
inline u8* memory_at(u32 address) { return blocks[block_of(address)].memory + offset_of(address); }
struct Cells {
  Cell *first, *last;
  Cell* begin() const { return first; }
  Cell* end() const { return last; }
};
inline Cells cells_at(u32 address, u32 bytes) {
  Cell* first = &blocks[block_of(address)].cells[offset_of(address) / 2];
  return {first, first + (bytes + 1) / 2};
}
inline bool is_inside(const char* what, u32 address, u32 bytes) {
  const u32 at = offset_of(address);
  if (at + u64(bytes) > u64(shared_bytes) || block_of(address) >= cluster) {
    error("%s of %u bytes at %u of %d bytes of shared memory", what, bytes, at, shared_bytes);
    return false;
  }
  return true;
}

inline void check_write(const char* what, u32 to, u32 bytes) {
  for (Cell& cell : cells_at(to, bytes)) {
    const u32 at = offset_of(to);
    if (cell.is_barrier) error("%s over a barrier at %u", what, at);
    if (cell.arriving) error("%s at %u, where a copy has not landed yet", what, at);
    if (cell.leaving) error("%s at %u, which the copy engine has not read yet", what, at);
    if (!after(cell.writer, cell.written)) error("race: %s at %u and a write of thread %d", what, at, cell.writer);
    if (!after(cell.reader, cell.read)) error("race: %s at %u and a read of thread %d", what, at, cell.reader);
    cell.writer = short(current), cell.written = step();
  }
  if (!blocks[block_of(to)].has_products) return;
  const int warps = threads / 32;
  const u32* products = &blocks[block_of(to)].products[offset_of(to) / 16 * warps];
  for (const u32* end = products + (bytes + 15) / 16 * warps; products != end; products += warps)
    for (int warp = 0; warp < warps; ++warp)
      if (products[warp] > self().clock.products()[warp])
        error("race: %s at %u and the matrix unit of warp %d, which reads it", what, offset_of(to), warp);
}
inline void check_read(const char* what, u32 from, u32 bytes) {
  for (Cell& cell : cells_at(from, bytes)) {
    const u32 at = offset_of(from);
    if (cell.is_barrier) error("%s of a barrier at %u", what, at);
    if (cell.arriving) error("%s at %u, where a copy has not landed yet", what, at);
    if (!after(cell.writer, cell.written)) error("race: %s at %u and a write of thread %d", what, at, cell.writer);
    // Of readers side by side either may stay: over many runs, a write meets them all.
    if (after(cell.reader, cell.read) || random_below(2)) cell.reader = short(current), cell.read = step();
  }
}
inline u8 nowhere[64];

struct Buffer {
  u8* begin;
  size_t bytes;
  bool is_output, is_given;  // what a pass before this one has written may be read, as long as it is there
  bool is_scratch = false;  // that blocks write and read, in turn
};
inline vector<Buffer> buffers;
inline vector<u8> times_written;
inline void check_global(const char* what, const void* at, u32 bytes, bool writes, u32 unit = 0) {
  if (u64(at) % std::min(unit ? unit : bytes, 16u)) error("%s of %u bytes that is not aligned in memory", what, bytes);
  const u8* begin = static_cast<const u8*>(at);
  for (const Buffer& buffer : buffers) {
    if (begin < buffer.begin || begin + bytes > buffer.begin + buffer.bytes) continue;
    if (buffer.is_scratch) return;
    if (writes ? !buffer.is_output : buffer.is_output && !buffer.is_given) continue;
    for (u32 i = 0; !writes && buffer.is_given && i < bytes; ++i)
      if (times_written[begin - buffer.begin + i]) error("%s of what has been written over", what);
    for (u32 i = 0; writes && i < bytes; ++i)
      if (times_written[begin - buffer.begin + i]++) error("output written twice, at byte %ld", begin - buffer.begin);
    return;
  }
  error("%s of %u bytes outside of the tensors", what, bytes);
}

inline void land(const Copy& copy) {
  for (Cell& cell : cells_at(copy.to, copy.bytes)) --cell.arriving;
  if (copy.read) memcpy(memory_at(copy.to), copy.from, copy.read);
  memset(memory_at(copy.to) + copy.read, 0, copy.bytes - copy.read);
}
inline void begin_copy(const Copy& copy) {
  for (Cell& cell : cells_at(copy.to, copy.bytes)) ++cell.arriving;
  memset(memory_at(copy.to), 0xff, copy.bytes);
}

// What will have happened some time later: copies, and then an arrival of a thread or of bytes.
struct Landing {
  long due;
  int thread;
  vector<Copy> copies;
  Barrier* barrier;
  Clock clock;
  long bytes;
  u32 from = 0;  // if it comes from shared memory
  vector<u32> words = {};  // if it comes from registers
  std::shared_ptr<vector<u8>> made = nullptr;  // what is copied, if it is not as it lies in memory
};
constexpr u32 kSlowest = 128;  // rounds that a landing takes, fewer than these
struct Put { long number; std::unique_ptr<Landing> landing; };  // the first to be put off lands first
inline vector<Put> due_in[kSlowest];  // by the round
inline long put_off_so_far, still_to_land;
inline u32 slowest_landing = 8;
void land_what_is_due(bool all_of_it = false, int thread = kNobody);

}  // namespace emulator
