// Runs one kernel on a CPU and says what is wrong with it: called by driver.py, which builds it with the kernel.
//
//     emulator FOLDER SEED BATCH OUTPUT_BYTES SHARED THREADS CLUSTER GRID_X GRID_Y BIAS WEIGHTS
//
// reads x, bias, w0 ... from the folder, writes y there, and prints a line for each kind of error. Blocks run one after
// the other (two at once, if they are a cluster); the order of their warps is random. Vector clocks say what happened
// before what, so that a race shows in whatever order its two accesses came.
#include "emulator.h"

#include <immintrin.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

struct Index3 { unsigned x, y, z; };
Index3 threadIdx, blockIdx, gridDim;

struct Params {  // as in csrc/engine/params.cuh
  const void* x;
  void* y;
  const void* bias;
  long long batch;
  const void* weights[62];
} params;
void run_kernel(const void* params);  // the driver writes it

// Goes on with the fiber whose stack pointer is `to`, and leaves that of this one at `from`.
extern "C" void switch_fiber(void** from, void* to);
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

using std::vector;
using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;

constexpr int kMostThreads = 1024, kMostWarps = kMostThreads / 32, kNobody = -1;
constexpr long kPatience = 20000;  // rounds of all threads in which nothing happens
constexpr size_t kStack = 256 << 10, kPage = 4096;
constexpr u32 kPoison = 0x7fbadbad;  // of sums in flight: a NaN

int block_threads, cluster, shared_bytes;
int threads;  // of all blocks that run at once; the copy engine counts as one more
int current;  // thread
long rounds, last_progress;

u64 state;
u32 random_below(u32 limit) {
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return u32(state >> 32) % limit;
}

// Up to which step of each thread this thread knows all that was done (seen), knows it to be visible to the copy engine
// and the matrix unit, too (fenced), and which reads of each warp's matrix unit are over.
struct Clock {
  u32 seen[kMostThreads + 1] = {}, fenced[kMostThreads + 1] = {}, products[kMostWarps] = {};
  void join(const Clock& other) {
    for (int i = 0; i <= threads; ++i) seen[i] = std::max(seen[i], other.seen[i]);
    for (int i = 0; i <= threads; ++i) fenced[i] = std::max(fenced[i], other.fenced[i]);
    for (int i = 0; i < kMostWarps; ++i) products[i] = std::max(products[i], other.products[i]);
  }
  void meet(const Clock& other) {
    for (int i = 0; i <= threads; ++i) seen[i] = std::min(seen[i], other.seen[i]);
    for (int i = 0; i <= threads; ++i) fenced[i] = std::min(fenced[i], other.fenced[i]);
  }
};
using Snapshot = std::shared_ptr<Clock>;

struct Copy {
  u32 to, bytes;
  const void* from;  // null: zeros
};
struct Store {
  void* to;
  u32 from, bytes;
};
// Products of one group, with what was known when it was committed.
struct Product {
  Kind kind;
  int n;
  float* sums;
  const u32* registers;
  u32 held[4];  // what they were
  u64 a, b;
  bool add;
};
struct Group {
  vector<Product> products;
  Snapshot clock;
};
struct Thread {
  void* stack = nullptr;
  bool done = false;
  Clock clock;
  vector<Copy> copies;  // since the last commit
  std::deque<vector<Copy>> copy_groups;
  vector<Store> stores;
  bool opened = false;
  long committed = 0;
  u32 waits = 0;  // for products
  vector<Product> products;
  std::deque<Group> groups;
  std::map<float*, vector<float>> in_flight;  // sums
};
vector<Thread> all;
void* scheduler;

std::set<std::string> said;
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

Thread& self() { return all[current]; }
u32& step() { return self().clock.seen[current]; }
void progress() { last_progress = rounds; }
void pause() { switch_fiber(&self().stack, scheduler); }
int hesitation = 8;
void hesitate() {
  if (random_below(hesitation) == 0) pause();
}
template <class Ready> void wait_until(const char* what, Ready ready) {
  while (!ready()) {
    if (rounds - last_progress > kPatience) {
      error("nobody goes on; this one waits for %s", what);
      std::_Exit(1);
    }
    pause();
  }
  progress();
}

