// The gradient of one contraction's weight: dW[q, p] = sum_k G[k, q] X[k, p], from the states before and behind it.
//
// X is [row][p][inner] and G [row][q][inner], as a chain has them. Of tied weights a row is (sample, outer), and k counts
// (row, inner); of untied ones rows are samples, and each (outer, inner) is a group with a weight of its own. A block has a
// tile of q x p for WG neighbouring groups, WM x WN warps for each, and every gridDim.x-th chunk of BK k's. It reads chunks
// by runs of RUN elements, whatever these count (p and q, k's, or groups), into shared memory as [k][q] and [k][p]. Blocks
// with the same tile write their sums side by side; a second kernel adds them up, always in the same order. Where there is but
// one block for a tile, it writes elements.
//
// Pass:  Math, Element, Result (what is written), WEIGHT (the parameter that G is), P, Q, INNER, ROWS (of a sample), OUTER (of groups), TIED; WM, WN, WG,
//        MT, NT, BK, RUN; LEAST (chunks for a block), MOST (blocks for a tile); TERMS of a sum, each with weights of its own, and
//        X_TERM and G_TERM, a sample's features where X or G has a state for each term, one behind the other, or 0
#pragma once
#include "multiply/mma.cuh"
#include "types/params.cuh"

template <class Pass> struct Gradient {
  using Math = typename Pass::Math;
  using Element = typename Pass::Element;
  static constexpr int kSize = sizeof(Element), kThreads = Pass::WM * Pass::WN * Pass::WG * 32;
  static constexpr int P = Pass::P, Q = Pass::Q, INNER = Pass::INNER, MT = Pass::MT, NT = Pass::NT, WG = Pass::WG;
  static constexpr int BK = Pass::BK, RUN = Pass::RUN, BM = Pass::WM * MT * 16, BN = Pass::WN * NT * 8;
  // What follows a k in memory: columns, k's, or groups.
  static constexpr bool kColumns = INNER == 1, kInner = INNER > 1 && Pass::TIED, kGroups = INNER > 1 && !Pass::TIED;
  static constexpr int inner_of_chunk() {
    int n = 1;
    while (kInner && n < INNER && n < BK) n *= 2;
    return n;
  }
  static constexpr int kInnerHere = inner_of_chunk(), kRowsHere = BK / kInnerHere;      // of a chunk
  static constexpr int kChunksOfRow = kInner ? ceil_div(INNER, kInnerHere) : 1;         // where a row has several
  static constexpr i64 kRowX = Pass::TIED ? i64(P) * INNER : i64(P) * INNER * Pass::OUTER;
  static constexpr i64 kRowG = Pass::TIED ? i64(Q) * INNER : i64(Q) * INNER * Pass::OUTER;
  static constexpr int stride(int width) { return kSize == 8 ? width + 4 : width % 16 ? width : width + 8; }  // of k's in shared memory
  static constexpr int kLeft = WG * BK * stride(BM) * kSize, kSlot = kLeft + WG * BK * stride(BN) * kSize;
  static constexpr int kTilesQ = ceil_div(Q, BM), kTilesP = ceil_div(P, BN), kGroupTiles = ceil_div(kGroups ? INNER : 1, WG);
  static constexpr i64 kWeights = i64(P) * Q * (Pass::TIED ? Pass::TERMS : Pass::OUTER * INNER);
  static_assert(Pass::TIED || Pass::TERMS == 1);

  using Run = Words<RUN * kSize>;
  using Sums = Sum<Element>[MT][NT][4];
  static constexpr int kRunsG = WG * BK * BM / RUN, kRunsX = WG * BK * BN / RUN;
  static constexpr int kCountG = ceil_div(kRunsG, kThreads), kCountX = ceil_div(kRunsX, kThreads);

  const Params& params;
  const Lane lane;
  const int thread, row, column, part;  // this warp's first row and column in a tile, and its group
  const u32 memory;
  const i64 rows;
  int q, p, inner, outer, term;  // where the tile begins

  DEVICE Gradient(const Params& given)
      : params(given), thread(threadIdx.x), row(thread / 32 % Pass::WM * MT * 16),
        column(thread / 32 / Pass::WM % Pass::WN * NT * 8), part(thread / 32 / (Pass::WM * Pass::WN)),
        memory(shared_address(shared_memory)), rows(given.batch * Pass::ROWS) {
    const int tile = blockIdx.y, group = tile / (kTilesQ * kTilesP);
    q = tile % kTilesQ * BM, p = tile / kTilesQ % kTilesP * BN;
    inner = group % kGroupTiles * WG, outer = Pass::TIED ? 0 : group / kGroupTiles, term = Pass::TERMS > 1 ? group : 0;
  }

  // A run of a chunk: its first k, column and group, in an order in which neighbouring threads read what is side by side.
  struct Place { int k, column, group; };
  template <int WIDTH> static DEVICE Place place(int j) {
    if constexpr (kColumns) {
      return {j / (WIDTH / RUN), j % (WIDTH / RUN) * RUN, 0};
    } else if constexpr (kGroups) {
      return {j / (WG / RUN * WIDTH), j / (WG / RUN) % WIDTH, j % (WG / RUN) * RUN};
    } else {
      constexpr int kSector = 32 / (RUN * kSize) < kInnerHere / RUN ? 32 / (RUN * kSize) : kInnerHere / RUN;
      return {(j / (kSector * WIDTH) * kSector + j % kSector) * RUN, j / kSector % WIDTH, 0};
    }
  }
  template <int WIDTH, int COUNT>
  DEVICE void fetch(Run (&to)[COUNT], const Element* from, i64 row_step, int first, int length, i64 chunk) const {
    const i64 first_row = chunk / kChunksOfRow * kRowsHere;
    const int first_inner = kInner ? int(chunk % kChunksOfRow) * kInnerHere : inner;
    UNROLL for (int n = 0; n < COUNT; ++n) {
      const int j = n * kThreads + thread;
      const Place at = place<WIDTH>(j);
      const i64 r = first_row + at.k / kInnerHere;
      const int i = first_inner + (kInner ? at.k % kInnerHere : at.group), m = first + at.column;
      to[n] = Run{};
      if ((WG * BK * WIDTH / RUN % kThreads == 0 || j < WG * BK * WIDTH / RUN) && r < rows && m < length && i < INNER)
        to[n] = *reinterpret_cast<const Run*>(from + r * row_step + (i64(outer) * length + m) * INNER + i);
    }
  }
  template <int WIDTH, int COUNT> DEVICE void put(const Run (&from)[COUNT], u32 to) const {
    UNROLL for (int n = 0; n < COUNT; ++n) {
      const int j = n * kThreads + thread;
      if (WG * BK * WIDTH / RUN % kThreads && j >= WG * BK * WIDTH / RUN) break;
      const Place at = place<WIDTH>(j);
      const u32 here = to + ((at.group * BK + at.k) * stride(WIDTH) + at.column) * kSize;
      if constexpr (kColumns) {
        store_words<RUN * kSize>(here, from[n]);
      } else {
        const Element* element = reinterpret_cast<const Element*>(&from[n]);
        UNROLL for (int e = 0; e < RUN; ++e)
          store_shared(here + e * (kGroups ? BK : 1) * stride(WIDTH) * kSize, element[e]);
      }
    }
  }
  // float: the products of high parts are summed apart from the others, which infinities make NaN: then they do not count.
  static constexpr bool kSplit = Math::kRepairs;
  DEVICE void multiply(Sums& y, u32 slot) const {
    constexpr int kFlush = kSplit ? Math::kFlush * Math::kStep : BK, kStrideA = stride(BM), kStrideB = stride(BN);
    const u32 from_a = slot + (part * BK * kStrideA + row) * kSize + Math::template lane_a_by_m<kStrideA>(lane);
    const u32 from_b = slot + kLeft + (part * BK * kStrideB + column) * kSize + Math::template lane_b_by_n<kStrideB>(lane);
    Sums high, low = {};
    UNROLL for (int k = 0; k < BK; k += Math::kStep) {
      typename Math::A a[MT];
      typename Math::B b[NT];
      UNROLL for (int m = 0; m < MT; ++m)
        Math::template load_a_by_m<kStrideA>(a[m], from_a + (k * kStrideA + m * 16) * kSize);
      u32 columns[NT];
      UNROLL for (int n = 0; n < NT; ++n) columns[n] = from_b + (k * kStrideB + n * 8) * kSize;
      Math::template load_b_by_n<Math::kStep, kStrideB, NT, 8>(b, columns, lane.index);
      UNROLL for (int m = 0; m < MT; ++m)
        UNROLL for (int n = 0; n < NT; ++n) {
          if constexpr (kSplit) {
            if (k % kFlush == 0)
              UNROLL for (float& sum : high[m][n]) sum = 0;
            Math::multiply_apart(high[m][n], low[m][n], a[m], b[n]);
            if ((k + Math::kStep) % kFlush == 0) add_sums(y[m][n], high[m][n]);
            if (k + Math::kStep == BK)
              UNROLL for (int i = 0; i < 4; ++i) y[m][n][i] += or_zero(low[m][n][i]);
          } else {
            Math::template multiply<Math::kStep>(y[m][n], a[m], b[n]);
          }
        }
    }
  }

  DEVICE void store(const Sums& y) const {
    using Result = typename Pass::Result;
    Result* to = static_cast<Result*>(params.y) + blockIdx.x * kWeights;
    const int group = Pass::TIED ? term : outer * INNER + inner + part;
    if (kGroups && INNER % WG && inner + part >= INNER) return;
    UNROLL for (int m = 0; m < MT; ++m)
      UNROLL for (int n = 0; n < NT; ++n)
        UNROLL for (int i = 0; i < 4; i += 2) {
          const int r = q + row + m * 16 + lane.g + i / 2 * 8, c = p + column + n * 8 + lane.t * 2;
          Result* here = to + (i64(group) * Q + r) * P + c;
          if constexpr (P % 2 == 0) {
            const Pair<Result> both(y[m][n][i], y[m][n][i + 1]);
            if (r < Q && c < P) store_words<sizeof both>(here, *reinterpret_cast<const Words<sizeof both>*>(&both));
          } else {
            if (r < Q && c < P) store_global(here, narrow<Result>(y[m][n][i]));
            if (r < Q && c + 1 < P) store_global(here + 1, narrow<Result>(y[m][n][i + 1]));
          }
        }
  }

  DEVICE void run() const {
    const Element* x = static_cast<const Element*>(params.x) + term * params.batch * Pass::X_TERM;
    const Element* g = static_cast<const Element*>(params.weights[Pass::WEIGHT]) + term * params.batch * Pass::G_TERM;
    const i64 chunks = (rows + kRowsHere - 1) / kRowsHere * kChunksOfRow;
    Run next_g[kCountG], next_x[kCountX];
    const auto fetch_both = [&](i64 chunk) {
      fetch<BM>(next_g, g, kRowG, q, Q, chunk);
      fetch<BN>(next_x, x, kRowX, p, P, chunk);
    };
    const auto put_both = [&](u32 slot) { put<BM>(next_g, slot), put<BN>(next_x, slot + kLeft); };
    Sums y = {};
    u32 slot = memory;
    fetch_both(blockIdx.x);
    put_both(slot);
    __syncthreads();
    ROLL for (i64 chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
      const bool more = chunk + gridDim.x < chunks;
      if (more) fetch_both(chunk + gridDim.x);
      multiply(y, slot);
      slot = slot == memory ? memory + kSlot : memory;
      if (more) put_both(slot);
      __syncthreads();
    }
    store(y);
  }
};

