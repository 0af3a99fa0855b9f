// A pass of two tied contractions, of the last two modes, on sm_90a: Y[q0, q1] = A[q0, p0] X[p0, p1] B[q1, p1]' for each unit.
//
// A warpgroup makes 64 rows of T = B X', whose sums, rounded, are as they stand the left operand of Y' = T A'. X and A are
// read from shared memory by the matrix unit, both with k contiguous; B stays in registers. Units go in chunks of p0
// through a ring of slots, which one warpgroup fills by asynchronous copies. The others are GROUPS x PARTS: groups take
// turns in units, parts share q1.
//
// Pass: Math, Element, Activation, BIAS; P0, P1, Q0, Q1, UNITS_PER_SAMPLE; CHUNK of p0, SLOTS, PARTS, GROUPS; REGISTERS of a
//       consumer's thread; weight_a(params, q, p), weight_b(params, q, p), and FACTOR_A, FACTOR_B: the parameter that these
//       are, or -1 where they are products
#pragma once
#include "mma.cuh"
#include "params.cuh"
#include "pointwise.cuh"
#include "wgmma.cuh"

template <class Pass> struct TwoFactors {
  using Element = typename Pass::Element;
  using Math = typename Pass::Math;
  static constexpr int kSize = sizeof(Element), kStep = 32 / kSize, kSlab = 128 / kSize;
  static constexpr int P = Pass::P, Q = Pass::Q;
  static constexpr int P0 = Pass::P0, P1 = Pass::P1, Q0 = Pass::Q0, Q1 = Pass::Q1, CHUNK = Pass::CHUNK, SLOTS = Pass::SLOTS;
  static constexpr int kChunks = ceil_div(P0, CHUNK), kN = round_up(Q0, 16);
  static constexpr int kStepsB = ceil_div(P1, kStep), kStepsA = CHUNK / kStep;
  static constexpr int kSlabA = kN * 128, kBytesA = ceil_div(kChunks * CHUNK, kSlab) * kSlabA;
  static constexpr int kSlabX = CHUNK * 128, kStateBytes = ceil_div(P1, kSlab) * kSlabX, kSlotBytes = (P > Q ? P : Q) * kStateBytes;
  static constexpr int kConsumers = Pass::GROUPS * Pass::PARTS, kThreads = (kConsumers + 1) * 128;
  static constexpr bool kMixes = P * Q > 1;
  static constexpr int kShare = kMixes ? ceil_div(Q, Pass::GROUPS) : 1;  // of a unit's mixtures
  static constexpr int kAhead = SLOTS > 3 ? 2 : 1;  // chunks under way when another is handed over
  static constexpr int kBarrierBytes = 1024, kMixture = 256;  // where weights of mixtures lie: rows of whole 16 bytes

  const Params& params;
  const Lane lane;
  const int warpgroup, thread;
  const u32 memory, a, slots;
  const i64 units;
  static constexpr bool kScalesA = Pass::FACTOR_A < 0 && is_same<Element, f16>;
  static constexpr bool kScalesB = Pass::FACTOR_B < 0 && is_same<Element, f16>;

  DEVICE TwoFactors(const Params& p)
      : params(p), warpgroup(threadIdx.x / 128), thread(threadIdx.x % 128), memory(shared_address(shared_memory)),
        a(memory + kBarrierBytes), slots(a + kBytesA), units(p.batch * Pass::UNITS_PER_SAMPLE) {}

  DEVICE u32 full(u32 slot) const { return memory + slot * 8; }
  DEVICE u32 empty(u32 slot) const { return memory + (SLOTS + slot) * 8; }

  DEVICE u32 mixture(int q) const { return memory + kMixture + q * round_up(P, 4) * 4; }

  DEVICE void run() const {
    if (threadIdx.x < SLOTS) {
      init_barrier(full(threadIdx.x), 128);
      init_barrier(empty(threadIdx.x), (kMixes ? kConsumers : Pass::PARTS) * 4);
    }
    if constexpr (kMixes) {
      if (threadIdx.x < Q * P)
        store_shared(mixture(threadIdx.x / P) + threadIdx.x % P * 4, Pass::weight(params, threadIdx.x / P, threadIdx.x % P));
    }
    if constexpr (P1 % kStep || P0 % CHUNK)  // padding of the slots, which copies leave alone
      for (int at = threadIdx.x * 4; at < SLOTS * kSlotBytes; at += kThreads * 4) store_shared(slots + at, 0u);
    fence_copy_engine();
    __syncthreads();
    if (warpgroup == kConsumers) {
      if constexpr (Pass::PRODUCER > 0) give_registers<Pass::PRODUCER>();
      produce();
    } else {
      if constexpr (Pass::CONSUMER > 0) take_registers<Pass::CONSUMER>();
      load_a();
      fence_copy_engine();
      sync_group<kConsumers * 4, 2>(1);
      consume();
    }
  }

  // Operand A, padded with zeros. Where its left operand are sums of 32 bits, a lane's k's are 2t and 2t + 1.
  DEVICE void load_a() const {
    constexpr int kEach = Pass::FACTOR_A >= 0 && P0 * kSize % 16 == 0 ? 16 / kSize : 1;
    constexpr int kRow = kBytesA / kSlabA * kSlab / kEach;
    [[maybe_unused]] const float scale = kScalesA ? Pass::scale_a(params) : 1.f;
#pragma unroll 8
    for (int j = threadIdx.x; j < kN * kRow; j += kConsumers * 128) {
      const int q = j / kRow, p = j % kRow * kEach;
      const bool present = q < Q0 && p < P0;
      if constexpr (kEach > 1) {
        u32 word[4] = {};
        if (present) load_global(static_cast<const Element*>(params.weights[Pass::FACTOR_A]) + q * P0 + p, word);
        if constexpr (kSize == 2) {
          store_u32x4(place_in_a(q, p), word);
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i) store_shared(place_in_a(q, p + i), tf32_of(word[i]));
        }
      } else {
        store_shared(place_in_a(q, p), present ? rounded(scale * Pass::weight_a(params, q, p)) : Element{});
      }
    }
  }
  DEVICE u32 place_in_a(int q, int p) const {
    const int k = Math::place_of(p, true) * kSize;
    return a + k / 128 * kSlabA + swizzled(q, k % 128 / 16) + k % 16;
  }
  static DEVICE Element rounded(float x) { return narrow<Element>(Math::rounded(x)); }

  // Copies this block's chunks to slots as these come free, and hands each over once it has arrived.
  DEVICE void produce() const {
    constexpr i64 kUnit = P * P0 * P1;
    const i64 mine = blockIdx.x < units ? (units - blockIdx.x - 1) / gridDim.x + 1 : 0, chunks = mine * kChunks;
    const Element* x = static_cast<const Element*>(params.x) + blockIdx.x * kUnit;
    int chunk = 0, slot = 0, ready = 0, ready_chunk = 0;
    u32 phase = 1;
#pragma unroll 1
    for (i64 n = 0; n < chunks + kAhead; ++n) {
      if (n < chunks) {
        wait_for_bytes(empty(slot), phase);
        const Element* from = x + chunk * (CHUNK * P1);
        each_piece(chunk, slot, [&](int j, u32 place) {
#pragma unroll
          for (int p = 0; p < P; ++p) copy_async<16>(place + p * kStateBytes, from + p * (P0 * P1) + j * (16 / kSize), true);
        });
        if (++slot == SLOTS) slot = 0, phase ^= 1;
        if (++chunk == kChunks) chunk = 0, x += gridDim.x * kUnit;
      }
      commit_copies();
      if (n < kAhead) continue;
      wait_for_copies<kAhead>();
      if constexpr (kMixes)
        each_piece(ready_chunk, ready, [&](int, u32 place) { mix(place); });
      else if constexpr (Math::kRounds)
        each_piece(ready_chunk, ready, [&](int, u32 place) {
          u32 word[4];
          load_u32x4(place, word);
#pragma unroll
          for (u32& w : word) w = tf32_of(w);
          store_u32x4(place, word);
        });
      fence_copy_engine();
      arrive(full(ready));
      if (++ready == SLOTS) ready = 0;
      if (++ready_chunk == kChunks) ready_chunk = 0;
    }
  }
  // The 16-byte pieces of a chunk that this thread moves: number, and place in the slot.
  template <class Do> DEVICE void each_piece(int chunk, int slot, Do act) const {
    constexpr int kRow = P1 * kSize / 16, kCount = CHUNK * kRow;
    const int count = P0 % CHUNK && chunk == kChunks - 1 ? P0 % CHUNK * kRow : kCount;
#pragma unroll(kMixes ? 1 : ceil_div(kCount, 128))
    for (int k = 0; k < ceil_div(kCount, 128); ++k) {
      const int j = k * 128 + thread, row = j / kRow, piece = j % kRow;
      if ((kCount % 128 == 0 && P0 % CHUNK == 0) || j < count)
        act(j, slots + slot * kSlotBytes + piece / 8 * kSlabX + swizzled(row, piece % 8));
    }
  }
  // P pieces become Q.
  DEVICE void mix(u32 place) const {
    constexpr int kEach = 16 / kSize;
    float x[P][kEach];
#pragma unroll
    for (int p = 0; p < P; ++p) {
      u32 word[4];
      load_u32x4(place + p * kStateBytes, word);
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        if constexpr (kSize == 4)
          x[p][i] = __uint_as_float(word[i]);
        else
          x[p][i] = widen(Element{u16(word[i / 2] >> i % 2 * 16)});
      }
    }