bool after(int thread, u32 at) { return thread == kNobody || thread == current || self().clock.seen[thread] >= at; }
bool after_fence(int thread, u32 at) {
  return thread == kNobody || thread == threads || self().clock.fenced[thread] >= at;
}

// Two bytes of shared memory: who wrote and read them last, and when; asynchronous copies that write and read them.
struct Cell {
  short writer = kNobody, reader = kNobody;
  u32 written = 0, read = 0;
  u8 arriving = 0, leaving = 0;
  bool is_barrier = false;
};
struct Barrier {
  int block, count, left;
  long bytes = 0;  // that are still to come
  u32 phase = 0;
  Clock gathered, done;
  int maker;
  u32 made;
};
struct Meeting {
  int here = 0, wanted = 0;
  long count = 0;
  Clock gathered, done;
};
struct Block {
  vector<Cell> cells;
  vector<u32> products;  // for 16 bytes and each warp: its last wait for products that read them
  u8* memory;
  Meeting meetings[16];
};
vector<Block> blocks;
std::map<u32, Barrier> barriers;  // by block and address

// Blocks of a cluster see each other's memory at addresses with the block in the upper bits.
int block_of(u32 address) { return address >> 24 ? int(address >> 24) - 1 : current / block_threads; }
u32 offset_of(u32 address) { return (address & 0xffffff) - kBase; }
u8* memory_at(u32 address) { return blocks[block_of(address)].memory + offset_of(address); }
Cell* cell_at(u32 address) { return &blocks[block_of(address)].cells[offset_of(address) / 2]; }
bool is_inside(const char* what, u32 address, u32 bytes) {
  const u32 at = offset_of(address);
  if (at + u64(bytes) > u64(shared_bytes) || block_of(address) >= cluster) {
    error("%s of %u bytes at %u of %d bytes of shared memory", what, bytes, at, shared_bytes);
    return false;
  }
  return true;
}

void check_write(const char* what, u32 to, u32 bytes) {
  for (Cell *cell = cell_at(to), *end = cell + (bytes + 1) / 2; cell != end; ++cell) {
    const u32 at = offset_of(to);
    if (cell->is_barrier) error("%s over a barrier at %u", what, at);
    if (cell->arriving) error("%s at %u, where a copy has not landed yet", what, at);
    if (cell->leaving) error("%s at %u, which the copy engine has not read yet", what, at);
    if (!after(cell->writer, cell->written)) error("race: %s at %u and a write of thread %d", what, at, cell->writer);
    if (!after(cell->reader, cell->read)) error("race: %s at %u and a read of thread %d", what, at, cell->reader);
    cell->writer = short(current), cell->written = step();
  }
  const u32* products = &blocks[block_of(to)].products[offset_of(to) / 16 * kMostWarps];
  for (const u32* end = products + (bytes + 15) / 16 * kMostWarps; products != end; products += kMostWarps)
    for (int warp = 0; warp < threads / 32; ++warp)
      if (products[warp] > self().clock.products[warp])
        error("race: %s at %u and the matrix unit of warp %d, which reads it", what, offset_of(to), warp);
}
void check_read(const char* what, u32 from, u32 bytes) {
  for (Cell *cell = cell_at(from), *end = cell + (bytes + 1) / 2; cell != end; ++cell) {
    const u32 at = offset_of(from);
    if (cell->is_barrier) error("%s of a barrier at %u", what, at);
    if (cell->arriving) error("%s at %u, where a copy has not landed yet", what, at);
    if (!after(cell->writer, cell->written)) error("race: %s at %u and a write of thread %d", what, at, cell->writer);
    cell->reader = short(current), cell->read = step();
  }
}
u8 nowhere[64];

struct Buffer {
  u8* begin;
  size_t bytes;
  bool is_output;
};
vector<Buffer> buffers;
vector<u8> times_written;
void check_global(const char* what, const void* at, u32 bytes, bool writes) {
  if (u64(at) % std::min(bytes, 16u)) error("%s of %u bytes that is not aligned in memory", what, bytes);
  const u8* begin = static_cast<const u8*>(at);
  for (const Buffer& buffer : buffers) {
    if (begin < buffer.begin || begin + bytes > buffer.begin + buffer.bytes || writes != buffer.is_output) continue;
    for (u32 i = 0; writes && i < bytes; ++i)
      if (times_written[begin - buffer.begin + i]++) error("output written twice, at byte %ld", begin - buffer.begin);
    return;
  }
  error("%s of %u bytes outside of the tensors", what, bytes);
}

