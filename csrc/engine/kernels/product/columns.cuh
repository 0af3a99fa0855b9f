// What stands behind contractions, on the way back, in one sweep of grad_y: times the slopes of an activation, which come from
// what it was given or from its result; summed over the samples, the gradient of a bias; and stored as it lies, or turned.
//
// Memory is taken as rows of ROW elements: samples, as many together as make a row that 16 bytes divide, or, where there is
// nothing but slopes, single accesses. Threads have an access of RUN elements of every WAYS-th row, EACH of them on their way
// at once, of both tensors; a rest that makes no whole row is the first block's. Blocks along x take chunks of WAYS * EACH
// rows in turn, along y a tile of a row. Where there is nothing but sums, the ways of all blocks take rows in turn instead, and
// each row that has come is followed by another one that is asked for. In the end the ways of a block add theirs up in shared
// memory, and each block writes sums of its own.
//
// A tile that is stored turned is TR rows of a matrix, with all columns, of each sample of a chunk. In shared memory its
// columns lie one behind another, those that a warp stores to together in banks of their own.
//
// Pass:  Element, Gradient (of x and what lies beside it), BESIDE (the parameter that this is; -1: no activation), STORES (the
//        gradient), SUMS, Result (of these: Sum<Element> for each block, or Element by the only one), FEATURES, ROW, RUN,
//        LANES (accesses of a row that a block has), WAYS, EACH, ROUNDS (the gradient, to tf32)
//        TURNS, and then ROWS and COLUMNS of a matrix, TR, WRITE (elements of one access), PAD (elements behind as many
//        columns as a piece has)
#pragma once
#include "finish/pointwise.cuh"
#include "move/memory.cuh"