// What the blocks of each tile have summed, added up in their order. A thread has VECTOR sums side by side, and every WAYS-th
// block's; many weights fill the GPU by themselves, of few several threads share one. Pass: Element, COUNT (of weights), WAYS,
// VECTOR, and what makes the number of blocks: UNITS (of a sample), UNITS_PER_BLOCK, MOST. Each has one for every one of the first
// SINGLES weights, which lie before the others' sums, and FOLDS for the others.
// Result: what is written, sums where they come from or elements. BEGIN: where, behind other gradients.
template <class Pass> struct Reduction {
  using Element = typename Pass::Element;
  using Result = typename Pass::Result;
  using Part = Sum<Element>;
  static constexpr int WAYS = Pass::WAYS, VECTOR = Pass::VECTOR, kLanes = 256 / WAYS;
  static constexpr i64 kCount = Pass::COUNT / VECTOR, kSingles = Pass::SINGLES / VECTOR;
  template <class T> struct __align__(VECTOR * sizeof(T)) Some { T x[VECTOR]; };
  const Params& params;
  DEVICE Reduction(const Params& given) : params(given) {}
  // All that there are, or 16 of them, on their way at once
  static constexpr int kParts = int((Pass::MOST * Pass::FOLDS + WAYS - 1) / WAYS), kAtOnce = kParts < 16 ? kParts : 16;
  static DEVICE void add(Some<Part>& sum, const Some<Part>* from, i64 step, int first, int parts) {
    ROLL for (int part = first; part < parts; part += WAYS * kAtOnce) {
      using Loaded = Words<sizeof(Some<Part>)>;
      Loaded more[kAtOnce] = {};
      UNROLL for (int i = 0; i < kAtOnce; ++i)
        if (part + i * WAYS < parts) more[i] = *reinterpret_cast<const Loaded*>(from + (part + i * WAYS) * step);
      UNROLL for (int i = 0; i < kAtOnce; ++i)
        UNROLL for (int e = 0; e < VECTOR; ++e) sum.x[e] += reinterpret_cast<const Part*>(&more[i])[e];
    }
  }
  DEVICE void run() const { add_all(params.x, blockIdx.y, gridDim.y); }
  // Of what begins at `of`, by `blocks` blocks
  DEVICE void add_all(const void* of, int block, int blocks) const {
    const u32 sums = shared_address(shared_memory);
    const i64 summed = (params.batch * Pass::UNITS + Pass::UNITS_PER_BLOCK - 1) / Pass::UNITS_PER_BLOCK;
    const int present = int(min(summed, i64(Pass::MOST))), way = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
    const auto* x = static_cast<const Some<Part>*>(of);
    auto* y = static_cast<Some<Result>*>(params.y) + Pass::BEGIN / VECTOR;
    for (i64 first = i64(block) * kLanes; first < kCount; first += i64(blocks) * kLanes) {
      const i64 at = first + lane;
      Some<Part> sum = {};
      const bool single = at < kSingles;
      const auto* from = x + at + (single ? 0 : (present - 1) * kSingles);
      const i64 step = single ? kSingles : kCount - kSingles;
      const int parts = single ? present : int(present * Pass::FOLDS);
      if (at < kCount) add(sum, from, step, way, parts);
      if constexpr (WAYS > 1) {
        UNROLL for (int i = 0; i < VECTOR; ++i) store_shared(sums + (i * 256 + threadIdx.x) * sizeof(Part), sum.x[i]);
        __syncthreads();
        for (int other = 1; way == 0 && other < WAYS; ++other)
          UNROLL for (int i = 0; i < VECTOR; ++i)
            sum.x[i] += load_sum(sums + (i * 256 + other * kLanes + lane) * sizeof(Part), sum.x[i]);
      }
      if (way == 0 && at < kCount) {
        Some<Result> result;
        UNROLL for (int i = 0; i < VECTOR; ++i) result.x[i] = narrow<Result>(sum.x[i]);
        store_global(y + at, result);
      }
      if constexpr (WAYS > 1) __syncthreads();
    }
  }
};

// The same of several passes at once, each with blocks along y of its own. Pass: add_all(), which says where each one's sums begin.
template <class Pass> struct Reductions {
  const Params& params;
  DEVICE Reductions(const Params& given) : params(given) {}
  template <class Of, int FIRST, int BLOCKS> DEVICE void add(i64 begin) const {
    const int block = int(blockIdx.y) - FIRST;
    if (block >= 0 && block < BLOCKS) Reduction<Of>(params).add_all(static_cast<const char*>(params.x) + begin, block, BLOCKS);
  }
  DEVICE void run() const { Pass::add_all(*this); }
};