void land(const Copy& copy) {
  for (Cell *cell = cell_at(copy.to), *end = cell + copy.bytes / 2; cell != end; ++cell) --cell->arriving;
  if (copy.from)
    memcpy(memory_at(copy.to), copy.from, copy.bytes);
  else
    memset(memory_at(copy.to), 0, copy.bytes);
}
void begin_copy(const Copy& copy) {
  for (Cell *cell = cell_at(copy.to), *end = cell + copy.bytes / 2; cell != end; ++cell) ++cell->arriving;
  memset(memory_at(copy.to), 0xff, copy.bytes);
}

u32 key_of(u32 barrier) { return u32(block_of(barrier)) << 24 | offset_of(barrier); }
Barrier* find_barrier(u32 address) {
  const auto found = barriers.find(key_of(address));
  if (found == barriers.end()) {
    error("a barrier at %u that nobody has made", offset_of(address));
    std::_Exit(1);
  }
  if (!after(found->second.maker, found->second.made))
    error("race: use of a barrier at %u and its making", offset_of(address));
  return &found->second;
}
void settle(Barrier& barrier) {
  if (barrier.left > 0 || barrier.bytes != 0) return;
  barrier.left = barrier.count, ++barrier.phase;
  barrier.done = barrier.gathered, barrier.gathered = Clock();
  progress();
}
void arrive_at(Barrier& barrier, const Clock& clock) {
  barrier.gathered.join(clock);
  if (--barrier.left < 0) error("more arrivals at a barrier than it counts");
  settle(barrier);
}

// What will have happened some time later: copies, and then an arrival of a thread or of bytes.
struct Landing {
  long due;
  int thread;
  vector<Copy> copies;
  Barrier* barrier;
  Clock clock;
  long bytes;
};
std::deque<Landing> landings;
u32 slowest_landing = 8;
void land_what_is_due(bool all_of_it = false, int thread = kNobody) {
  for (auto landing = landings.begin(); landing != landings.end();) {
    if (!(landing->due <= rounds || (all_of_it && landing->thread == thread))) {
      ++landing;
      continue;
    }
    std::swap(current, landing->thread);
    for (const Copy& copy : landing->copies) land(copy);
    std::swap(current, landing->thread);
    if (landing->bytes) {
      landing->barrier->gathered.join(landing->clock);
      landing->barrier->bytes -= landing->bytes;
      settle(*landing->barrier);
    } else {
      arrive_at(*landing->barrier, landing->clock);
    }
    landing = landings.erase(landing);
  }
}

// Lanes of a warp that do something at once, which orders no memory.
struct Gathering {
  void* of_lanes[32];
  const char* what;
  int here = 0;
  long count = 0;
} gatherings[kMostWarps];
Meeting whole_cluster, warp_meetings[kMostWarps];

void meet_at(Meeting& meeting, int wanted, const char* what) {
  hesitate();
  if (meeting.here && meeting.wanted != wanted) error("%s with %d and %d threads", what, wanted, meeting.wanted);
  meeting.wanted = wanted;
  meeting.gathered.join(self().clock);
  ++step();
  const long count = meeting.count;
  if (++meeting.here == wanted) {
    meeting.here = 0, ++meeting.count;
    meeting.done = meeting.gathered, meeting.gathered = Clock();
  }
  wait_until(what, [&] { return meeting.count != count; });
  self().clock.join(meeting.done);
}