template <class Pass> struct Columns {
  using Element = typename Pass::Element;
  using Part = Sum<Element>;
  static constexpr int kSize = sizeof(Element), kPiece = 16 / kSize, RUN = Pass::RUN, kWords = ceil_div(RUN * kSize, 4);
  static constexpr int EACH = Pass::EACH, WAYS = Pass::WAYS, LANES = Pass::LANES, kThreads = WAYS * LANES;
  static constexpr i64 kRow = Pass::ROW;
  static constexpr bool kSlopes = Pass::BESIDE >= 0, kSumsAlone = Pass::SUMS && !Pass::STORES;
  static constexpr int smaller(int a, int b) { return a < b ? a : b; }
  static_assert(kRow % RUN == 0 && (!Pass::TURNS || kRow == Pass::FEATURES));
  struct __align__(RUN * kSize) Run { Element x[RUN]; };

  const Element *x, *beside = nullptr;
  Element* y = nullptr;
  typename Pass::Result* sums;
  i64 batch;
  int tile;

  DEVICE Columns(const Params& params)
      : x(static_cast<const Element*>(params.x)), y(static_cast<Element*>(params.y)),
        sums(static_cast<typename Pass::Result*>(Pass::STORES ? params.sums : params.y)), batch(params.batch), tile(blockIdx.y) {
    if constexpr (kSlopes) beside = static_cast<const Element*>(params.weights[Pass::BESIDE]);
  }
  // Sums alone, of the tile-th LANES accesses of a row
  DEVICE Columns(const Element* from, typename Pass::Result* to, i64 samples, int which)
      : x(from), sums(to), batch(samples), tile(which) {}

  static DEVICE Part of(Element x, [[maybe_unused]] Element beside) {
    if constexpr (kSlopes) return Pass::Gradient::of(widen(x), widen(beside));
    return widen(x);
  }

  // A tile in shared memory, of one sample
  struct Turned {
    static constexpr int ROWS = Pass::ROWS, COLUMNS = Pass::COLUMNS, TR = Pass::TR, WRITE = Pass::WRITE;
    static constexpr int kTiles = ceil_div(ROWS, TR), kElements = COLUMNS * TR + ceil_div(COLUMNS, kPiece) * Pass::PAD;
    static constexpr int kWrites = COLUMNS * TR / WRITE;
    static_assert(TR * COLUMNS == LANES * RUN && TR % WRITE == 0 && Pass::PAD % kPiece == 0);

    static DEVICE u32 place(u32 memory, int r, int c) { return memory + (c * TR + c / kPiece * Pass::PAD + r) * kSize; }
    static DEVICE void store(u32 memory, int lane, const Run& made) {
      const auto at = [&](int e) { return place(memory, (lane * RUN + e) / COLUMNS, (lane * RUN + e) % COLUMNS); };
      if constexpr (kSize == 2 && RUN % (2 * COLUMNS) == 0) {  // rows by pairs
        const auto* x = reinterpret_cast<const u16*>(made.x);
        UNROLL for (int e = 0; e < RUN; ++e)
          if (e / COLUMNS % 2 == 0) store_shared(at(e), u32(x[e]) | u32(x[e + COLUMNS]) << 16);
      } else {
        UNROLL for (int e = 0; e < RUN; ++e) store_shared(at(e), made.x[e]);
      }
    }
  };

  static DEVICE Element stored([[maybe_unused]] Element x, [[maybe_unused]] Part value) {
    if constexpr (Pass::ROUNDS)
      return __uint_as_float(tf32_of(__float_as_uint(value)));
    else if constexpr (kSlopes)
      return narrow<Element>(value);
    else
      return x;
  }

  DEVICE void run() const {
    const int lane = threadIdx.x % LANES, way = threadIdx.x / LANES;
    const i64 rows = batch * Pass::FEATURES / kRow;
    i64 begin = i64(tile) * (LANES * RUN);  // of the tile, in a row
    int present = int(min((kRow - begin) / RUN, i64(LANES)));
    int row = 0;
    if constexpr (Pass::TURNS) {
      row = tile % Turned::kTiles * Pass::TR;
      begin = (i64(tile / Turned::kTiles) * Pass::ROWS + row) * Pass::COLUMNS;
      present = min(Pass::ROWS - row, Pass::TR) * Pass::COLUMNS / RUN;
    }
    const bool has_run = way < WAYS && lane < present;
    const i64 own = begin + lane * RUN;
    Part sum[RUN] = {};
    if constexpr (kSumsAlone)
      add(sum, rows, has_run, way, own);
    else
      sweep(sum, rows, has_run, lane, way, own, row);
    if constexpr (Pass::FEATURES % kRow != 0) {
      const i64 rest = batch * Pass::FEATURES - rows * kRow;
      if (has_run && blockIdx.x == 0 && way == 0)
        for (int e = 0; e < RUN; ++e) {
          if (own + e >= rest) break;
          const i64 at = rows * kRow + own + e;
          const Part value = of(x[at], kSlopes ? beside[at] : Element{});
          if constexpr (Pass::SUMS) sum[e] += value;
          if constexpr (Pass::STORES) store_global(y + at, narrow<Element>(value));
        }
    }
    if constexpr (Pass::SUMS) write(sum, has_run, present, begin, own);
  }

  // Every one of a thread's rows: EACH are on their way, whichever is being added
  DEVICE void add(Part (&sum)[RUN], i64 rows, bool has_run, int way, i64 own) const {
    const i64 first = i64(blockIdx.x) * WAYS + way, step = i64(gridDim.x) * WAYS;
    const int count = has_run && first < rows ? int((rows - first + step - 1) / step) : 0;
    const Element* from = x + first * kRow + own;
    u32 of_x[EACH][kWords];
    const auto fetch = [&](int i, int row) {
      load_global<RUN * kSize>(from, of_x[i], row < count);
      from += step * kRow;
    };
    UNROLL for (int i = 0; i < EACH; ++i) fetch(i, i);
    ROLL for (int done = 0; done < count; done += EACH)
      UNROLL for (int i = 0; i < EACH; ++i) {
        const auto* found = reinterpret_cast<const Element*>(of_x[i]);
        UNROLL for (int e = 0; e < RUN; ++e) sum[e] += widen(found[e]);
        fetch(i, done + EACH + i);
      }
  }

  DEVICE void sweep(Part (&sum)[RUN], i64 rows, bool has_run, int lane, int way, i64 own, [[maybe_unused]] int row) const {
    [[maybe_unused]] const u32 memory = shared_address(shared_memory);
    for (i64 first = i64(blockIdx.x) * (WAYS * EACH); first < rows; first += i64(gridDim.x) * (WAYS * EACH)) {
      u32 of_x[EACH][kWords], of_beside[kSlopes ? EACH : 1][kWords];
      UNROLL for (int i = 0; i < EACH; ++i) {
        const i64 at = (first + i * WAYS + way) * kRow + own;
        const bool there = has_run && first + i * WAYS + way < rows;
        load_global<RUN * kSize>(x + at, of_x[i], there);
        if constexpr (kSlopes) load_global<RUN * kSize>(beside + at, of_beside[i], there);
      }
      UNROLL for (int i = 0; i < EACH; ++i) {
        const i64 sample = first + i * WAYS + way;
        if (Pass::STORES && !(has_run && sample < rows)) break;
        const auto *from = reinterpret_cast<const Element*>(of_x[i]), *other = reinterpret_cast<const Element*>(of_beside[kSlopes ? i : 0]);
        Run made;
        UNROLL for (int e = 0; e < RUN; ++e) {
          const Part value = of(from[e], other[e]);
          if constexpr (Pass::SUMS) sum[e] += value;
          if constexpr (Pass::STORES) made.x[e] = stored(from[e], value);
        }
        if constexpr (Pass::TURNS)
          Turned::store(memory + (i * WAYS + way) * (Turned::kElements * kSize), lane, made);
        else if constexpr (Pass::STORES)
          store_global<RUN * kSize>(y + sample * kRow + own, reinterpret_cast<const u32*>(&made));
      }
      if constexpr (Pass::TURNS) {
        __syncthreads();
        UNROLL for (int i = 0; i < EACH; ++i) {
          const i64 sample = first + i * WAYS + way;
          if (way >= WAYS || sample >= rows) break;
          const u32 from = memory + (i * WAYS + way) * (Turned::kElements * kSize);
          Element* to = y + sample * kRow + i64(tile / Turned::kTiles) * (Pass::ROWS * Pass::COLUMNS) + row;
          UNROLL for (int j = lane; j < Turned::kWrites; j += LANES) {
            const int c = j / (Pass::TR / Pass::WRITE), r = j % (Pass::TR / Pass::WRITE) * Pass::WRITE;
            if (row + r < Pass::ROWS)
              store_words<Pass::WRITE * kSize>(to + i64(c) * Pass::ROWS + r, load_words<Pass::WRITE * kSize>(Turned::place(from, r, c)));
          }
        }
        __syncthreads();
      }
    }
  }

  // Ways lie one behind another in shared memory, each as its sums do in what is written: threads side by side write sums that are
  DEVICE void write(const Part (&sum)[RUN], bool has_run, int present, i64 begin, i64 own) const {
    auto* to = sums + i64(blockIdx.x) * kRow;
    if constexpr (WAYS > 1) {
      constexpr int kAtOnce = smaller(16, RUN * sizeof(Part)), kTogether = 8;
      const u32 memory = shared_address(shared_memory);
      if (threadIdx.x < kThreads)
        UNROLL for (int i = 0; i < RUN * int(sizeof(Part)) / kAtOnce; ++i)
          store_words<kAtOnce>(memory + threadIdx.x * (RUN * sizeof(Part)) + i * kAtOnce,
                               reinterpret_cast<const Words<kAtOnce>*>(sum)[i]);
      __syncthreads();
      for (int at = threadIdx.x; at < present * RUN && threadIdx.x < kThreads; at += kThreads) {
        Part all = {};
        ROLL for (int way = 0; way < WAYS; way += kTogether)
          UNROLL for (int i = 0; i < kTogether; ++i)
            if (way + i < WAYS) all += load_sum(memory + ((way + i) * (LANES * RUN) + at) * sizeof(Part), all);
        store_global(to + begin + at, narrow<typename Pass::Result>(all));
      }
    } else if (has_run) {
      constexpr int kTogether = smaller(RUN, 16 / sizeof(typename Pass::Result));
      struct __align__(kTogether * sizeof(typename Pass::Result)) Some { typename Pass::Result x[kTogether]; };
      UNROLL for (int i = 0; i < RUN / kTogether; ++i) {
        Some some;
        UNROLL for (int e = 0; e < kTogether; ++e) some.x[e] = narrow<typename Pass::Result>(sum[i * kTogether + e]);
        store_global(reinterpret_cast<Some*>(to + own) + i, some);
      }
    }
  }
};
