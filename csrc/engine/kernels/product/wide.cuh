// A pass of one contraction as a matrix product for each group, on the warpgroup instructions of sm_90a:
//
//     Y[m, j] = sum_k X[m, k] W[j, k]      m: samples (of tied weights: samples and outer), j: q in some order
//
// Groups, terms and the layout of y are those of streamed.cuh. A block takes tiles of 64 x CONSUMERS rows and N columns of
// sums for HELD neighbouring groups, one group after the other. PRODUCERS warpgroups take turns to fill a ring of SLOTS slabs of
// 128 bytes of k; each consumer warpgroup has 64 rows. With 16 bits, x is operand A and the weights are B, both from shared memory. With
// 32 bits the weights are A: they come through registers, where they are rounded to tf32; producers round what they copied of
// x, if nobody has. Floats that are to be exact are multiplied as halves (halves.cuh), of slabs of 64 k's: weight_halves.cuh
// has made those of the weights, producers make x's where they have copied it.
//
// Rows of x that 16 bytes do not divide come by smaller pieces, as the weight's do; or, of 16 bits and tf32, SHIFT: by pieces of 16
// bytes, in which all rows of a tile begin at the same place, if they are EVERY rows behind one another. weight_halves.cuh has
// made a weight for each of these places, with zeros for what is in front of such a row.
//
// Results go from registers to memory: the rows of a weight lie in shared memory in such an order that a thread gets RUN
// columns side by side, and groups are held until the last one's sums are there, so that what a thread stores is contiguous.
// Accesses that fill no sector of L2 (32 bytes) cost five times as much, so neighbouring threads, or two blocks of a cluster
// with half of the groups each, exchange what they have. STAGED, in 16 bits, where they would be small pieces of rows: through
// shared memory, from which whole rows go, or, where groups take turns in y, what several of them have (runs.cuh).
//
// A mode of 8 before the one that is contracted may be contracted as well, in 16 bits: its p's are eight rows of x side by side,
// which producers, who have copied them, mix in place (mixing.cuh).
//
// With BESIDE (and no cluster, or of 16 bits several groups) sums become the gradient of what is activated: Activation takes each with what a
// state has at its place, grad_y, or, if the sums are that, the activation's result. It is loaded while the sums are made,
// by the accesses of the results. kernels/product/wide.py writes the constants:
//
// Pass:  Element, Activation, BESIDE (the parameter that the state is, or -1), BIAS, WEIGHT, P, Q, OUTER, GROUPS, FAST,
//        NEXT, B, BIAS_INNER, STEP_A, STEP_B, X_SAMPLE, Y_SAMPLE, X_TERM, Y_TERM, TERMS and TERM_BLOCKS as in streamed.cuh, SPAN
//        (tiles of rows whose blocks run side by side), FROM_LAST (the last tiles come first), CONSUMERS, N, HELD, RUN,
//        TURNS (runs of a tile's row that go through shared memory, or 0) and SWEPT (groups of a tile then, or HELD), PRODUCERS,
//        SLOTS, COPY and STORE (bytes of one access to x and y), EVERY, SHIFT (what divides all places in a piece; 0: rows begin
//        with one), STAGED, EDGE (bytes of an access to y at the ends of its rows), PAIRED (a thread has whole sectors), CLUSTER (two blocks have), ROUND_X and
//        ROUND_Y (to tf32), SPLIT (float as three products of halves), HALVES and SCALES (where those of the weight lie,
//        in elements), MIXED (the weight of the mode before, or -1), AHEAD (slabs on their way to producers who round or mix),
//        MORE and FEWER (registers of consumers and producers; 0: as they are), SCALED (floats in params.sums before what a prepared
//        weight is multiplied by and what takes it back, or -1)
#pragma once
#include "types/halves.cuh"
#include "multiply/mixing.cuh"
#include "multiply/mma.cuh"
#include "types/params.cuh"
#include "finish/pointwise.cuh"
#include "multiply/wgmma.cuh"
#include "move/ring.cuh"
#include "kernels/product/runs.cuh"

// What the matrix unit truncates to the nearest tf32.
DEVICE u32 nearest(u32 x) { return fabsf(__uint_as_float(x)) < __int_as_float(0x7f800000) ? x + 0x1000 : x; }