// A group of products, for one warp.
u32 operand_address(u64 description, int row, int half) {
  constexpr u64 kKnown = u64(1) << 16 | u64(64) << 32 | u64(1) << 62;
  if ((description & ~u64(0x3fff)) != kKnown) error("an operand is described as %lx", description);
  const u32 slab = u32(description & 0x3fff) << 4;
  if (slab % 1024 & ~0x60u) error("an operand begins at %u: no multiple of 1024, and 32 for each step", slab);
  const u32 at = slab + row / 8 * 1024 + row % 8 * 128 + half * 16;
  return at ^ (at >> 7 & 7) << 4;
}
const u8* read_operand(u32 at, const Clock& known, u32 wait) {
  if (!is_inside("a matrix unit's read", at, 16)) return nowhere;
  for (Cell *cell = cell_at(at), *end = cell + 8; cell != end; ++cell) {
    if (cell->is_barrier) error("a matrix unit reads a barrier at %u", offset_of(at));
    if (cell->arriving) error("a matrix unit reads at %u, where a copy has not landed yet", offset_of(at));
    if (cell->writer == kNobody || cell->writer == threads) continue;
    if (known.seen[cell->writer] < cell->written)
      error("race: a matrix unit reads at %u what thread %d writes", offset_of(at), cell->writer);
    else if (known.fenced[cell->writer] < cell->written)
      error("no fence: a matrix unit reads at %u what thread %d wrote", offset_of(at), cell->writer);
  }
  blocks[current / block_threads].products[offset_of(at) / 16 * kMostWarps + current / 32] = wait;
  return memory_at(at);
}
float value(Kind kind, const u8* from) {
  u32 bits = 0;
  memcpy(&bits, from, kind == Kind::tf32 ? 4 : 2);
  if (kind == Kind::f16) return float_of_f16(u16(bits));
  bits = kind == Kind::bf16 ? bits << 16 : truncated_to_tf32(bits);
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
void make_products(Thread* lanes, size_t number, u32 wait) {
  const Group& group = lanes[0].groups[number];
  Clock known = *group.clock;
  for (int lane = 1; lane < 32; ++lane) {
    const Group& its = lanes[lane].groups[number];
    if (its.products.size() != group.products.size()) return error("lanes have other products than others");
    known.meet(*its.clock);
  }
  static float a[16][16], b[256][16];
  for (size_t i = 0; i < group.products.size(); ++i) {
    const Product& product = group.products[i];
    const int size = product.kind == Kind::tf32 ? 4 : 2, each = 16 / size;
    const auto load = [&](float* row, u64 description, int r) {
      for (int half = 0; half < 2; ++half) {
        const u8* from = read_operand(operand_address(description, r, half), known, wait);
        for (int k = 0; k < each; ++k) row[half * each + k] = value(product.kind, from + k * size);
      }
    };
    for (int r = 0; r < product.n; ++r) load(b[r], product.b, r);
    for (int r = 0; r < 16 && !product.registers; ++r) load(a[r], product.a, current / 32 % 4 * 16 + r);
    for (int lane = 0; lane < 32; ++lane) {
      const Product& its = lanes[lane].groups[number].products[i];
      if (its.b != product.b || its.n != product.n || its.add != product.add || (!its.registers && its.a != product.a))
        return error("lanes have other products than others");
      if (!its.registers) continue;
      if (memcmp(its.registers, its.held, 16)) error("registers of an operand changed in flight");
      for (int word = 0; word < 4; ++word)
        for (int k = 0; k < 4 / size; ++k)
          a[lane / 4 + word % 2 * 8][word / 2 * each + lane % 4 * (4 / size) + k] =
              value(product.kind, reinterpret_cast<const u8*>(&its.held[word]) + k * size);
    }
    for (int lane = 0; lane < 32; ++lane) {
      float* sums = lanes[lane].in_flight[lanes[lane].groups[number].products[i].sums].data();
      for (int j = 0; j < product.n / 2; ++j) {
        const float *left = a[lane / 4 + j / 2 % 2 * 8], *right = b[j / 4 * 8 + lane % 4 * 2 + j % 2];
        float sum = 0;
        for (int k = 0; k < 2 * each; ++k) sum += left[k] * right[k];
        sums[j] = product.add ? sums[j] + sum : sum;
      }
    }
  }
}
// Sums that no product changes any more are the thread's own again.
void return_sums(Thread& thread) {
  for (auto sums = thread.in_flight.begin(); sums != thread.in_flight.end();) {
    const bool is_used = std::any_of(thread.groups.begin(), thread.groups.end(), [&](const Group& group) {
      return std::any_of(group.products.begin(), group.products.end(),
                         [&](const Product& product) { return product.sums == sums->first; });
    });
    if (is_used) {
      ++sums;
      continue;
    }
    for (size_t i = 0; i < sums->second.size(); ++i)
      if (memcmp(&sums->first[i], &kPoison, 4)) error("sums touched in flight");
    std::copy(sums->second.begin(), sums->second.end(), sums->first);
    sums = thread.in_flight.erase(sums);
  }
}

}  // namespace

