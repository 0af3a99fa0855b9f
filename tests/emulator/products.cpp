// Products of matrices. Those of wgmma are made when they are waited for; until then their operands may not change, and the
// sums are NaN.
#include <immintrin.h>

#include "machine.h"

namespace emulator {
namespace {

// A group of products, for one warp.
u32 operand_address(u64 description, int row, int half) {
  const u32 bytes = 256u >> (description >> 62);  // of a row: 128, 64 or 32
  const u64 known = u64(1) << 16 | u64(bytes / 2) << 32 | description >> 62 << 62;
  if (bytes == 256 || (description & ~u64(0x3fff)) != known) error("an operand is described as %lx", description);
  const u32 slab = u32(description & 0x3fff) << 4;
  if (slab % (8 * bytes) & ~(bytes - 32) && (bytes < 128 || slab % 128 & ~0x60u))
    error("an operand begins at %u: no multiple of its rows, and 32 for each step", slab);
  const u32 at = slab + row / 8 * (8 * bytes) + row % 8 * bytes + half * 16;
  return at ^ (at >> 7 & (bytes / 16 - 1)) << 4;
}
// Of a turned one, whose k's are rows: 8 features from `first` on, `bytes` from one 64 of them to the next.
u32 turned_address(u64 description, int first, int k) {
  constexpr u64 kSlab = 0x3fff, kKnown = u64(64) << 32 | u64(1) << 62;
  const u32 slab = u32(description & kSlab) << 4, bytes = u32(description >> 16 & kSlab) << 4;
  // From the middle of a slab on, what does not reach the next one
  const bool inside = slab % 128 == 0 || (slab % 1024 == 64 && first < 32);
  if ((description & ~(kSlab | kSlab << 16)) != kKnown || !inside || bytes % 1024)
    error("a turned operand is described as %lx", description);
  const u32 at = slab + first / 64 * bytes + k * 128 + first % 64 * 2;
  return at ^ (at >> 7 & 7) << 4;
}
const u8* read_operand(u32 at, Clock& known, u32 wait) {
  if (!is_inside("a matrix unit's read", at, 16)) return nowhere;
  for (Cell& cell : cells_at(at, 16)) {
    if (cell.is_barrier) error("a matrix unit reads a barrier at %u", offset_of(at));
    if (cell.arriving) error("a matrix unit reads at %u, where a copy has not landed yet", offset_of(at));
    if (cell.writer == kNobody || cell.writer == threads) continue;
    if (known.seen()[cell.writer] < cell.written)
      error("race: a matrix unit reads at %u what thread %d writes", offset_of(at), cell.writer);
    else if (known.fenced()[cell.writer] < cell.written)
      error("no fence: a matrix unit reads at %u what thread %d wrote", offset_of(at), cell.writer);
  }
  Block& block = blocks[current / block_threads];
  block.products[offset_of(at) / 16 * (threads / 32) + current / 32] = wait, block.has_products = true;
  return memory_at(at);
}
// Of 16 bytes, or fewer.
void values(Kind kind, const u8* from, int bytes, float* to) {
  const int count = bytes / (kind == Kind::tf32 ? 4 : 2);
  for (int i = 0; i < count; ++i) {
    u32 word = 0;
    u16 half = 0;
    if (kind == Kind::tf32)
      memcpy(&word, from + 4 * i, 4), word = truncated_to_tf32(word);
    else
      memcpy(&half, from + 2 * i, 2), word = u32(half) << 16;
    memcpy(&to[i], &word, 4);
    if (kind == Kind::f16) to[i] = float_of_f16(half);
  }
}
void make_products(Thread* lanes, size_t number, u32 wait) {
  const Group& group = lanes[0].groups[number];
  Clock known = *group.clock;
  for (int lane = 1; lane < 32; ++lane) {
    const Group& its = lanes[lane].groups[number];
    if (its.products.size() != group.products.size()) return error("lanes have other products than others");
    known.meet(*its.clock);
  }
  static float a[16][16], b[16][256], made[16][256];  // b by its k's, as are a's: sums beside each other are made at once
  for (size_t i = 0; i < group.products.size(); ++i) {
    const GroupProduct& product = group.products[i];
    const int size = product.kind == Kind::tf32 ? 4 : 2, each = 16 / size;
    float found[8];
    const auto load = [&](u64 description, bool turned, int first, int count, auto put) {
      for (int r = 0; r < count && !turned; ++r)
        for (int half = 0; half < 2; ++half) {
          values(product.kind, read_operand(operand_address(description, first + r, half), known, wait), 16, found);
          for (int k = 0; k < each; ++k) put(r, half * each + k, found[k]);
        }
      for (int r = 0; r < count && turned; r += 8)
        for (int k = 0; k < 16; ++k) {
          values(product.kind, read_operand(turned_address(description, first + r, k), known, wait), 16, found);
          for (int i = 0; i < 8; ++i) put(r + i, k, found[i]);
        }
    };
    load(product.b, product.turned, 0, product.n, [](int r, int k, float x) { b[k][r] = x; });
    if (!product.registers)
      load(product.a, product.left_turned, current / 32 % 4 * 16, 16, [](int r, int k, float x) { a[r][k] = x; });
    for (int lane = 0; lane < 32; ++lane) {
      const GroupProduct& its = lanes[lane].groups[number].products[i];
      if (its.b != product.b || its.n != product.n || its.add != product.add || its.turned != product.turned ||
          its.left_turned != product.left_turned ||
          (!its.registers && its.a != product.a))
        return error("lanes have other products than others");
      if (!its.registers) continue;
      if (memcmp(its.registers, its.held, 16)) error("registers of an operand changed in flight");
      for (int word = 0; word < 4; ++word)
        values(product.kind, reinterpret_cast<const u8*>(&its.held[word]), 4,
               &a[lane / 4 + word % 2 * 8][word / 2 * each + lane % 4 * (4 / size)]);
    }
    const int n = product.n;
    for (int r = 0; r < 16; ++r) {
      std::fill_n(made[r], n, 0.f);
      for (int k = 0; k < 2 * each; ++k) {
        const float left = a[r][k];
        for (int column = 0; column < n; ++column) made[r][column] += left * b[k][column];
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      float* sums = lanes[lane].in_flight[lanes[lane].groups[number].products[i].sums].data();
      for (int j = 0; j < n / 2; ++j) {
        const float sum = made[lane / 4 + j / 2 % 2 * 8][j / 4 * 8 + lane % 4 * 2 + j % 2];
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
                         [&](const GroupProduct& product) { return product.sums == sums->first; });
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

// Sums beside each other are made at once, each of them in the order of its k's.
template <class R, int K, int EACH> void Product<R, K, EACH>::make(void* const* of_lanes) {
  R y[16][8], a[16][K], b[K][8];
  const auto each = [&](auto act) {
    for (int i = 0; i < 32; ++i) act(*static_cast<Product*>(of_lanes[i]), i / 4, i % 4);
  };
  each([&](const Product& lane, int line, int place) {
    for (int i = 0; i < 4; ++i) y[line + i / 2 * 8][place * 2 + i % 2] = lane.y[i];
    for (int half = 0; half < K / (4 * EACH); ++half)
      for (int next = 0; next < EACH; ++next) {
        const int k = (half * 4 + place) * EACH + next;
        for (int i = 0; i < 2; ++i) a[line + i * 8][k] = lane.a[(half * 2 + i) * EACH + next];
        b[k][line] = lane.b[half * EACH + next];
      }
  });
  for (int r = 0; r < 16; ++r)
    for (int k = 0; k < K; ++k)
      for (int c = 0; c < 8; ++c) y[r][c] += a[r][k] * b[k][c];
  each([&](const Product& lane, int line, int place) {
    for (int i = 0; i < 4; ++i) lane.y[i] = y[line + i / 2 * 8][place * 2 + i % 2];
  });
}
template struct Product<float, 16, 2>;
template struct Product<float, 8, 2>;
template struct Product<float, 8, 1>;
template struct Product<double, 8, 1>;

float float_of_f16(uint16_t bits) { return _cvtsh_ss(bits); }
uint16_t f16_of(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
uint16_t bf16_of(float x) {
  if (x != x) return 0x7fff;
  u32 bits;
  memcpy(&bits, &x, 4);
  return u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

void open_products() { self().opened = true; }
void multiply(Kind kind, int n, float* sums, const uint32_t* registers, uint64_t a, uint64_t b, bool add,
              bool left_turned, bool turned) {
  Thread& thread = self();
  if (!thread.opened) error("products that nobody has opened since the last wait");
  auto& kept = thread.in_flight[sums];
  if (kept.empty()) {
    kept.assign(sums, sums + n / 2);
    for (int i = 0; i < n / 2; ++i) memcpy(&sums[i], &kPoison, 4);
  }
  GroupProduct product = {kind, n, sums, registers, {}, a, b, add, left_turned, turned};
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
  wait_until("products of the warpgroup", [group, mine = thread.committed] {
    return std::all_of(group, group + 128, [mine](const Thread& other) { return other.committed >= mine; });
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
  thread.clock.products()[current / 32] = thread.waits;
  thread.opened = false;
}

}  // namespace emulator