#pragma unroll 1
    for (int q = 0; q < Q; ++q) {
      float y[kEach] = {};
#pragma unroll
      for (int p = 0; p < P; p += 4) {
        u32 weight[4];
        load_u32x4(mixture(q) + p * 4, weight);
#pragma unroll
        for (int i = 0; i < 4 * kEach; ++i)
          if (p + i / kEach < P) y[i % kEach] += __uint_as_float(weight[i / kEach]) * x[p + i / kEach][i % kEach];
      }
      u32 word[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (kSize == 4)
          word[i] = tf32_of(__float_as_uint(y[i]));
        else
          word[i] = Pair<Element>(y[2 * i], y[2 * i + 1]).bits;
      }
      store_u32x4(place + q * kStateBytes, word);
    }
  }

  DEVICE void consume() const {
    const int group = warpgroup / Pass::PARTS, part = warpgroup % Pass::PARTS, first = part * 64 + thread / 32 * 16;
    u32 b[kStepsB][4];
    [[maybe_unused]] const float scale_b = kScalesB ? Pass::scale_b(params) : 1.f;
#pragma unroll
    for (int s = 0; s < kStepsB; ++s)
#pragma unroll
      for (int i = 0; i < 4; ++i) b[s][i] = word_of_b(first + lane.g + i % 2 * 8, s * kStep + i / 2 * (kStep / 2), scale_b);
    [[maybe_unused]] const float unscale_b = 1 / scale_b;
    [[maybe_unused]] const float unscale_a = kScalesA ? 1 / Pass::scale_a(params) : 1.f;
    u32 position = kMixes ? 0 : group * kChunks;
    const i64 step = i64(gridDim.x) * (kMixes ? 1 : Pass::GROUPS);
#pragma unroll 1
    for (i64 unit = blockIdx.x + (kMixes ? 0 : i64(group) * gridDim.x); unit < units; unit += step) {
      float y[kShare][kN / 2];
#pragma unroll 1
      for (int chunk = 0; chunk < kChunks; ++chunk, ++position) {
        const u32 slot = position % SLOTS;
        wait_for_bytes(full(slot), position / SLOTS & 1);
#pragma unroll
        for (int share = 0; share < kShare; ++share) {
          float t[CHUNK / 2];
          const u64 x = operand(slots + slot * kSlotBytes + (kMixes ? mixed(group, share) * kStateBytes : 0));
          open_products();
#pragma unroll
          for (int s = 0; s < kStepsB; ++s)
            Wgmma<Element, CHUNK>::multiply(t, b[s], x + (s / 4 * kSlabX >> 4) + s % 4 * 2, s > 0);
          commit_products();
          wait_for_products<0>();
          touch(t);
          if constexpr (kScalesB)
#pragma unroll
            for (float& sum : t) sum *= unscale_b;
          if (share == kShare - 1 && lane.index == 0) arrive(empty(slot));
          u32 left[kStepsA][4];
          pack(left, t);
          const u64 weight = operand(a);
          open_products();
#pragma unroll
          for (int s = 0; s < kStepsA; ++s) {
            const int k = chunk * kStepsA + s;
            Wgmma<Element, kN>::multiply(y[share], left[s], weight + (k / 4 * kSlabA >> 4) + k % 4 * 2, k > 0);
          }
          commit_products();
        }
      }
      wait_for_products<0>();
      if constexpr (!kMixes) position += (Pass::GROUPS - 1) * kChunks;
#pragma unroll
      for (int share = 0; share < kShare; ++share) {
        touch(y[share]);
        if constexpr (kScalesA)
#pragma unroll
          for (float& sum : y[share]) sum *= unscale_a;
        if (kMixes && Q % Pass::GROUPS && mixed(group, share) != group * kShare + share) break;
        const i64 state = unit * Q + (kMixes ? mixed(group, share) : 0);
        finish(y[share], state, first);
        if constexpr (kSize == 2)
          store_staged(y[share], state, part);
        else
          store(y[share], state, first);
      }
    }
  }
  // Which mixture; the last one again where groups do not divide them.
  static DEVICE int mixed(int group, int share) { return min(group * kShare + share, Q - 1); }
  // k's from p on of a row of operand B, a register's worth
  DEVICE u32 word_of_b(int q, int p, float scale) const {
    if constexpr (kSize == 2 && Pass::FACTOR_B >= 0 && P1 % 2 == 0) {
      const bool present = q < Q1 && p + lane.t * 2 < P1;
      const Element* factor = static_cast<const Element*>(params.weights[Pass::FACTOR_B]);
      return present ? *reinterpret_cast<const u32*>(factor + q * P1 + p + lane.t * 2) : 0;
    } else if constexpr (kSize == 2) {
      const auto at = [&](int p) { return q < Q1 && p < P1 ? scale * Pass::weight_b(params, q, p) : 0.f; };
      return Pair<Element>(at(p + lane.t * 2), at(p + lane.t * 2 + 1)).bits;
    } else {
      return __float_as_uint(q < Q1 && p + lane.t < P1 ? rounded(Pass::weight_b(params, q, p + lane.t)) : 0.f);
    }
  }
  static DEVICE void pack(u32 (&left)[kStepsA][4], const float (&t)[CHUNK / 2]) {
#pragma unroll
    for (int s = 0; s < kStepsA; ++s)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (kSize == 2) {
          const int at = (2 * s + i / 2) * 4 + i % 2 * 2;
          left[s][i] = Pair<Element>(t[at], t[at + 1]).bits;
        } else {
          left[s][i] = tf32_of(__float_as_uint(t[s * 4 + i % 2 * 2 + i / 2]));
        }
      }
  }

  // Bias and activation. Sum 4 n + 2 h + i of a thread is Y[8 n + 2 t + i, first + g + 8 h].
  DEVICE void finish(float (&y)[kN / 2], i64 state, int first) const {
    const Element* bias = nullptr;
    if constexpr (Pass::BIAS)
      bias = static_cast<const Element*>(params.bias) + state % (Pass::UNITS_PER_SAMPLE * Q) * (Q0 * Q1) + first + lane.g;
#pragma unroll
    for (int j = 0; j < kN / 2; ++j) {
      const int q0 = j / 4 * 8 + lane.t * 2 + j % 2, behind = j / 2 % 2 * 8;
      if (Pass::BIAS && q0 < Q0 && first + lane.g + behind < Q1) y[j] += widen(bias[q0 * Q1 + behind]);
      y[j] = Pass::Activation::of(y[j]);
    }
  }
  // 32 bits: eight lanes write a sector.
  DEVICE void store(const float (&y)[kN / 2], i64 state, int first) const {
    float* to = static_cast<float*>(params.y) + state * (Q0 * Q1) + first + lane.g;
#pragma unroll
    for (int j = 0; j < kN / 2; ++j) {
      const int q0 = j / 4 * 8 + lane.t * 2 + j % 2, behind = j / 2 % 2 * 8;
      if ((kN == Q0 || q0 < Q0) && (Q1 % 64 == 0 || first + lane.g + behind < Q1)) to[q0 * Q1 + behind] = y[j];
    }
  }
  // 16 bits: a part's columns lie as rows of 128 bytes in shared memory first.
  DEVICE void store_staged(const float (&y)[kN / 2], i64 state, int part) const {
    const u32 staged = slots + SLOTS * kSlotBytes + warpgroup * (kN * 128);
    sync_group<4, 16>(1 + warpgroup);  // the last unit's result has left
    const u32 piece = thread / 32 * 2 + (lane.index >> 3 & 1), row = lane.index % 8 + lane.index / 16 * 8;
#pragma unroll
    for (int n = 0; n < kN / 8; n += 2) {
      u32 word[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) word[i] = Pair<Element>(y[n * 4 + i * 2], y[n * 4 + i * 2 + 1]).bits;
      store_matrices_transposed(staged + swizzled(n * 8 + row, piece), word);
    }
    sync_group<4, 16>(1 + warpgroup);
    Element* to = static_cast<Element*>(params.y) + state * (Q0 * Q1) + part * 64;
#pragma unroll
    for (int k = 0; k < kN / 16; ++k) {
      const int row = k * 16 + thread / 8, piece = thread % 8;
      if ((kN == Q0 || row < Q0) && (Q1 % 64 == 0 || part * 64 + piece * 8 < Q1))
        store_words<16>(to + row * Q1 + piece * 8, load_words<16>(staged + swizzled(row, piece)));
    }
  }
};