void* read(uint32_t from, uint32_t bytes) {
  if (offset_of(from) % bytes) error("a read of %u bytes at %u, not aligned", bytes, offset_of(from));
  if (!is_inside("a read", from, bytes)) return nowhere;
  check_read("a read", from, bytes);
  return memory_at(from);
}
void* write(uint32_t to, uint32_t bytes) {
  if (offset_of(to) % bytes) error("a write of %u bytes at %u, not aligned", bytes, offset_of(to));
  if (!is_inside("a write", to, bytes)) return nowhere;
  check_write("a write", to, bytes);
  return memory_at(to);
}
void read_global(const void* from, uint32_t bytes) { check_global("a read", from, bytes, false); }
void write_global(void* to, uint32_t bytes) { check_global("a write", to, bytes, true); }

void copy(uint32_t to, const void* from, uint32_t bytes, bool present) {
  if (present) check_global("a copy", from, bytes, false);
  if (offset_of(to) % bytes) error("a copy of %u bytes to %u, not aligned", bytes, offset_of(to));
  if (!is_inside("a copy", to, bytes)) return;
  check_write("a copy", to, bytes);
  self().copies.push_back({to, bytes, present ? from : nullptr});
  begin_copy(self().copies.back());
}
void commit_copies() {
  self().copy_groups.push_back(std::move(self().copies));
  self().copies.clear();
}
void wait_for_copies(int pending) {
  hesitate();
  land_what_is_due(true, current);
  for (auto& groups = self().copy_groups; int(groups.size()) > pending; groups.pop_front())
    for (const Copy& copy : groups.front()) {
      land(copy);
      for (Cell *cell = cell_at(copy.to), *end = cell + copy.bytes / 2; cell != end; ++cell)
        cell->writer = short(current), cell->written = step();
    }
}

void init_barrier(uint32_t barrier, int arrivals) {
  write(barrier, 8);
  for (int i = 0; i < 4; ++i) cell_at(barrier)[i].is_barrier = true;
  if (barriers.count(key_of(barrier))) error("a barrier at %u made twice", offset_of(barrier));
  Barrier& made = barriers[key_of(barrier)];
  made.block = block_of(barrier), made.count = made.left = arrivals, made.maker = current, made.made = step();
}
void arrive(uint32_t barrier, uint32_t expected_bytes) {
  hesitate();
  Barrier& at = *find_barrier(barrier);
  at.bytes += expected_bytes;
  if (at.bytes >= 1 << 20) error("%ld bytes expected at once", at.bytes);
  arrive_at(at, self().clock);
  ++step();
}
void arrive_with_copies(uint32_t barrier) {
  Landing landing = {rounds + random_below(slowest_landing), current, {}, find_barrier(barrier), {}, 0};
  commit_copies();
  for (auto& group : self().copy_groups)
    for (const Copy& copy : group) {
      landing.copies.push_back(copy);
      for (Cell *cell = cell_at(copy.to), *end = cell + copy.bytes / 2; cell != end; ++cell)
        cell->writer = short(current), cell->written = step();
    }
  self().copy_groups.clear();
  landing.clock = self().clock;
  ++step();
  landings.push_back(std::move(landing));
  progress();
}
void wait(uint32_t barrier, uint32_t phase) {
  hesitate();
  Barrier& at = *find_barrier(barrier);
  wait_until("a barrier in shared memory", [&] { return (at.phase & 1) != phase; });
  self().clock.join(at.done);
}

