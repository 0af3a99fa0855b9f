// Barriers of all kinds, what lands at them, and the copy engine.
#include <iterator>

#include "machine.h"

namespace emulator {
namespace {

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
  barrier.done = barrier.gathered, barrier.gathered.clear();
  progress();
}
void arrive_at(Barrier& barrier, const Clock& clock) {
  barrier.gathered.join(clock);
  if (--barrier.left < 0) error("more arrivals at a barrier than it counts");
  settle(barrier);
}

// Lanes of a warp that do something at once, which orders no memory.
struct Gathering {
  void* of_lanes[32];
  const char* what;
  int here = 0;
  long count = 0;
} gatherings[kMostWarps];
Meeting whole_cluster, warp_meetings[kMostWarps];

// Arrives, and says how often they have met before.
long come_to(Meeting& meeting, int wanted, const char* what) {
  hesitate();
  if (meeting.here && meeting.wanted != wanted) error("%s with %d and %d threads", what, wanted, meeting.wanted);
  meeting.wanted = wanted;
  meeting.gathered.join(self().clock);
  ++step();
  const long count = meeting.count;
  if (++meeting.here == wanted) {
    meeting.here = 0, ++meeting.count;
    meeting.any_then = meeting.any, meeting.any = false;
    meeting.done = meeting.gathered, meeting.gathered.clear();
  }
  return count;
}
void wait_in(Meeting& meeting, long count, const char* what) {
  wait_until(what, [&meeting, count] { return meeting.count != count; });
  self().clock.join(meeting.done);
}
void meet_at(Meeting& meeting, int wanted, const char* what) { wait_in(meeting, come_to(meeting, wanted, what), what); }

}  // namespace

namespace {
void put_off(std::unique_ptr<Landing> landing) {
  ++all[landing->thread].landings, ++still_to_land;
  due_in[landing->due % kSlowest].push_back({put_off_so_far++, std::move(landing)});
  progress();
}
void land(Landing& landing) {
  --all[landing.thread].landings, --still_to_land;
  std::swap(current, landing.thread);
  for (const Copy& copy : landing.copies) land(copy);
  std::swap(current, landing.thread);
  if (landing.from)
    for (Cell& cell : cells_at(landing.from, u32(landing.bytes))) --cell.leaving;
  if (landing.bytes) {
    landing.barrier->gathered.join(landing.clock);
    landing.barrier->bytes -= landing.bytes;
    settle(*landing.barrier);
  } else {
    arrive_at(*landing.barrier, landing.clock);
  }
}
}  // namespace

// Every round takes what is due in it, and what the round before has put off for itself: nothing else can be.
void land_what_is_due(bool all_of_it, int thread) {
  vector<Put> due;
  const auto take = [&](vector<Put>& puts, auto is_due) {
    const auto rest = std::stable_partition(puts.begin(), puts.end(), [&](const Put& put) { return !is_due(*put.landing); });
    std::move(rest, puts.end(), std::back_inserter(due));
    puts.erase(rest, puts.end());
  };
  for (long round : {rounds - 1, rounds})
    if (round >= 0 && !due_in[round % kSlowest].empty())
      take(due_in[round % kSlowest], [](const Landing& landing) { return landing.due <= rounds; });
  if (all_of_it && all[thread].landings > 0)
    for (auto& puts : due_in) take(puts, [&](const Landing& landing) { return landing.thread == thread; });
  std::sort(due.begin(), due.end(), [](const Put& a, const Put& b) { return a.number < b.number; });
  for (Put& put : due) land(*put.landing);
}

void init_barrier(uint32_t barrier, int arrivals) {
  write(barrier, 8);
  for (Cell& cell : cells_at(barrier, 8)) cell.is_barrier = true;
  if (barriers.count(key_of(barrier))) error("a barrier at %u made twice", offset_of(barrier));
  Barrier& made = barriers[key_of(barrier)];
  made.count = made.left = arrivals, made.maker = current, made.made = step();
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
  const long due = rounds + random_below(slowest_landing);
  std::unique_ptr<Landing> landing(new Landing{due, current, {}, find_barrier(barrier), {}, 0});
  commit_copies();
  for (auto& group : self().copy_groups)
    for (const Copy& copy : group) {
      landing->copies.push_back(copy);
      for (Cell& cell : cells_at(copy.to, copy.bytes))
        cell.writer = short(current), cell.written = step();
    }
  self().copy_groups.clear();
  landing->clock = self().clock;
  ++step();
  put_off(std::move(landing));
}
void wait(uint32_t barrier, uint32_t phase) {
  hesitate();
  Barrier& at = *find_barrier(barrier);
  wait_until("a barrier in shared memory", [&at, phase] { return (at.phase & 1) != phase; });
  self().clock.join(at.done);
}