template <class Pass> struct Wide {
  using Element = typename Pass::Element;
  static constexpr int kSize = sizeof(Element), kPiece = 16 / kSize;
  static constexpr bool kPacked = kSize == 2;
  static constexpr int P = Pass::P, Q = Pass::Q, N = Pass::N, HELD = Pass::HELD, RUN = Pass::RUN, B = Pass::B;
  static constexpr int FAST = Pass::FAST, EVERY = Pass::EVERY;
  // Operand A is x, or the weights: those come through registers, where they are rounded to tf32.
  static constexpr bool kShifted = Pass::SHIFT > 0, kTurned = kSize == 4, kMixes = Pass::MIXED >= 0, kPrepares = Pass::ROUND_X || kMixes;
  static constexpr int M = 64 * Pass::CONSUMERS, kRows = kTurned ? N : M, kColumns = kTurned ? M : N;
  // A slab's k's. What is split comes in two parts of 128 bytes, which halves of both take the place of.
  static constexpr int kMostShift = kShifted ? kPiece - Pass::SHIFT : 0, kRow = P + kMostShift;
  static constexpr int kParts = Pass::SPLIT ? 2 : 1, kChunks = ceil_div(kRow, kParts * 128 / kSize);
  static constexpr int kPart = Pass::SPLIT ? round_up(ceil_div(P, 2 * kChunks), kPiece) : 128 / kSize, BK = kParts * kPart;
  // A row of a weight, and from one part of a slab to the next: as it lies, or as weight_halves.cuh puts it
  static constexpr int kWeightRow = Pass::SPLIT ? kChunks * 64 : kShifted ? kChunks * kPart : P, kWeightPart = Pass::SPLIT ? 32 : kPart;
  static constexpr int kConsumers = 128 * Pass::CONSUMERS, PRODUCERS = Pass::PRODUCERS;
  static constexpr int kSlabs = Pass::TERMS * kChunks;  // of a group
  static constexpr int kBlocks = Pass::CLUSTER ? 2 : 1;  // that take groups of a tile together
  static constexpr int kGroups = Pass::SWEPT, kWidth = Pass::TURNS > 0 ? Pass::TURNS * B : kColumns;  // of a tile
  static constexpr int kGroupTiles = ceil_div(FAST, kGroups * kBlocks), kColumnTiles = ceil_div(Q, kWidth);
  static constexpr int kTiles = kGroupTiles * kColumnTiles * (Pass::GROUPS / FAST) * Pass::TERM_BLOCKS * EVERY;
  static constexpr int kSlotBytes = (M + N) * kParts * 128;
  static constexpr int kX = kTurned ? M * kParts * 128 : 0, kWeight = kTurned ? 0 : M * 128;
  // What copies x, and weights: bytes at once, lanes of a row, which then take another row for each round
  static constexpr int kCopy = Pass::COPY, kCopied = kCopy / kSize, kLanes = 128 / kCopy, kDown = 128 / kLanes;
  static constexpr bool kPrepared = Pass::SPLIT || kShifted;  // weights, by another pass
  static constexpr int kCopyWeight = kPrepared ? 16 : kCopy, kLanesWeight = 128 / kCopyWeight, kDownWeight = 128 / kLanesWeight;
  static_assert(!kShifted || (kCopy == 16 && !kMixes && !Pass::SPLIT && !Pass::CLUSTER));
  // Behind the slots: scales of rows of x, barriers, and what a block of two is given by the other
  static constexpr int kScales = Pass::SLOTS * kSlotBytes, kScaleBytes = Pass::SPLIT ? N * 4 : 0;
  static constexpr int kFull = kScales + Pass::SLOTS * kScaleBytes;
  static constexpr int kGot = kFull + Pass::SLOTS * 16, kFree = kGot + 96, kExchange = round_up(kFree + 96, 16);
  // Or results on their way, by rows that begin where they do in memory, of a piece of 16 bytes
  static constexpr int kResults = round_up(kGot, 16), kResultRow = (N / 8 + 1 | 1) * 16;
  static_assert(!Pass::STAGED || (kPacked && !Pass::CLUSTER));
  static_assert(Pass::TURNS > 0 ? Pass::STAGED && Pass::BESIDE < 0 && Pass::OUTER == 1 : kGroups == HELD);
  static_assert(!Pass::STAGED || Pass::TURNS > 0 || (HELD == 1 && (FAST == 1 || B == Q)));

  static constexpr i64 kXRow = Pass::OUTER == 1 ? Pass::X_SAMPLE : P;

  struct Tile {
    i64 first;  // row; the others are EVERY behind one another
    int q, fast, slow, term;
  };

  const Params& params;
  const u32 memory;
  const Ring<Pass::SLOTS, kSlotBytes> slots;  // slabs of x and of the weight
  const int warpgroup;
  i64 tiles;

  DEVICE Wide(const Params& p)
      : params(p), memory(shared_address(shared_memory) + 1023 & ~1023u), slots(memory, memory + kFull),
        warpgroup(uniform(threadIdx.x / 128)) {
    tiles = (rows() + kRows * EVERY - 1) / (kRows * EVERY) * kTiles;
  }

  DEVICE i64 rows() const { return params.batch * Pass::OUTER; }
  // From one term's state to the next, where each has one of its own
  DEVICE i64 x_term() const { return Pass::X_TERM > 0 ? params.batch * Pass::X_TERM : 0; }
  DEVICE i64 y_term() const { return Pass::Y_TERM > 0 ? params.batch * Pass::Y_TERM : 0; }
  static DEVICE i64 place(i64 row, i64 sample, i64 each) {
    if constexpr (Pass::OUTER == 1) return row * sample;
    return sample == Pass::OUTER * each ? row * each : row / Pass::OUTER * sample + row % Pass::OUTER * each;
  }
  static DEVICE int rank() { return blockIdx.y % kBlocks; }
  static DEVICE i64 first_tile() { return i64(blockIdx.y / kBlocks) * gridDim.x + blockIdx.x; }
  static DEVICE i64 blocks() { return i64(gridDim.x) * (gridDim.y / kBlocks); }
  // All tiles of SPAN tiles of rows, then of the next; groups that share sectors of y side by side.
  DEVICE Tile tile_of(i64 number) const {
    const i64 n = Pass::FROM_LAST ? tiles - 1 - number : number;  // L2 still has what the pass before has made last
    const i64 row_tiles = tiles / kTiles, from = n / (Pass::SPAN * kTiles) * Pass::SPAN;
    const int span = int(min(i64(Pass::SPAN), row_tiles - from)), rest = int(n - from * kTiles), each = rest / span;
    const int tile = each / EVERY, columns = tile / kGroupTiles % kColumnTiles, further = tile / (kGroupTiles * kColumnTiles);
    return {(from + rest % span) * (kRows * EVERY) + each % EVERY, columns * kWidth, (tile % kGroupTiles * kBlocks + rank()) * kGroups,
            further % (Pass::GROUPS / FAST), further / (Pass::GROUPS / FAST)};
  }
  // The tile's i-th row
  static DEVICE i64 row_at(const Tile& tile, int i) { return tile.first + i * EVERY; }
  static DEVICE int groups_of(const Tile& tile) { return Pass::TURNS > 0 ? min(kGroups, FAST - tile.fast) : HELD; }
  // Elements in front of a row in the piece of 16 bytes that it begins in, the same for all of a tile
  static DEVICE int shift_of(const Tile& tile, int group) {
    return (u32(tile.first) * u32(kXRow) + u32(group) * P) % kPiece;
  }
  // The weight of a group, which counts (outer, inner).
  static DEVICE int weight_of(const Tile& tile, int fast) {
    return (tile.slow * Pass::NEXT + fast % Pass::NEXT) * (FAST / Pass::NEXT) + fast / Pass::NEXT;
  }
  // Column of the tile for row r of a slab of weights: row or column 8 n + 2 t + i of the sums. A thread's are side by side.
  static constexpr DEVICE int column_of(int r) {
    if (kTurned) return r / 16 * 16 + r % 8 * 2 + r / 8 % 2;
    constexpr int kEach = RUN / 2;
    const int n = r / 8, t = r % 8 / 2;
    return n / kEach * (4 * RUN) + t * RUN + n % kEach * 2 + r % 2;
  }
  static constexpr DEVICE int weight_row(int j) { return j % B * Pass::STEP_B + j / B * Pass::STEP_A; }
  static constexpr bool is_even() {
    if (B == Q) return true;
    constexpr int kEach = kDownWeight;
    for (int r = 0; r < kColumns; ++r)
      if (weight_row(column_of(r)) != weight_row(column_of(r % kEach)) + weight_row(column_of(r / kEach * kEach))) return false;
    return Pass::STEP_B == 1 || kColumns % B == 0 || B % kColumns == 0;
  }
  static constexpr bool kEven = is_even();  // a thread's rows of the weight lie constants behind its first
  static_assert(Pass::OUTER == 1 || Pass::X_SAMPLE == i64(Pass::OUTER) * P, "rows of x lie evenly");

  // The slabs in the order in which they are used. Some of the producers take the pieces of a row, eight where these have 16
  // bytes, and others those of further rows, and again. x and weight are where a thread's piece of its first row begins in the
  // tile's first slab; left counts rows of x, and columns, from its first on.
  struct Cursor {
    i64 n;
    Tile tile;
    const Element *x, *weight;
    int left_x, left_weight, group, term, k;
  };
  DEVICE bool is_in(const Cursor& at) const { return at.n < tiles; }
  DEVICE void begin_tile(Cursor& at, int thread) const {
    if (!is_in(at)) return;
    at.tile = tile_of(at.n), at.group = at.term = at.k = 0;
    const int piece = thread % kLanesWeight * (kCopyWeight / kSize), j = at.tile.q + column_of(thread / kLanesWeight);
    const int row = thread / kLanes;
    at.x = static_cast<const Element*>(params.x) + row_at(at.tile, row) * kXRow + at.tile.term * x_term();
    at.x += thread % kLanes * kCopied;
    at.left_x = int(min((rows() - at.tile.first + EVERY - 1) / EVERY, i64(kRows))) - row;
    at.weight = static_cast<const Element*>(kPrepared ? params.sums : params.weights[Pass::WEIGHT]) + Pass::HALVES + piece;
    at.weight += (i64(Pass::GROUPS > 1 ? 0 : at.tile.term) * Q + (kEven ? weight_row(j) : 0)) * kWeightRow;
    if constexpr (kShifted) at.weight += at.tile.first % EVERY * kWeights;
    at.left_weight = Q - j;
    if constexpr (Pass::BESIDE >= 0 && (HELD == FAST || B == Q)) fetch_beside(at.tile, thread + producer() * 128);
  }
  static constexpr i64 kWeights = i64(Pass::TERMS) * (Pass::GROUPS > 1 ? Pass::GROUPS : Pass::TERM_BLOCKS) * Q * kWeightRow;  // of one shift
  // Its part of the state is in L2 when the consumers, who have no registers to load it ahead, come to the tile.
  DEVICE void fetch_beside(const Tile& tile, int thread) const {
    constexpr int kEach = HELD == FAST ? FAST : 1;  // numbers of a column, side by side
    constexpr int kLine = 128 / kSize, kLines = ceil_div(kColumns * kEach, kLine);
    const Element* state = static_cast<const Element*>(params.weights[Pass::BESIDE]) + feature(tile, tile.q, tile.fast);
    ROLL for (int i = thread; i < kRows * kLines; i += 128 * PRODUCERS) {
      const i64 row = row_at(tile, i / kLines);
      const int column = i % kLines * kLine;
      if (row < rows() && tile.q + column / kEach < Q) prefetch(state + place(row, Pass::Y_SAMPLE, Q) + column);
    }
  }
  DEVICE void advance(Cursor& at, int thread) const {
    at.k += BK;
    if (at.k < kRow) return;
    at.k = 0;
    if (++at.term < Pass::TERMS) return;
    at.term = 0;
    if (++at.group < groups_of(at.tile)) return;
    at.n += blocks();
    begin_tile(at, thread);
  }
  template <int HEIGHT> static DEVICE bool is_whole(int i, int thread) {
    return HEIGHT % 16 == 0 || i * 16 + 16 <= HEIGHT || thread < 64;
  }
  DEVICE void copy_slab(const Cursor& at, int thread, u32 slot) const {
    constexpr int kTogether = kCopy == 16 ? 64 : 8;  // or the places of many small copies are spilled
    const int fast = at.tile.fast + at.group;
    const i64 group = Pass::GROUPS > 1 ? weight_of(at.tile, fast) : 0;
    const Element* x = at.x + (group * P + at.term * x_term() + at.k);
    const Element* weight = at.weight + ((Pass::GROUPS > 1 ? group : i64(at.term)) * Q * kWeightRow +
                                         (Pass::SPLIT ? at.k / kPart * kWeightPart : at.k));
    const bool has_group = FAST % kGroups == 0 || fast < FAST;
    const int shift = kShifted ? shift_of(at.tile, int(group)) : 0;
    UNROLL for (int part = 0; part < kParts; ++part) {
      const int k = part * kPart;
      const auto has = [&](int piece) {
        return (P % BK == 0 || at.k + k + piece < P) && (kPart * kSize == 128 || piece < kPart) && has_group;
      };
      const int left_x = has(thread % kLanes * kCopied) ? at.left_x : 0;
      const int piece = thread % kLanesWeight * (kCopyWeight / kSize);
      const bool has_weight = kShifted ? has_group && at.k + piece < kRow : Pass::SPLIT ? has_group : has(piece);
      const int left_weight = has_weight ? at.left_weight : 0;
      // What is behind the row becomes zeros, as does what is before it, in its first piece, but for 16 bits: these are masked by
      // those who multiply.
      const int rest = (shift + P - at.k - thread % 8 * kPiece) * kSize, bytes = has_group && rest > 0 ? min(16, rest) : 0;
      const u32 to_x = slot + kX + part * N * 128 + place_of<kCopy>(thread);
      UNROLL_BY(kTogether) for (int i = 0; i < ceil_div(kRows, kDown); ++i) {
        const u32 to = (to_x ^ (i * kDown & 7) << 4) + i * kDown * 128;
        const Element* from = x + (i * kDown * EVERY * kXRow + k);
        if (kRows % kDown && !is_whole<kRows>(i, thread)) continue;
        if constexpr (!kShifted)
          copy_async<kCopy>(to, from, i * kDown < left_x);
        else if (kPacked || at.k > 0 || thread % 8 > 0)
          copy_bytes(to, from - shift, i * kDown < at.left_x ? bytes : 0);
        else
          UNROLL for (int word = 0; word < 4; ++word)
            copy_async<4>(to + word * 4, from - shift + word, i * kDown < at.left_x && word >= shift && word * 4 < bytes);
      }
      const u32 to_weight = slot + kWeight + part * M * 128 + place_of<kCopyWeight>(thread);
      UNROLL_BY(kTogether) for (int i = 0; i < ceil_div(kColumns, kDownWeight); ++i) {
        const int row = i * kDownWeight, column = column_of(row);
        const i64 behind = i64(weight_row(kEven ? column : Q - at.left_weight + column)) * kWeightRow + part * kWeightPart;
        if (kColumns % kDownWeight == 0 || is_whole<kColumns>(i, thread))
          copy_async<kCopyWeight>((to_weight ^ (row & 7) << 4) + row * 128, weight + behind, column < left_weight);
      }
    }
  }
  // Where a thread's first piece of a slab lies
  template <int BYTES> static DEVICE u32 place_of(int thread) {
    const int byte = thread % (128 / BYTES) * BYTES;
    return swizzled(thread / (128 / BYTES), byte / 16) + byte % 16;
  }
  // What a thread has copied of x, to the nearest tf32.
  DEVICE void round(u32 from, int thread) const {
    constexpr int kCount = ceil_div(kRows, 16), kTogether = 4;
    UNROLL for (int i = 0; i < kCount; i += kTogether) {
      u32 x[kTogether][4];
      UNROLL for (int j = 0; j < kTogether && i + j < kCount; ++j)
        if (is_whole<kRows>(i + j, thread)) load_u32x4(from + (i + j) * 2048, x[j]);
      UNROLL for (int j = 0; j < kTogether && i + j < kCount; ++j) {
        if (!is_whole<kRows>(i + j, thread)) break;
        UNROLL for (u32& word : x[j]) word = nearest(word);
        store_u32x4(from + (i + j) * 2048, x[j]);
      }
    }
  }
  // The same as halves, high ones where the row's first part was, low ones where the second was. Threads side by side have a
  // row, as few as leave none without one and as their registers hold, since they wait for each other's largest; its pieces have
  // been copied by their warp.
  DEVICE void split_rows(u32 from, u32 scales, int thread) const {
    constexpr int kSide = kRows % 64 == 0 && Pass::CONSUMERS < 3 ? 2 : kRows % 32 == 0 ? 4 : 8, kMine = 8 / kSide;  // pieces of each part
    constexpr int kCount = ceil_div(kRows, 128 / kSide);
    const int first = thread / 32 * 4 + thread / kSide % 4 + thread % 32 / (4 * kSide) * 16, piece = thread % kSide * kMine;
    __syncwarp();
    UNROLL for (int i = 0; i < kCount; ++i) {
      const int row = first + i * (128 / kSide);
      const bool is_row = kRows % (128 / kSide) == 0 || row < kRows;
      const auto place = [&](int j, int part) { return from + part * N * 128 + swizzled(row, piece + j); };
      u32 x[kMine][2][4] = {};
      float most[1] = {};
      UNROLL for (int j = 0; j < kMine; ++j) {
        if (is_row)
          UNROLL for (int part = 0; part < 2; ++part) load_u32x4(place(j, part), x[j][part]);
        most[0] = fmaxf(most[0], larger_of(larger_of(0.f, x[j][0]), x[j][1]));
      }
      most_of<kSide>(most);
      const Scale scale(most[0]);
      if (!is_row) continue;
      UNROLL for (int j = 0; j < kMine; ++j) {
        u32 high[4], low[4];
        scale.split(x[j][0], x[j][1], high, low);
        store_u32x4(place(j, 0), high);
        store_u32x4(place(j, 1), low);
      }
      if (thread % kSide == 0) store_shared(scales + row * 4, __float_as_uint(scale.back));
    }
  }

  // The small mode's weight, for those who mix
  static DEVICE u32 mixing(const Params& params) {
    if constexpr (kMixes)
      return mixing_weights<Element>(Lane(), [&](int q, int p) {
        return widen(static_cast<const Element*>(params.weights[Pass::MIXED])[q * 8 + p]);
      });
    return 0;
  }
  // Eight rows of a slab of x at a time, those of a mode, mixed where all producers have copied theirs.
  static DEVICE void mix_rows(u32 x, u32 weights, int thread) {
    static_assert(!kTurned && Pass::OUTER % 8 == 0);
    ROLL for (int row = thread / 32 * 8; row < kRows; row += 32) {
      u32 columns[2][4], mixtures[2][4];
      const auto place = [&](int half) { return x + swizzled(row + thread % 8, half * 4 + thread % 32 / 8); };
      UNROLL for (int half = 0; half < 2; ++half) load_matrices<true>(columns[half], place(half));
      UNROLL for (int half = 0; half < 2; ++half) {
        mix_columns<Element>(mixtures[half], columns[half], weights, 1.f);
        store_matrices_transposed(place(half), mixtures[half]);
      }
    }
  }

  // Which of the warpgroups that bring slabs in turns this thread's is
  DEVICE int producer() const { return warpgroup - Pass::CONSUMERS; }
  // A slab is given to the consumers once its copies are there: AHEAD slabs later, if x is to be rounded or mixed.
  DEVICE void produce(int thread) const {
    Cursor at;
    at.n = first_tile();
    begin_tile(at, thread);
    const int first = PRODUCERS > 1 ? producer() : 0;
    ROLL for (int i = 0; i < first; ++i) advance(at, thread);
    int oldest = first, waiting = 0;
    RingCursor<Pass::SLOTS> cursor{first, 1};
    const u32 place = memory + swizzled(thread / 8, thread % 8);
    [[maybe_unused]] const u32 weights = mixing(params);
    const auto finish_oldest = [&] {
      if constexpr (kMixes || kCopy < 16) sync_warpgroup(warpgroup);  // others have copied it, too
      if constexpr (kMixes)
        mix_rows(memory + kX + oldest * kSlotBytes, weights, thread);
      else if constexpr (Pass::SPLIT)
        split_rows(memory + kX + oldest * kSlotBytes, memory + kScales + oldest * kScaleBytes, thread);
      else
        round(place + kX + oldest * kSlotBytes, thread);
      slots.hand_over(oldest);
      oldest += oldest + PRODUCERS < Pass::SLOTS ? PRODUCERS : PRODUCERS - Pass::SLOTS;
    };
    const auto next = [&] { UNROLL for (int i = 0; i < PRODUCERS; ++i) advance(at, thread); };
    for (; is_in(at); next()) {
      slots.wait_until_empty(cursor);
      copy_slab(at, thread, memory + cursor.slot * kSlotBytes);
      if constexpr (kPrepares) {
        commit_copies();
        if (waiting < Pass::AHEAD)
          ++waiting;
        else
          wait_for_copies<Pass::AHEAD>(), finish_oldest();
      } else {
        arrive_with_copies(slots.full(cursor.slot));
      }
      cursor.skip(PRODUCERS);
    }
    if constexpr (kPrepares) {
      wait_for_copies<0>();
      for (; waiting > 0; --waiting) finish_oldest();
    }
  }

  // Feature of a result, without OUTER.
  static DEVICE i64 feature(const Tile& tile, int j, int fast) {
    if constexpr (FAST == 1) return i64(tile.slow) * Q + j;
    return i64(tile.slow) * FAST * Q + (i64(j / B) * FAST + fast) * B + j % B;
  }
  // A bias of which all rows have the same (kAlike): of 16 bits each lane has some pairs of columns, for all of its warp, and asks
  // for them before a group's products are made, which hide that; of 32 bits a thread has two columns, and no register for them by then.
  static constexpr bool kAlike = Pass::OUTER == 1;
  static constexpr int kBiases = kPacked ? ceil_div(N, 64) : 1;
  using Biases = u32[kBiases][2][1];
  template <bool NOW> DEVICE void load_biases([[maybe_unused]] Biases& bias, const Tile& tile, int group) const {
    if constexpr (NOW && Pass::BIAS && kAlike) {
      constexpr int kInner = Pass::BIAS_INNER;
      const int fast = tile.fast + group;
      UNROLL for (int i = 0; i < kBiases; ++i)
        UNROLL for (int k = 0; k < 2; ++k) {
          const int j = tile.q + (kPacked ? (i * 32 + threadIdx.x % 32) * 2 + k : column_of(row() + k * 8));
          const int at = kInner > 1 ? (fast / kInner * Q + j) * kInner + fast % kInner : int(feature(tile, j, fast));
          load_global<kSize>(static_cast<const Element*>(params.bias) + at, bias[i][k], j < Q && fast < FAST);
        }
    }
  }
  DEVICE void add_biases(float (&sum)[N / 2], const Biases& bias) const {
    if constexpr (kPacked) {
      u32 pairs[kBiases];
      UNROLL for (int i = 0; i < kBiases; ++i) pairs[i] = bias[i][0][0] | bias[i][1][0] << 16;
      UNROLL for (int n = 0; n < N / 8; ++n) {
        const u32 two = __shfl_sync(0xffffffff, pairs[n / 8], column_of(across(n * 4)) / 2 % 32);
        UNROLL for (int i = 0; i < 4; ++i) sum[n * 4 + i] += number_of<Element>(&two, i % 2);
      }
    } else {
      UNROLL for (int i = 0; i < N / 2; ++i) sum[i] += __uint_as_float(bias[0][i % 4 / 2][0]);
    }
  }
  // Each row has another one: what a thread has of it lies side by side, as results do.
  DEVICE void add_biases(float (&sum)[N / 2], const Tile& tile) const {
    static_assert(HELD == 1 && Pass::BIAS_INNER == 1);
    constexpr int kMost = Pass::STAGED ? Pass::EDGE : Pass::STORE, kMine = RUN * kSize;
    constexpr int kBytes = kMost < kMine ? kMost : kMine, kCell = kBytes / kSize;  // of one access
    const u32 first = u32(tile.first % Pass::OUTER);
    UNROLL for (int m = 0; m < kRuns; ++m) {
      UNROLL for (int half = 0; half < 2; ++half) {
        const Element* bias = static_cast<const Element*>(params.bias) + (first + row_in_tile(m, half) * EVERY) % Pass::OUTER * Q;
        UNROLL for (int e = 0; e < RUN; e += kCell) {
          const int c = first_column(tile, m) + e;
          u32 words[ceil_div(kBytes, 4)];
          load_global<kBytes>(bias + feature(tile, c, tile.fast), words, Q % kColumns == 0 || c < Q);
          UNROLL for (int i = 0; i < kCell; ++i) {
            const int at = kPacked ? (m * RUN + e + i) / 2 * 4 + half * 2 + (e + i) % 2 : m * 4 + (e + i) * 2 + half;
            sum[at] += number_of<Element>(words, i);
          }
        }
      }
    }
  }

  // This thread's first row of the sums; the other is 8 below. Row and column of its i-th sum.
  static DEVICE int row() { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4; }
  static DEVICE int down(int i) { return row() + i % 4 / 2 * 8; }
  static DEVICE int across(int i) { return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2; }

  // The rows of y that a thread has in run m, and the first column.
  static DEVICE int row_in_tile(int m, int half) { return kTurned ? m * 8 + threadIdx.x % 4 * 2 + half : row() + half * 8; }
  DEVICE i64 row_of(const Tile& tile, int m, int half) const { return row_at(tile, row_in_tile(m, half)); }
  DEVICE int first_column(const Tile& tile, int m) const {
    return tile.q + (kTurned ? column_of(row()) : (m * 4 + int(threadIdx.x % 4)) * RUN);
  }

  using Held = u32[HELD][kPacked ? N / 4 : N / 2];
  // What is read beside sum i
  static DEVICE float beside(const u32 (&held)[kPacked ? N / 4 : N / 2], int i) {
    if constexpr (kPacked)
      return widen(Element{u16(i % 2 ? held[i / 2] >> 16 : held[i / 2])});
    else
      return __uint_as_float(held[i]);
  }
  // Sums with bias and activation, rounded: two columns in a word, or one.
  DEVICE void finish(float (&sum)[N / 2], u32 (&held)[kPacked ? N / 4 : N / 2], const Tile& tile, int group, Biases& bias) const {
    const typename Pass::Activation activation(params);
    if constexpr (Pass::SCALED >= 0) scale_sums(sum, static_cast<const float*>(params.sums)[Pass::SCALED + 1]);
    load_biases<!kPacked>(bias, tile, group);
    if constexpr (Pass::BIAS && kAlike)
      add_biases(sum, bias);
    else if constexpr (Pass::BIAS)
      add_biases(sum, tile);
    UNROLL for (int i = 0; i < N / 2; ++i) {
      if constexpr (Pass::BESIDE >= 0)
        sum[i] = activation.of(sum[i], beside(held, i));
      else
        sum[i] = activation.of(sum[i]);
    }
    UNROLL for (int i = 0; i < N / 2; i += 2) {
      if constexpr (kPacked) {
        held[i / 2] = Pair<Element>(sum[i], sum[i + 1]).bits;
      } else {
        held[i] = Pass::ROUND_Y ? tf32_of(__float_as_uint(sum[i])) : __float_as_uint(sum[i]);
        held[i + 1] = Pass::ROUND_Y ? tf32_of(__float_as_uint(sum[i + 1])) : __float_as_uint(sum[i + 1]);
      }
    }
    if constexpr (HELD > 1 && (Pass::BIAS || !is_same<typename Pass::Activation, identity>))
      if (group + 1 < HELD) make_here(held, params.batch < 0, params.y);  // those of the last one may wait for its stores
  }

  // Element e, in memory's order, of the RUN columns and HELD groups that a thread has in run m of a row.
  static constexpr int kTogether = B < RUN ? B : RUN;  // columns of a group that lie together
  static constexpr DEVICE int group_of(int e) { return e / kTogether % HELD; }
  static constexpr DEVICE int column_in_run(int e) { return e / (kTogether * HELD) * kTogether + e % kTogether; }
  static DEVICE u32 element(const Held& held, int m, int half, int e) {
    const int c = m * RUN + column_in_run(e), at = c / 2 * 2 + half;
    if constexpr (kPacked) {
      const u32 pair = held[group_of(e)][at];
      return c % 2 ? pair >> 16 : pair & 0xffff;
    } else {
      return held[group_of(e)][c / 2 * 4 + c % 2 * 2 + half];
    }
  }
  static constexpr int kCell = Pass::STORE / kSize, kWords = Pass::STORE / 4;  // of one access
  static DEVICE void cell(u32 (&words)[kWords], const Held& held, int m, int half, int e) {
    UNROLL for (int i = 0; i < kWords; ++i)
      words[i] = kPacked ? element(held, m, half, e + i * 2) | element(held, m, half, e + i * 2 + 1) << 16
                         : element(held, m, half, e + i);
  }
  static constexpr int kRuns = N / (kTurned ? 8 : 4 * RUN);
  // A cell, or two where a thread has 32 bytes side by side, a sector of L2. Those it shares with its neighbour, so that
  // each access of a warp moves whole sectors: first those of the even thread, then those of the odd one.
  static DEVICE int odd() { return Pass::PAIRED ? (kTurned ? threadIdx.x / 4 : threadIdx.x) & 1 : 0; }
  static DEVICE void share_cells(u32 (&words)[kWords], u32 (&further)[kWords]) {
    UNROLL for (int i = 0; i < kWords; ++i) {
      const u32 given = __shfl_xor_sync(0xffffffff, odd() ? words[i] : further[i], kTurned ? 4 : 1);
      words[i] = odd() ? given : words[i];
      further[i] = odd() ? further[i] : given;
    }
  }
  // move(further or words, elements behind the first of their row, whether they are there) as they are shared
  template <class Move>
  DEVICE void move_cells(u32 (&words)[kWords], u32 (&further)[kWords], const Tile& tile, int m, int e, bool here,
                         const Move& move) const {
    const int j = first_column(tile, m) - odd() * RUN;
    const int c = j + column_in_run(e), fast = tile.fast + group_of(e);
    if constexpr (Pass::PAIRED)
      move(further, feature(tile, c + RUN, fast) + odd() * kCell, here && (Q % kColumns == 0 || c + RUN < Q));
    move(words, feature(tile, c, fast) + odd() * kCell,
         here && (Q % kColumns == 0 || c < Q) && (FAST % (HELD * kBlocks) == 0 || fast < FAST));
  }
  DEVICE void store_cells(u32 (&words)[kWords], u32 (&further)[kWords], Element* to, const Tile& tile, int m, int e,
                          bool here) const {
    if constexpr (Pass::PAIRED) share_cells(words, further);
    move_cells(words, further, tile, m, e, here, [&](const u32 (&from)[kWords], i64 at, bool there) {
      if (there) store_global<Pass::STORE>(to + at, from);
    });
  }
  // What cell() makes of a state, back to where that was.
  static DEVICE void put_cell(Held& held, int m, int half, int e, const u32 (&words)[kWords]) {
    UNROLL for (int i = 0; i < kWords; ++i) {
      if constexpr (kPacked) {
        held[0][(m * RUN + e) / 2 * 2 + i * 2 + half] = words[i];
      } else {
        const int c = m * RUN + column_in_run(e + i);
        held[group_of(e + i)][c / 2 * 4 + c % 2 * 2 + half] = words[i];
      }
    }
  }
  // Neighbours share what they have loaded, when it is there.
  static DEVICE void share_beside(Held& held) {
    UNROLL for (int m = 0; m < kRuns; ++m)
      UNROLL for (int half = 0; half < 2; ++half)
        UNROLL for (int e = 0; e < RUN * HELD; e += 2 * kCell) {
          u32 words[kWords], further[kWords];
          cell(words, held, m, half, e), cell(further, held, m, half, e + kCell);
          share_cells(words, further);
          put_cell(held, m, half, e, words), put_cell(held, m, half, e + kCell, further);
        }
  }
  // A state where results will be
  DEVICE void load_beside(Held& held, const Tile& tile) const {
    static_assert((HELD == 1 || !kPacked) && !Pass::CLUSTER && Pass::TERM_BLOCKS == 1);
    const Element* state = static_cast<const Element*>(params.weights[Pass::BESIDE]);
    UNROLL for (int m = 0; m < kRuns; ++m) {
      UNROLL for (int half = 0; half < 2; ++half) {
        const i64 r = row_of(tile, m, half);
        const Element* from = state + place(r, Pass::Y_SAMPLE, Q);
        UNROLL for (int e = 0; e < RUN * HELD; e += Pass::PAIRED ? 2 * kCell : kCell) {
          u32 words[kWords], further[kWords];
          move_cells(words, further, tile, m, e, r < rows(), [&](u32 (&to)[kWords], i64 at, bool there) {
            load_global<Pass::STORE>(from + at, to, there);
          });
          put_cell(held, m, half, e, words);
          if constexpr (Pass::PAIRED) put_cell(held, m, half, e + kCell, further);
        }
      }
    }
  }
  DEVICE void store(const Held& held, const Tile& tile) const {
    Element* y = static_cast<Element*>(params.y) + tile.term * y_term();
    UNROLL for (int m = 0; m < kRuns; ++m) {
      UNROLL for (int half = 0; half < 2; ++half) {
        const i64 r = row_of(tile, m, half);
        Element* to = y + place(r, Pass::Y_SAMPLE, Q);
        UNROLL for (int e = 0; e < RUN * HELD; e += Pass::PAIRED ? 2 * kCell : kCell) {
          u32 words[kWords], further[kWords];
          cell(words, held, m, half, e);
          if constexpr (Pass::PAIRED) cell(further, held, m, half, e + kCell);
          store_cells(words, further, to, tile, m, e, r < rows());
        }
      }
    }
  }

  // Rows of results, or of a state beside them, through shared memory, eight of a warp at once: what it moves of them is pieces
  // of 16 bytes, and of those that they have a part of, EDGE bytes at once.
  static constexpr int kPieces = N / 8 + 1, kEdge = Pass::EDGE / 2;
  DEVICE u32 results() const { return memory + kResults + threadIdx.x / 32 * 8 * kResultRow; }
  // Where a row's columns begin in memory
  DEVICE i64 begin_of(const Tile& tile, i64 row) const {
    return place(row, Pass::Y_SAMPLE, Q) + tile.term * y_term() + feature(tile, tile.q, tile.fast);
  }
  // move(where two columns of a thread lie, their place among its words) of all
  template <class Move> DEVICE void move_pairs(const Tile& tile, int half, const Move& move) const {
    const int lane = threadIdx.x % 32;
    const u32 first = results() + lane / 4 * kResultRow + lane % 4 * 4;
    const u32 at = first + int(begin_of(tile, row_of(tile, 0, half)) & 7) * 2;
    UNROLL for (int n = 0; n < N / 8; ++n) move(at + n * 16, n * 2 + half);
  }
  // Of a piece that a lane moves, one of 8 * kPieces: where it lies, and its first column there, which may be in front
  struct Piece {
    u32 at;
    i64 row, begin;
    int column;
  };
  DEVICE Piece piece_of(const Tile& tile, int half, int i) const {
    const i64 row = row_at(tile, threadIdx.x / 32 * 16 + half * 8 + i / kPieces), begin = begin_of(tile, row);
    return {results() + i / kPieces * kResultRow + i % kPieces * 16, row, begin, i % kPieces * 8 - int(begin & 7)};
  }
  DEVICE void store_rows(const Held& held, const Tile& tile) const {
    Element* y = static_cast<Element*>(params.y);
    const int width = min(N, Q - tile.q);
    UNROLL for (int half = 0; half < 2; ++half) {
      __syncwarp();
      move_pairs(tile, half, [&](u32 at, int i) {
        if constexpr (Pass::EDGE >= 4)
          store_shared(at, held[0][i]);
        else
          store_shared(at, u16(held[0][i])), store_shared(at + 2, u16(held[0][i] >> 16));
      });
      __syncwarp();
      ROLL for (int i = threadIdx.x % 32; i < 8 * kPieces; i += 32) {
        const auto [at, row, begin, column] = piece_of(tile, half, i);
        if (row >= rows() || column >= width) continue;
        if (column >= 0 && column + 8 <= width) {
          store_words<16>(y + begin + column, load_words<16>(at));
        } else {
          UNROLL for (int e = 0; e < 8; e += kEdge)
            if (column + e >= 0 && column + e < width)
              store_words<Pass::EDGE>(y + begin + column + e, load_words<Pass::EDGE>(at + e * 2));
        }
      }
    }
  }
  // 16 bytes that begin at a piece, of a state that ends at `end`
  static DEVICE void load_piece(u32 (&word)[4], const Element* state, i64 at, i64 end) {
    if (at + 8 <= end) return load_global<16>(state + at, word, true);
    UNROLL for (int e = 0; e < 8; ++e)
      if (at + e < end) word[e / 2] |= u32(state[at + e].bits) << e % 2 * 16;
  }
  // All pieces, or as many as registers have, are asked for before the first one is waited for. What they have beside the row's is
  // not looked at.
  DEVICE void load_rows(Held& held, const Tile& tile) const {
    constexpr int kEach = ceil_div(8 * kPieces, 32);  // pieces of a lane
    constexpr bool kAll = kEach <= 6;
    constexpr int kAtOnce = kAll ? kEach : 4;
    const Element* state = static_cast<const Element*>(params.weights[Pass::BESIDE]);
    const i64 end = tile.term * y_term() + params.batch * Pass::Y_SAMPLE;
    const int lane = threadIdx.x % 32, width = min(N, Q - tile.q);
    u32 piece[kAll ? 2 : 1][kAtOnce][4];
    const auto ask = [&](int half, int first) {
      UNROLL for (int j = 0; j < kAtOnce && first + j < kEach; ++j) {
        const int i = (first + j) * 32 + lane;
        const auto [at, row, begin, column] = piece_of(tile, half, i);
        auto& word = piece[kAll ? half : 0][j];
        word[0] = word[1] = word[2] = word[3] = 0;
        if (i < 8 * kPieces && row < rows() && column < width) load_piece(word, state, begin + column, end);
      }
    };
    if constexpr (kAll) ask(0, 0), ask(1, 0);
    UNROLL for (int half = 0; half < 2; ++half) {
      __syncwarp();
      UNROLL for (int first = 0; first < kEach; first += kAtOnce) {
        if constexpr (!kAll) ask(half, first);
        UNROLL for (int j = 0; j < kAtOnce && first + j < kEach; ++j) {
          const int i = (first + j) * 32 + lane;
          if (i < 8 * kPieces) store_u32x4(piece_of(tile, half, i).at, piece[kAll ? half : 0][j]);
        }
      }
      __syncwarp();
      move_pairs(tile, half, [&](u32 at, int i) {
        if constexpr (Pass::EDGE >= 4)
          held[0][i] = load_u32(at);
        else
          held[0][i] = load_u16(at) | u32(load_u16(at + 2)) << 16;
      });
    }
  }

  // Two blocks that have half of a sector each: the first one stores the first of a thread's rows, the second one the
  // second, and each gives the other what it has of them. `phase` counts their tiles.
  static constexpr int kCells = kRuns * RUN * HELD / kCell;  // of a row
  DEVICE void exchange(const Held& held, const Tile& tile, int phase) const {
    const u32 warp = threadIdx.x / 32, got = memory + kGot + warp * 8, free = memory + kFree + warp * 8;
    const int rank = this->rank();
    const u32 mine = memory + kExchange + threadIdx.x * 16, theirs = in_other_block(mine);
    wait_for_cluster(free, phase ^ 1);
    UNROLL for (int i = 0; i < kCells; ++i) {
      constexpr int kEach = RUN * HELD / kCell;
      u32 first[kWords], second[kWords];
      cell(first, held, i / kEach, 0, i % kEach * kCell);
      cell(second, held, i / kEach, 1, i % kEach * kCell);
      UNROLL for (int word = 0; word < kWords; ++word) second[word] = rank ? first[word] : second[word];
      store_in_other_block(theirs + i * kConsumers * 16, second);
    }
    arrive_in_other_block(in_other_block(got));
    wait_for_cluster(got, phase);
    Tile both = tile;
    both.fast -= rank * HELD;
    Element* y = static_cast<Element*>(params.y) + tile.term * y_term();
    UNROLL for (int m = 0; m < kRuns; ++m) {
      const i64 r = row_of(tile, m, rank);
      Element* to = y + place(r, Pass::Y_SAMPLE, Q);
      UNROLL for (int e = 0; e < RUN * HELD; e += kCell) {
        u32 words[kWords], further[kWords], given[kWords];
        cell(words, held, m, 0, e);
        cell(further, held, m, 1, e);
        load_u32x4(mine + (m * (RUN * HELD / kCell) + e / kCell) * kConsumers * 16, given);
        UNROLL for (int word = 0; word < kWords; ++word) {
          const u32 own = rank ? further[word] : words[word];
          words[word] = rank ? given[word] : own;
          further[word] = rank ? own : given[word];
        }
        store_cells(words, further, to, both, m, e, r < rows());
      }
    }
    arrive_in_other_block(in_other_block(free));
  }

  // A slab: 32 bytes of k at once.
  static constexpr int kSteps = ceil_div((kRow < kPart ? kRow : kPart) * kSize, 32);
  using Left = u32[kSteps][4];
  // This warp's part of operand A.
  DEVICE void load_left(u32 (&a)[4], u32 slab, int step) const {
    const int r = threadIdx.x / 32 * 16 + threadIdx.x % 16;
    load_matrices<false>(a, slab + swizzled(r, step * 2 + threadIdx.x % 32 / 16));
  }
  DEVICE void multiply(float (&sum)[N / 2], Left& a, u32 slab, bool add) const {
    if constexpr (kTurned) {
      UNROLL for (int step = 0; step < kSteps; ++step) {
        load_left(a[step], slab, step);
        UNROLL for (u32& word : a[step]) word = nearest(word);
        settle(a[step]);
      }
    }
    const u64 left = operand(slab + warpgroup * 8192), right = operand(slab + M * 128);
    open_products();
    UNROLL for (int step = 0; step < kSteps; ++step) {
      if constexpr (kTurned)
        Wgmma<Element, N>::multiply(sum, a[step], right + 2 * step, add || step > 0);
      else
        Wgmma<Element, N>::multiply(sum, left + 2 * step, right + 2 * step, add || step > 0);
    }
    commit_products();
  }

  // Where a consumer is in the ring, and the slab that it has taken last.
  struct Taking {
    RingCursor<Pass::SLOTS> cursor{0, 0};
    int last = 0;
  };
  DEVICE u32 next_slab(Taking& at) const {
    slots.wait_until_full(at.cursor);
    if constexpr (!kPrepares) fence_copy_engine();  // or those who have prepared it have had one
    at.last = at.cursor.slot;
    at.cursor.next();
    return slots.at(at.last);
  }
  // One thread says that its warp has read a slab: if all did, it would cost a tenth of a tf32 pass.
  DEVICE void release(int slot) const {
    if constexpr (kTurned || kShifted) __syncwarp();
    slots.release(slot);
  }

  // Of rows that begin somewhere in a piece: what is before them is zeros in the first step's operand.
  template <int STEPS, bool FIRST>
  DEVICE void multiply_part(float (&sum)[N / 2], u32 (&a)[4], u32 slab, bool add, int shift) const {
    if constexpr (FIRST) {
      load_left(a, slab, 0);
      const int column = threadIdx.x % 4 * 2;
      UNROLL for (int i = 0; i < 2; ++i) a[i] = column >= shift ? a[i] : column + 1 >= shift ? a[i] & 0xffff0000 : 0;
      settle(a);
    }
    const u64 left = operand(slab + warpgroup * 8192), right = operand(slab + M * 128);
    open_products();
    UNROLL for (int step = 0; step < STEPS; ++step) {
      if (FIRST && step == 0)
        Wgmma<Element, N>::multiply(sum, a, right, add);
      else
        Wgmma<Element, N>::multiply(sum, left + 2 * step, right + 2 * step, add || step > 0);
    }
    commit_products();
  }
  DEVICE void add_up_shifted(float (&sum)[N / 2], const Tile& tile, int group, Taking& at) const {
    constexpr int kLast = ceil_div(kRow - (kChunks - 1) * kPart, 16), kFirst = kChunks > 1 ? 4 : kLast;  // steps
    u32 a[2][4];
    bool add = false;
    const auto take = [&](const auto& multiply) {
      const int last = at.last;
      multiply(next_slab(at));
      if (add) {
        wait_for_products<1>();
        release(last);
      }
      add = true;
    };
    const auto take_row = [&](u32 (&a)[4]) {
      const int shift = shift_of(tile, group);
      take([&](u32 slab) { multiply_part<kFirst, true>(sum, a, slab, add, shift); });
      ROLL for (int i = 2; i < kChunks; ++i) take([&](u32 slab) { multiply_part<4, false>(sum, a, slab, add, shift); });
      if constexpr (kChunks > 1) take([&](u32 slab) { multiply_part<kLast, false>(sum, a, slab, add, shift); });
    };
    ROLL for (int term = 0; term < Pass::TERMS / 2 * 2; term += 2) take_row(a[0]), take_row(a[1]);
    if constexpr (Pass::TERMS % 2) take_row(a[0]);
    wait_for_products<0>();
    touch(sum);
    release(at.last);
  }

  // The sums of a group.
  DEVICE void add_up(float (&sum)[N / 2], Taking& at) const {
    Left a[2];  // in turns: the products of the slab before still read theirs
    const auto take = [&](int slab, Left& a) {
      const int last = at.last;
      const u32 from = next_slab(at);
      multiply(sum, a, from, slab > 0);
      if (slab > 0) {
        wait_for_products<1>();
        release(last);
      }
    };
    ROLL for (int slab = 0; slab < kSlabs / 2 * 2; slab += 2) take(slab, a[0]), take(slab + 1, a[1]);
    if constexpr (kSlabs % 2) take(kSlabs - 1, a[0]);
    wait_for_products<0>();
    touch(sum);
    release(at.last);
  }

  // Parts of the columns, of which one's sums are scaled while the other's products are made
  static constexpr int kSplitParts = N >= 64 ? 2 : 1, kSplitN = N / kSplitParts;
  // As exact as FMA: three of the four products of halves count. What the matrix unit adds to it truncates, so those of high
  // halves come last, and each slab starts from zero. Rows of x are scaled for a slab, those of the weight for all. Other
  // warpgroups' products fill the waits.
  DEVICE void add_up_split(float (&sum)[N / 2], const Tile& tile, int fast, Taking& at) const {
    float some[kSplitParts][kSplitN / 2];
    const i64 block = Pass::GROUPS > 1 ? weight_of(tile, fast) : tile.term;
    float scale[2];
    UNROLL for (int half = 0; half < 2; ++half) {
      const int j = tile.q + column_of(row() + half * 8);
      const float* scales = static_cast<const float*>(params.sums) + Pass::SCALES + block * Q;
      u32 word[1];
      load_made<4>(scales + weight_row(j), word, j < Q && fast < FAST);
      scale[half] = __uint_as_float(word[0]);
    }
    UNROLL for (int i = 0; i < N / 2; ++i) sum[i] = some[i / (kSplitN / 2)][i % (kSplitN / 2)] = 0;
    ROLL for (int slab = 0; slab < kSlabs; ++slab) {
      const u32 from = next_slab(at), scales = memory + kScales + at.last * kScaleBytes + threadIdx.x % 4 * 8;
      const u64 high = operand(from + kX), low = operand(from + kX + N * 128);
      u32 a[2][kSteps][4];
      UNROLL for (int part = 0; part < 2; ++part)
        UNROLL for (int step = 0; step < kSteps; ++step) {
          load_left(a[part][step], from + part * M * 128, step);
          settle(a[part][step]);
        }
      UNROLL for (int part = 0; part < kSplitParts; ++part) {
        open_products();
        UNROLL for (int step = 0; step < kSteps; ++step) {
          const u64 k = part * kSplitN * 8 + 2 * step;
          Wgmma<f16, kSplitN>::multiply(some[part], a[1][step], high + k, step > 0);
          Wgmma<f16, kSplitN>::multiply(some[part], a[0][step], low + k);
        }
        commit_products();
      }
      UNROLL for (int part = 0; part < kSplitParts; ++part) {
        wait_for_products<kSplitParts - 1>();
        touch(some[part]);
        UNROLL for (float& x : some[part]) x *= 1 / 2048.f;
        touch(some[part]);
        open_products();
        UNROLL for (int step = 0; step < kSteps; ++step)
          Wgmma<f16, kSplitN>::multiply(some[part], a[0][step], high + part * kSplitN * 8 + 2 * step);
        commit_products();
      }
      UNROLL for (int part = 0; part < kSplitParts; ++part) {
        part + 1 < kSplitParts ? wait_for_products<1>() : wait_for_products<0>();
        touch(some[part]);
        UNROLL for (int n = 0; n < kSplitN / 8; ++n) {
          u32 scale[2];
          load_u32x2(scales + (part * kSplitN + n * 8) * 4, scale);
          UNROLL for (int i = 0; i < 4; ++i)
            sum[part * (kSplitN / 2) + n * 4 + i] += some[part][n * 4 + i] * __uint_as_float(scale[i % 2]);
        }
      }
      touch(sum);
      release(at.last);
    }
    UNROLL for (int i = 0; i < N / 2; ++i) sum[i] *= scale[i % 4 / 2];
  }
  // Infinities and NaNs are not what they should be once an operand is split: such sums are made again, from memory.
  DEVICE void repair(float (&sum)[N / 2], const Tile& tile, int fast) const {
    static_assert(N <= 128);
    float none[2] = {};  // or NaN, if any is
    UNROLL for (int i = 0; i < N / 2; ++i) none[i % 2] += sum[i] * 0.f;
    if (none[0] + none[1] == 0) return;
    u64 broken = 0;
    UNROLL for (int i = 0; i < N / 2; ++i) broken |= u64(!is_finite(sum[i])) << i;
    ROLL for (int j = 0; j < N / 2; ++j) {
      if (!(broken >> j & 1)) continue;
      const float x = repaired(tile, tile.first + across(j), tile.q + column_of(down(j)), fast);
      UNROLL for (int i = 0; i < N / 2; ++i)
        if (i == j) sum[i] = x;
    }
  }
  DEVICE float repaired(const Tile& tile, i64 row, int j, int fast) const {
    if (row >= rows() || j >= Q || fast >= FAST) return 0;
    const int group = Pass::GROUPS > 1 ? weight_of(tile, fast) : 0;
    float sum = 0;
    for (int term = 0; term < Pass::TERMS; ++term) {
      const float* x = static_cast<const float*>(params.x) + row * kXRow + (tile.term + term) * x_term();
      const float* weight = static_cast<const float*>(params.weights[Pass::WEIGHT]);
      weight += (i64(Pass::GROUPS > 1 ? group : tile.term + term) * Q + weight_row(j)) * P;
      ROLL for (int p = 0; p < P; ++p) sum += weight[p] * x[i64(group) * P + p];
    }
    return sum;
  }

  // Sums of groups that take turns, HELD of them and then what they have side by side
  DEVICE void make_runs(const Runs<Pass>& runs, const Tile& tile, Taking& at) const {
    const int groups = groups_of(tile), columns = min(kWidth, Q - tile.q), first_row = threadIdx.x / 32 * 16;
    const int left = int(min((rows() - tile.first + EVERY - 1) / EVERY, i64(kRows))) - first_row;
    ROLL for (int first = 0; first < groups; first += HELD) {
      const int held = min(HELD, groups - first);
      ROLL for (int h = 0; h < held; ++h) {
        float sum[N / 2];
        u32 made[N / 4];
        Biases bias;
        load_biases<kPacked>(bias, tile, first + h);
        if constexpr (kShifted)
          add_up_shifted(sum, tile, weight_of(tile, tile.fast + first + h), at);
        else
          add_up(sum, at);
        finish(sum, made, tile, first + h, bias);
        runs.put(made, begin_of(tile, row_of(tile, 0, 0)) + first * B, h);
      }
      const i64 begin = begin_of(tile, row_at(tile, first_row)) + first * B;
      const bool last = !Runs<Pass>::kKeeps || first + HELD >= groups;
      __syncwarp();
      runs.store(static_cast<Element*>(params.y), begin, min(16, left), columns, held, !Runs<Pass>::kKeeps || first == 0, last);
      __syncwarp();
      if constexpr (Runs<Pass>::kKeeps)
        if (!last) runs.keep(begin, min(16, left), columns), __syncwarp();
    }
  }

  DEVICE void consume_by_turns() const {
    Taking at;
    const Runs<Pass> runs(memory + kResults + threadIdx.x / 32 * 16 * Runs<Pass>::kRow);
    for (i64 n = first_tile(); n < tiles; n += blocks()) make_runs(runs, tile_of(n), at);
  }

  DEVICE void consume() const {
    Taking at;
    for (i64 n = first_tile(); n < tiles; n += blocks()) {
      const Tile tile = tile_of(n);
      Held held;
      if constexpr (Pass::BESIDE >= 0 && Pass::STAGED)
        load_rows(held, tile);
      else if constexpr (Pass::BESIDE >= 0)
        load_beside(held, tile);
      UNROLL for (int h = 0; h < HELD; ++h) {
        float sum[N / 2];
        Biases bias;
        load_biases<kPacked>(bias, tile, h);
        if constexpr (Pass::SPLIT) {
          add_up_split(sum, tile, tile.fast + h, at);
          repair(sum, tile, tile.fast + h);
        } else if constexpr (kShifted && kPacked) {
          add_up_shifted(sum, tile, Pass::GROUPS > 1 ? weight_of(tile, tile.fast + h) : 0, at);
        } else {
          add_up(sum, at);
        }
        if constexpr (Pass::BESIDE >= 0 && Pass::PAIRED)
          if (h == 0) share_beside(held);
        finish(sum, held[h], tile, h, bias);
      }
      if constexpr (Pass::CLUSTER)
        exchange(held, tile, int((n - first_tile()) / blocks() & 1));
      else if constexpr (Pass::STAGED)
        store_rows(held, tile);
      else
        store(held, tile);
    }
  }

  DEVICE void run() const {
    slots.init(128, Pass::CONSUMERS * 4);
    if constexpr (Pass::CLUSTER) {
      if (threadIdx.x < kConsumers / 32)
        init_barrier(memory + kGot + threadIdx.x * 8, 32), init_barrier(memory + kFree + threadIdx.x * 8, 32);
      sync_cluster();
    }
    __syncthreads();
    if (threadIdx.x < kConsumers) {
      take_registers<Pass::MORE>();
      if constexpr (Pass::TURNS > 0)
        consume_by_turns();
      else
        consume();
    } else {
      give_registers<Pass::FEWER>(), produce((threadIdx.x - kConsumers) % 128);
    }
    if constexpr (Pass::CLUSTER) sync_cluster();  // the other block may still give or take
  }
};