void load_run(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  hesitate();
  check_global("a copy", from, bytes, false);
  if (offset_of(to) % 16 || bytes % 16) error("a run of %u bytes to %u, not aligned", bytes, offset_of(to));
  if (!is_inside("a run", to, bytes)) return;
  Barrier& at = *find_barrier(barrier);
  if (!after_fence(at.maker, at.made)) error("no fence: the copy engine uses a barrier at %u", offset_of(barrier));
  for (Cell *cell = cell_at(to), *end = cell + bytes / 2; cell != end; ++cell)
    if (!after_fence(cell->writer, cell->written))
      error("no fence: the copy engine writes at %u what thread %d wrote", offset_of(to), cell->writer);
  check_write("a run", to, bytes);
  // The engine's own clock, of which only who waits at the barrier hears.
  static u32 runs = 0;
  Landing landing = {rounds + random_below(slowest_landing), current, {{to, bytes, from}}, &at, {}, long(bytes)};
  landing.clock.seen[threads] = ++runs;
  for (Cell *cell = cell_at(to), *end = cell + bytes / 2; cell != end; ++cell)
    cell->writer = short(threads), cell->written = runs, cell->reader = kNobody;
  begin_copy(landing.copies[0]);
  landings.push_back(std::move(landing));
  progress();
}
void store_run(void* to, uint32_t from, uint32_t bytes) {
  hesitate();
  check_global("a run", to, bytes, true);
  if (offset_of(from) % 16 || bytes % 16) error("a run of %u bytes from %u, not aligned", bytes, offset_of(from));
  if (!is_inside("a run", from, bytes)) return;
  check_read("a run", from, bytes);
  for (Cell *cell = cell_at(from), *end = cell + bytes / 2; cell != end; ++cell) {
    if (!after_fence(cell->writer, cell->written))
      error("no fence: the copy engine reads at %u what thread %d wrote", offset_of(from), cell->writer);
    ++cell->leaving;
  }
  self().stores.push_back({to, from, bytes});
}
void wait_for_stores() {
  hesitate();
  for (const Store& run : self().stores) {
    memcpy(run.to, memory_at(run.from), run.bytes);
    for (Cell *cell = cell_at(run.from), *end = cell + run.bytes / 2; cell != end; ++cell)
      --cell->leaving, cell->reader = short(current), cell->read = step();
  }
  self().stores.clear();
}
void fence() {
  Clock& clock = self().clock;
  for (int i = 0; i <= threads; ++i) clock.fenced[i] = std::max(clock.fenced[i], clock.seen[i]);
  ++step();
}

uint32_t in_other_block(uint32_t address) { return (u32(current / block_threads ^ 1) + 1) << 24 | address; }
void sync_cluster() { meet_at(whole_cluster, threads, "the cluster"); }
void sync_block(int barrier, int count) {
  if (barrier < 0 || barrier > 15) return error("barrier %d of 16", barrier);
  meet_at(blocks[current / block_threads].meetings[barrier], count ? count : block_threads, "a block's barrier");
}
void sync_warp() { meet_at(warp_meetings[current / 32], 32, "a warp's barrier"); }

void together(const char* what, void* mine, void (*act)(void* const* of_lanes)) {
  Gathering& lanes = gatherings[current / 32];
  if (lanes.here && strcmp(lanes.what, what)) error("lanes of a warp at %s and at %s", what, lanes.what);
  lanes.what = what, lanes.of_lanes[current % 32] = mine;
  const long count = lanes.count;
  if (++lanes.here < 32) return wait_until(what, [&] { return lanes.count != count; });
  act(lanes.of_lanes);
  lanes.here = 0, ++lanes.count;
}