namespace {
// A run to shared memory, of this block or another one, whose bytes a barrier there counts.
void bring_run(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier, uint32_t shared_from,
               std::shared_ptr<vector<u8>> made = nullptr) {
  if (offset_of(to) % 16 || bytes % 16) error("a run of %u bytes to %u, not aligned", bytes, offset_of(to));
  if (!is_inside("a run", to, bytes)) return;
  Barrier& at = *find_barrier(barrier);
  if (!after_fence(at.maker, at.made)) error("no fence: the copy engine uses a barrier at %u", offset_of(barrier));
  for (Cell& cell : cells_at(to, bytes))
    if (!after_fence(cell.writer, cell.written))
      error("no fence: the copy engine writes at %u what thread %d wrote", offset_of(to), cell.writer);
  check_write("a run", to, bytes);
  // The engine's own clock, of which only who waits at the barrier hears.
  static u32 runs = 0;
  const long due = rounds + random_below(slowest_landing);
  std::unique_ptr<Landing> landing(new Landing{due, current, {{to, bytes, from, bytes}}, &at, {}, long(bytes)});
  landing->clock.seen()[threads] = ++runs;
  landing->from = shared_from, landing->made = made;
  for (Cell& cell : cells_at(to, bytes))
    cell.writer = short(threads), cell.written = runs, cell.reader = kNobody;
  begin_copy(landing->copies[0]);
  put_off(std::move(landing));
}
// What the copy engine reads of shared memory, until it has.
void leave(uint32_t from, uint32_t bytes) {
  check_read("a run", from, bytes);
  for (Cell& cell : cells_at(from, bytes)) {
    if (!after_fence(cell.writer, cell.written))
      error("no fence: the copy engine reads at %u what thread %d wrote", offset_of(from), cell.writer);
    ++cell.leaving;
  }
}
}  // namespace

void load_run(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier, uint32_t in_blocks) {
  hesitate();
  const u8* begin = static_cast<const u8*>(from);
  const bool is_made = std::any_of(buffers.begin(), buffers.end(), [&](const Buffer& buffer) {  // by this kernel, before
    return buffer.is_output && begin >= buffer.begin && begin + bytes <= buffer.begin + buffer.bytes;
  });
  if (!is_made) check_global("a copy", from, bytes, false);
  if (!in_blocks) return bring_run(to, from, bytes, barrier, 0);
  for (int block = 0; block < 32; ++block) {
    if (!(in_blocks >> block & 1)) continue;
    if (block >= cluster) return error("a run to block %d of %d", block, cluster);
    bring_run(in_block(to, block), from, bytes, in_block(barrier, block), 0);
  }
}
// In the order in which the matrix unit reads a slab, whose pieces change places by the row.
void bring_box(uint32_t to, const TensorMap& map, const int (&at)[5], uint32_t barrier, uint32_t in_blocks) {
  hesitate();
  if (offset_of(to) % 1024) error("a box to %u, which should be a multiple of 1024", offset_of(to));
  const int size = map.is_tf32 ? 4 : 2, columns = 128 / size;
  if (at[0] * size % 16) error("a box from byte %d of a row: an illegal instruction", at[0] * size);
  if (map.box[0] != columns) error("a box with rows of %ld elements", long(map.box[0]));
  const auto made = std::make_shared<vector<u8>>();
  int64_t i[5] = {};
  for (bool more = true; more;) {
    const u8* from = static_cast<const u8*>(map.tensor) + at[0] * int64_t(size);
    bool inside = true;
    for (int d = 1; d < 5; ++d) {
      from += (at[d] + i[d]) * map.strides[d - 1];
      inside &= at[d] + i[d] >= 0 && at[d] + i[d] < map.sizes[d];
    }
    u32 row[32] = {};
    const int64_t here = inside ? std::max<int64_t>(0, std::min<int64_t>(columns, map.sizes[0] - at[0])) * size : 0;
    if (here) check_global("a box", from, u32(here), false, 16);
    memcpy(row, from, here);
    const size_t number = made->size() / 128;
    made->resize(made->size() + 128);
    for (int k = 0; k < 32; ++k) {
      const bool rounds = map.is_tf32 && (row[k] >> 23 & 255) != 255;
      const u32 x = rounds ? truncated_to_tf32(row[k] + 0x1000) : row[k];
      memcpy(made->data() + number * 128 + ((k / 4 ^ number & 7) << 4) + k % 4 * 4, &x, 4);
    }
    int d = 1;
    while (d < 5 && ++i[d] == map.box[d]) i[d++] = 0;
    more = d < 5;
  }
  if (!in_blocks) return bring_run(to, made->data(), u32(made->size()), barrier, 0, made);
  for (int block = 0; block < 32; ++block) {
    if (!(in_blocks >> block & 1)) continue;
    if (block >= cluster) return error("a box to block %d of %d", block, cluster);
    bring_run(in_block(to, block), made->data(), u32(made->size()), in_block(barrier, block), 0, made);
  }
}
void send_run(uint32_t to, uint32_t from, uint32_t bytes, uint32_t barrier) {
  hesitate();
  if (offset_of(from) % 16) error("a run of %u bytes from %u, not aligned", bytes, offset_of(from));
  if (!is_inside("a run", from, bytes)) return;
  leave(from, bytes);
  from |= u32(block_of(from) + 1) << 24;  // whoever is current when it lands
  bring_run(to, memory_at(from), bytes, barrier, from);
}
void send_words(uint32_t to, const uint32_t* words, uint32_t count, uint32_t barrier) {
  const uint32_t bytes = count * 4;
  hesitate();
  if (offset_of(to) % bytes) error("%u bytes sent to %u, not aligned", bytes, offset_of(to));
  if (!is_inside("what is sent", to, bytes)) return;
  Barrier& at = *find_barrier(barrier);
  check_write("what is sent", to, bytes);
  const long due = rounds + random_below(slowest_landing);
  std::unique_ptr<Landing> landing(new Landing{due, current, {}, &at, self().clock, bytes, 0, {words, words + count}});
  landing->copies.push_back({to, bytes, landing->words.data(), bytes});
  begin_copy(landing->copies[0]);
  ++step();
  put_off(std::move(landing));
}
void store_run(void* to, uint32_t from, uint32_t bytes) {
  hesitate();
  check_global("a run", to, bytes, true);
  if (offset_of(from) % 16 || bytes % 16) error("a run of %u bytes from %u, not aligned", bytes, offset_of(from));
  if (!is_inside("a run", from, bytes)) return;
  leave(from, bytes);
  self().stores.push_back({to, from, bytes});
}
void wait_for_stores() {
  hesitate();
  for (const Store& run : self().stores) {
    memcpy(run.to, memory_at(run.from), run.bytes);
    for (Cell& cell : cells_at(run.from, run.bytes))
      --cell.leaving, cell.reader = short(current), cell.read = step();
  }
  self().stores.clear();
}
void fence() {
  u32 *const seen = self().clock.seen(), *const fenced = self().clock.fenced();
  for (int i = 0, end = threads; i <= end; ++i) fenced[i] = std::max(fenced[i], seen[i]);
  ++step();
}