float float_of_f16(uint16_t bits) { return _cvtsh_ss(bits); }
uint16_t f16_of(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
uint16_t bf16_of(float x) {
  if (x != x) return 0x7fff;
  u32 bits;
  memcpy(&bits, &x, 4);
  return u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

void open_products() { self().opened = true; }
void multiply(Kind kind, int n, float* sums, const uint32_t* registers, uint64_t a, uint64_t b, bool add) {
  Thread& thread = self();
  if (!thread.opened) error("products that nobody has opened since the last wait");
  auto& kept = thread.in_flight[sums];
  if (kept.empty()) {
    kept.assign(sums, sums + n / 2);
    for (int i = 0; i < n / 2; ++i) memcpy(&sums[i], &kPoison, 4);
  }
  Product product = {kind, n, sums, registers, {}, a, b, add};
  if (registers) std::copy(registers, registers + 4, product.held);
  thread.products.push_back(product);
}
void commit_products() {
  Thread& thread = self();
  thread.groups.push_back({std::move(thread.products), std::make_shared<Clock>(thread.clock)});
  thread.products.clear();
  ++thread.committed;
}
void wait_for_products(int pending) {
  hesitate();
  Thread& thread = self();
  if (!thread.products.empty()) error("products waited for, but not committed");
  const Thread* group = &all[current / 128 * 128];
  wait_until("products of the warpgroup", [&] {
    return std::all_of(group, group + 128, [&](const Thread& other) { return other.committed >= thread.committed; });
  });
  ++thread.waits;
  together("wgmma.wait_group", &pending, [](void* const* of_lanes) {
    const int left = *static_cast<int*>(of_lanes[0]);
    Thread* lanes = &all[current / 32 * 32];
    const size_t count = lanes[0].groups.size();
    for (int lane = 1; lane < 32; ++lane)
      if (lanes[lane].groups.size() != count) return error("lanes have other products than others");
    for (size_t i = 0; i + left < count; ++i) make_products(lanes, i, lanes[0].waits);
    for (int lane = 0; lane < 32; ++lane) {
      while (int(lanes[lane].groups.size()) > left) lanes[lane].groups.pop_front();
      return_sums(lanes[lane]);
    }
  });
  thread.clock.products[current / 32] = thread.waits;
  thread.opened = false;
}

namespace {

u8* map(size_t bytes) {
  return static_cast<u8*>(
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
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
  buffers.push_back({begin, data.size(), path.empty()});
  return begin;
}

void begin_thread() {
  run_kernel(&params);
  self().done = true;
  progress();
  pause();
}

void run_blocks(u8* stacks) {
  blocks.assign(cluster, Block());
  for (Block& block : blocks) {
    block.cells.resize(shared_bytes / 2 + 8), block.products.resize((shared_bytes / 16 + 1) * kMostWarps);
    block.memory = static_cast<u8*>(aligned_alloc(1024, (shared_bytes + 2047) / 1024 * 1024));
    memset(block.memory, 0xff, shared_bytes);
  }
  barriers.clear(), landings.clear();
  all.assign(threads, Thread());
  for (int i = 0; i < threads; ++i) {
    all[i].clock.seen[i] = 1;
    void** stack = reinterpret_cast<void**>(stacks + kStack * (i + 1) - 64);
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
        if (self().done) continue;
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
    if (!thread.groups.empty() || !thread.products.empty()) error("products that nobody has waited for");
  }
  current = 0;
  if (!landings.empty()) error("copies that nobody has waited for");
  for (Block& block : blocks) free(block.memory);
}

}  // namespace
}  // namespace emulator

int main(int, char** arguments) {
  using namespace emulator;
  const std::string folder = arguments[1];
  const auto number = [&](int i) { return atoll(arguments[i]); };
  state = number(2) * 0x9e3779b97f4a7c15u + 1;
  for (int i = 0; i < 20; ++i) random_below(1);
  params.batch = number(3);
  const size_t bytes = number(4);
  shared_bytes = int(number(5)), block_threads = int(number(6)), cluster = int(number(7));
  threads = block_threads * cluster;
  gridDim = {unsigned(number(8)), unsigned(number(9)), 1};
  params.x = map_tensor(folder + "/x", 0);
  if (number(10)) params.bias = map_tensor(folder + "/bias", 0);
  for (int i = 0; i < number(11); ++i) params.weights[i] = map_tensor(folder + "/w" + std::to_string(i), 0);
  params.y = map_tensor("", bytes);
  times_written.assign(bytes, 0);

  u8* stacks = map(kStack * threads);
  for (int i = 0; i < threads; ++i) mprotect(stacks + kStack * i, kPage, PROT_NONE);
  for (unsigned y = 0; y < gridDim.y; y += cluster)
    for (unsigned x = 0; x < gridDim.x; ++x) {
      blockIdx = {x, y, 0};
      run_blocks(stacks);
    }
  const long missing = std::count(times_written.begin(), times_written.end(), 0);
  if (missing) error("%ld bytes of the output not written", missing);
  std::ofstream(folder + "/y", std::ios::binary).write(static_cast<const char*>(params.y), bytes);
  return said.empty() ? 0 : 1;
}