uint32_t in_other_block(uint32_t address) { return (u32(current / block_threads ^ 1) + 1) << 24 | address; }
uint32_t in_block(uint32_t address, int rank) {
  if (rank < 0 || rank >= cluster) error("block %d of a cluster of %d", rank, cluster);
  return u32(rank + 1) << 24 | (address & 0xffffff);
}
void arrive_at_cluster() {
  if (self().arrived >= 0) error("a second arrival at the cluster's barrier, without a wait");
  self().arrived = come_to(whole_cluster, threads, "the cluster");
}
void wait_at_cluster() {
  if (self().arrived < 0) return error("a wait at the cluster's barrier, without an arrival");
  hesitate();
  wait_in(whole_cluster, self().arrived, "the cluster");
  self().arrived = -1;
}
void sync_cluster() { arrive_at_cluster(), wait_at_cluster(); }
bool sync_block(int barrier, int count, bool here) {
  if (barrier < 0 || barrier > 15) return error("barrier %d of 16", barrier), false;
  Meeting& meeting = blocks[current / block_threads].meetings[barrier];
  meeting.any |= here;
  // racecheck counts how often a thread has met, and takes no meeting as order between threads that differ in that.
  if (!meeting.here) meeting.met = self().met;
  if (meeting.met != self().met) error("who meets has met %ld and %ld times before", meeting.met, self().met);
  ++self().met;
  meet_at(meeting, count ? count : block_threads, "a block's barrier");
  return meeting.any_then;
}
void come_after_counts(const void* counter, bool counts_up) {
  Clock& known = counts[counter];
  if (counts_up) known.join(self().clock), ++step();
  self().clock.join(known);
}
void sync_warp() { meet_at(warp_meetings[current / 32], 32, "a warp's barrier"); }

void together(const char* what, void* mine, void (*act)(void* const* of_lanes)) {
  Gathering& lanes = gatherings[current / 32];
  if (lanes.here && lanes.what != what && strcmp(lanes.what, what)) error("lanes of a warp at %s and at %s", what, lanes.what);
  lanes.what = what, lanes.of_lanes[current % 32] = mine;
  const long count = lanes.count;
  if (++lanes.here < 32) return wait_until(what, [&lanes, count] { return lanes.count != count; });
  act(lanes.of_lanes);
  lanes.here = 0, ++lanes.count;
}

}  // namespace emulator
