// A pass of one contraction whose weights pass through shared memory in pieces: a matrix product for each group.
//
//     by rows:     Y[m, j] = sum_k X[m, k] W[j, k]      m: samples (of tied weights: samples and outer), j: q in some order
//     by columns:  Y[q, c] = sum_k W[q, k] X[k, c]      c: (sample, outer, inner) as one; tied weights with inner > 1
//
// The left matrix is operand A. Chunks of BK k's go through a ring of SLOTS copies. A block has WM x WN warps for one
// group, WG groups at once, STEPS times; a warp has MT x NT tiles of 16 x 8 sums. Untied weights have a group for each
// (outer, inner), in the order in which results lie in memory, which is ours between two passes:
//     y[sample][group / FAST][a][group % FAST][b],     column j = a * B + b is row a * STEP_A + b * STEP_B of the weight
// so that runs of a block's groups and b's are contiguous; sums are put together in shared memory and stored from there.
// What no tile divides is padded with zeros in shared memory. kernels/product/streamed.py writes the constants:
//
// Pass:  Math, Element, Activation, BIAS, BY_ROWS, WEIGHT (which), P, Q, OUTER and INNER (of tied weights), X_STEP (between
//        k's of x), X_SAMPLE and Y_SAMPLE (strides), X_TERM and Y_TERM (a sample's features where each term has a state of its
//        own, one behind the other for all samples, or 0), TERMS (summed), TERM_BLOCKS (of the grid), GROUPS,
//        FAST, NEXT, B, STEP_A, STEP_B, WM, WN, WG, STEPS, MT, NT, BK, SLOTS, SPAN, TJ (columns of a block), TB (b's
//        that stay together), BIAS_INNER (groups that take turns in the bias, though y has one after the other; else 1),
//        COPY_X, COPY_W, STORE (bytes of one access), RESULT (where it lies in shared memory), ROUND_X and ROUND_Y (to what
//        the matrix unit takes: x as it is read, y as it is stored), Source: void, or Several, the tensors that x is
#pragma once
#include "move/packed.cuh"
#include "multiply/mma.cuh"
#include "move/several.cuh"
#include "types/params.cuh"
#include "finish/pointwise.cuh"

template <bool LARGE> struct Index { using type = int; };
template <> struct Index<true> { using type = i64; };

template <class Pass> struct Streamed {
  using Math = typename Pass::Math;
  using Element = typename Pass::Element;
  static constexpr bool kByRows = Pass::BY_ROWS;
  static constexpr bool kSeveral = !is_void<typename Pass::Source>;
  static constexpr bool kMatrices = sizeof(Element) <= 4;  // operands are read by whole 16-byte rows
  static constexpr int kSize = sizeof(Element), kThreads = Pass::WM * Pass::WN * Pass::WG * 32;
  static constexpr int P = Pass::P, Q = Pass::Q, MT = Pass::MT, NT = Pass::NT, WG = Pass::WG, BK = Pass::BK;
  static constexpr int BM = Pass::WM * MT * 16, BN = Pass::WN * NT * 8, TJ = Pass::TJ, TB = Pass::TB, FAST = Pass::FAST;
  static constexpr int kGroups = WG * Pass::STEPS;                     // of a block
  static constexpr int kPieces = BK * kSize / 16;                     // 16-byte pieces of a row with k contiguous
  static constexpr int kColumnStride = kSize == 8 ? BN + 4 : BN % 16 ? BN : BN + 8;  // of k's with columns contiguous
  static constexpr int kLeftBytes = WG * BM * BK * kSize;
  static constexpr int kSlotBytes = kLeftBytes + (kByRows ? WG * BN * BK : BK * kColumnStride) * kSize;
  // The result in shared memory: rows of a tile in cells of one store each, a column of cells after the other.
  static constexpr int kCell = Pass::STORE / kSize, kLine = kByRows ? TJ * kGroups : BN, kCells = kLine / kCell;
  static constexpr bool kPairs = kCell % 2 == 0 && (!kByRows || TB % 2 == 0);
  static constexpr int kColumnTiles = ceil_div(Q, kByRows ? TJ : BM);
  static constexpr int kGroupTiles = ceil_div(FAST, kGroups);
  static constexpr int kTiles = kColumnTiles * kGroupTiles * (Pass::GROUPS / FAST) * Pass::TERM_BLOCKS;

  using Sums = Sum<Element>[MT][NT][4];
  struct Cursor { int step, term, k; };

  const Params& params;
  const Lane lane;
  const int thread, row, column, part;  // this warp's first row and column in a block's tile, and its group
  const u32 memory;
  const typename Pass::Activation activation;
  i64 first, first_row;  // of the tile: sample (row), or column and the row it lies in
  int inner, slow, fast, q, term;

  DEVICE Streamed(const Params& p)
      : params(p), thread(threadIdx.x), row(thread / 32 % Pass::WM * MT * 16),
        column(thread / 32 / Pass::WM % Pass::WN * NT * 8), part(thread / 32 / (Pass::WM * Pass::WN)),
        memory(shared_address(shared_memory)), activation(p) {}

  DEVICE i64 rows() const { return params.batch * Pass::OUTER; }
  DEVICE i64 right_edge() const { return rows() * Pass::INNER; }  // of the columns of all samples
  static DEVICE i64 place(i64 row, i64 sample, i64 each) {
    if constexpr (Pass::OUTER == 1) return row * sample;
    return sample == Pass::OUTER * each ? row * each : row / Pass::OUTER * sample + row % Pass::OUTER * each;
  }
  // From one term's state to the next, where each has one of its own
  DEVICE i64 x_term() const { return Pass::X_TERM > 0 ? params.batch * Pass::X_TERM : 0; }
  DEVICE i64 y_term() const { return Pass::Y_TERM > 0 ? params.batch * Pass::Y_TERM : 0; }
  static DEVICE i64 place_in_x(i64 row) { return place(row, Pass::X_SAMPLE, i64(P) * (kByRows ? 1 : Pass::INNER)); }
  static DEVICE i64 place_in_y(i64 row) { return place(row, Pass::Y_SAMPLE, i64(Q) * (kByRows ? 1 : Pass::INNER)); }
  // The weight of a group, which counts (outer, inner).
  DEVICE int weight_of(int fast) const {
    return (slow * Pass::NEXT + fast % Pass::NEXT) * (FAST / Pass::NEXT) + fast / Pass::NEXT;
  }
  DEVICE bool has(int fast) const { return FAST % kGroups == 0 || fast < FAST; }
  // Row of the weight for column j of the tile, or -1.
  DEVICE int weight_row(int j) const {
    return j < TJ && q + j < Q ? (q + j) % Pass::B * Pass::STEP_B + (q + j) / Pass::B * Pass::STEP_A : -1;
  }
  DEVICE i64 group_in_x(int fast) const {
    if constexpr (Pass::GROUPS == 1) return 0;
    const int group = weight_of(fast);
    return Pass::X_STEP == 1 ? i64(group) * P : i64(group / Pass::X_STEP) * P * Pass::X_STEP + group % Pass::X_STEP;
  }
  DEVICE i64 x_offset(i64 row, int fast, int term) const {
    return place_in_x(row) + term * x_term() + group_in_x(fast);
  }
  // Of several tensors: k of a row and group, by rows, and of a column.
  DEVICE const Element* state_of(i64 row, int fast, int k) const {
    const typename Pass::Source x{params, params.x};
    return x.at(row / Pass::OUTER, int(row % Pass::OUTER) * P + int(group_in_x(fast)) + k * Pass::X_STEP);
  }
  DEVICE const Element* column_of(int c, int k) const {
    const typename Pass::Source x{params, params.x};
    const i64 row = first_row + (inner + c) / Pass::INNER;
    return x.at(row / Pass::OUTER, (int(row % Pass::OUTER) * P + k) * Pass::INNER + (inner + c) % Pass::INNER);
  }
  DEVICE i64 weight_offset(int row, int fast, int term) const {
    const i64 group = Pass::GROUPS > 1 ? weight_of(fast) : term;
    return (group * Q + row) * P;
  }

  // How a block's threads copy ROWS rows of BK k's, TILE rows for each group: thread t takes EACH k's from `k` on of the rows
  // row(i). Where rows and groups lie evenly in memory, a thread's rows lie constants behind its first.
  template <int ROWS, int TILE, int EACH, bool EVEN, i64 ROW_STEP, i64 GROUP_STEP> struct Rows {
    static constexpr int kRow = BK / EACH, kTogether = kThreads / kRow;
    static constexpr int kCount = ceil_div(ROWS, kTogether);
    static constexpr bool kEven = EVEN && (WG == 1 || TILE % kTogether == 0 || kTogether % TILE == 0);
    static_assert(kThreads % kRow == 0 && kCount <= 32, "threads of a block take whole rows");
    static DEVICE int k() { return threadIdx.x % kRow * EACH; }
    static DEVICE int row(int i) { return threadIdx.x / kRow + i * kTogether; }
    static DEVICE bool is_whole(int i) { return (i + 1) * kTogether <= ROWS || row(i) < ROWS; }
    static constexpr i64 behind(int i) { return i * kTogether % TILE * ROW_STEP + i * kTogether / TILE * GROUP_STEP; }
  };
  using Offset = typename Index<(i64(Q) * P * WG > 1 << 30)>::type;
  static constexpr bool kInOrder = Pass::GROUPS == 1 || Pass::NEXT == 1 || Pass::NEXT == FAST;  // groups of x and weights
  // Of k's that lie together, in one tensor, accesses of 2 bytes would be too many: eight of them come as words.
  static constexpr bool kEightsX = Pass::COPY_X == 2 && Pass::X_STEP == 1 && !kSeveral, kEightsW = Pass::COPY_W == 2;
  using Weights = Rows<kByRows ? WG * BN : BM, kByRows ? BN : BM, kEightsW ? 8 : Pass::COPY_W / kSize,
                       kInOrder && (!kByRows || Pass::STEP_B == 1 || Pass::B == 1), P, i64(Q) * P>;
  using States = Rows<WG * BM, BM, !kByRows ? BK / 8 : kEightsX ? 8 : Pass::COPY_X / kSize,
                      kInOrder && Pass::X_STEP == 1 && (Pass::OUTER == 1 || Pass::X_SAMPLE == i64(Pass::OUTER) * P),
                      Pass::OUTER == 1 ? Pass::X_SAMPLE : P, P>;

  // Rows with k contiguous lie side by side; their 16-byte pieces change places, by row, so that the lanes of one access
  // to a column meet in no bank.
  static constexpr DEVICE int key(int row) {
    constexpr int kTogether = kSize / 2;  // pieces that one access takes of a row
    return row / (8 / kPieces) % (kPieces / kTogether) * kTogether;
  }
  static DEVICE u32 piece(int row, int k) { return (row * BK + k) * kSize ^ key(row) << 4; }

  DEVICE bool has_weight(int r) const {
    return kByRows ? weight_row(r % BN) >= 0 && has(fast + r / BN) : q + r < Q;
  }
  DEVICE i64 weight_at(int r, int step) const {
    return kByRows ? weight_offset(weight_row(r % BN), fast + step * WG + r / BN, term) : weight_offset(q + r, 0, term);
  }
  DEVICE bool has_state(int r) const { return first + r % BM < rows() && has(fast + r / BM); }
  DEVICE i64 state_at(int r, int step) const { return x_offset(first + r % BM, fast + step * WG + r / BM, term); }
  DEVICE i64 column_at(int c) const {
    return place_in_x(first_row + (inner + c) / Pass::INNER) + (inner + c) % Pass::INNER + term * x_term();
  }

  // What a thread needs for its copies of the tile's first chunk.
  struct Source {
    const Element *x, *weight;
    u32 has_x, has_weight;  // a bit for each row
    Offset weight_at[Weights::kEven ? 1 : Weights::kCount];
  };
  static constexpr int kColumnRow = BN * kSize / Pass::COPY_X, kColumnTogether = kThreads / kColumnRow;
  DEVICE Source source() const {
    Source from;
    from.x = static_cast<const Element*>(params.x), from.weight = static_cast<const Element*>(params.weights[Pass::WEIGHT]);
    from.has_x = from.has_weight = 0;
    UNROLL for (int i = 0; i < Weights::kCount; ++i) {
      const bool here = Weights::is_whole(i) && has_weight(Weights::row(i));
      from.has_weight |= u32(here) << i;
      if constexpr (!Weights::kEven)
        from.weight_at[i] = here ? Offset(weight_at(Weights::row(i), 0) - weight_offset(0, fast, term)) : 0;
    }
    from.weight += Weights::k() + (Weights::kEven ? weight_at(Weights::row(0), 0) : weight_offset(0, fast, term));
    if constexpr (kByRows) {
      UNROLL for (int i = 0; i < States::kCount; ++i)
        from.has_x |= u32(States::is_whole(i) && has_state(States::row(i))) << i;
      if constexpr (States::kEven) from.x += States::k() + state_at(States::row(0), 0);
    } else {
      static_assert(kThreads % kColumnRow == 0, "threads of a block take whole rows");
      const int c = thread % kColumnRow * (BN / kColumnRow);
      from.has_x = first + c < right_edge();
      from.x += from.has_x ? column_at(c) + i64(thread / kColumnRow) * Pass::INNER : 0;
    }
    return from;
  }

  DEVICE void load(const Source& from, Cursor at, u32 to, bool wanted) const {
    const bool last = FAST % kGroups && fast + kGroups > FAST;  // some groups are not there
    {
      const i64 behind = at.k + i64(at.term) * (Pass::GROUPS > 1 ? 0 : i64(Q) * P) + i64(at.step) * WG * (i64(Q) * P);
      const bool inside = P % BK == 0 || at.k + Weights::k() < P;
      const u32 shared = to + (kByRows ? kLeftBytes : 0);
      copy_pieces<Pass::COPY_W, kEightsW, Weights::kCount>(wanted, P - at.k - Weights::k(), [&](int i) {
        const int r = Weights::row(i);
        bool here = inside && from.has_weight >> i & 1;
        if (kByRows && last) here = here && fast + at.step * WG + r / BN < FAST;
        const Element* weight = from.weight + behind;
        if constexpr (Weights::kEven)
          weight += Weights::behind(i);
        else if constexpr (kInOrder)
          weight += from.weight_at[i];
        else
          weight = static_cast<const Element*>(params.weights[Pass::WEIGHT]) +
                   (here && wanted ? weight_at(r, at.step) + at.k + Weights::k() : 0);
        return Piece{shared + piece(r, Weights::k()), weight, here, Weights::is_whole(i)};
      });
    }
    if constexpr (kByRows) {
      const i64 behind = at.k + at.term * x_term() + i64(at.step) * WG * P;
      const bool inside = P % BK == 0 || at.k + States::k() < P;
      copy_pieces<Pass::COPY_X, kEightsX, States::kCount>(wanted, P - at.k - States::k(), [&](int i) {
        const int r = States::row(i);
        bool here = inside && from.has_x >> i & 1;
        if (last) here = here && fast + at.step * WG + r / BM < FAST;
        const Element* x = from.x + behind + States::behind(i);
        if constexpr (kSeveral) {
          if (here && wanted) x = state_of(first + r % BM, fast + at.step * WG + r / BM, at.k + States::k());
        } else if constexpr (!States::kEven)
          x = from.x + (here && wanted ? state_at(r, at.step) + at.term * x_term() +
                                             i64(at.k + States::k()) * Pass::X_STEP : 0);
        return Piece{to + piece(r, States::k()), x, here, States::is_whole(i)};
      });
    } else {
      const Element* x = from.x + i64(at.k) * Pass::INNER + at.term * x_term();
      const u32 shared = to + kLeftBytes + thread % kColumnRow * Pass::COPY_X;
      copy_pieces<Pass::COPY_X, false, ceil_div(BK, kColumnTogether)>(wanted, 0, [&](int i) {
        const int l = i * kColumnTogether + thread / kColumnRow;
        // Where a lane takes k = t, t + 4 of the right operand, they are to be the k's that it has of the left.
        const int place = kMatrices ? l : l / 8 * 8 + l % 8 / 2 + l % 2 * 4;
        const bool here = from.has_x && (P % BK == 0 || at.k + l < P);
        const Element* piece = x + i64(i) * kColumnTogether * Pass::INNER;
        if constexpr (kSeveral)
          if (here && wanted) piece = column_of(thread % kColumnRow * (BN / kColumnRow), at.k + l);
        return Piece{shared + place * kColumnStride * kSize, piece, here, BK % kColumnTogether == 0 || l < BK};
      });
    }
  }

  // What a thread copies: to shared memory, from where, if it is there; or nothing at all.
  struct Piece {
    u32 to;
    const Element* from;
    bool here, whole;
  };
  // Those of 2 bytes go through registers, and the loads of several are on their way together; EIGHTS of them, of which
  // `left` are there.
  template <int BYTES, bool EIGHTS, int COUNT, class At> static DEVICE void copy_pieces(bool wanted, int left, At at) {
    if constexpr (EIGHTS) {
      constexpr int kAtOnce = COUNT < 4 ? COUNT : 4;
      if (!wanted) return;
      UNROLL for (int first = 0; first < COUNT; first += kAtOnce) {
        Eight x[kAtOnce];
        UNROLL for (int i = 0; i < kAtOnce; ++i)
          if (first + i < COUNT) {
            const Piece piece = at(first + i);
            x[i].load(piece.from, piece.from + left, piece.whole && piece.here ? left : 0);
          }
        UNROLL for (int i = 0; i < kAtOnce; ++i)
          if (first + i < COUNT) {
            const Piece piece = at(first + i);
            if (piece.whole) x[i].put(piece.to, piece.from, piece.here ? left : 0);
          }
      }
    } else if constexpr (BYTES >= 4) {
      UNROLL for (int i = 0; i < COUNT; ++i) {
        const Piece piece = at(i);
        if (!piece.whole) break;
        copy_async_if<BYTES>(piece.to, piece.from, piece.here, wanted);
      }
    } else if (wanted) {
      constexpr int kAtOnce = COUNT < 16 ? COUNT : 16;
      UNROLL for (int first = 0; first < COUNT; first += kAtOnce) {
        u16 bits[kAtOnce];
        UNROLL for (int i = 0; i < kAtOnce; ++i)
          if (first + i < COUNT) {
            const Piece piece = at(first + i);
            bits[i] = piece.whole && piece.here ? piece.from->bits : u16(0);
          }
        UNROLL for (int i = 0; i < kAtOnce; ++i)
          if (first + i < COUNT) {
            const Piece piece = at(first + i);
            if (piece.whole) store_shared(piece.to, bits[i]);
          }
      }
    }
  }

  // Adds the products of a chunk; k's from `left` on are not there. `meanwhile` is done once the first operands are on
  // their way.
  template <class Meanwhile> DEVICE void multiply(Sums& y, u32 slot, int left, Meanwhile meanwhile) const {
    const u32 turned = key(kMatrices ? lane.index & 7 : lane.g) << 4;
    u32 from_a = (part * BM + row) * BK * kSize, from_b = kLeftBytes;
    if constexpr (kMatrices)
      from_a += Math::template lane_row_a<BK>(lane);
    else
      from_a += Math::template lane_a<BK>(lane);
    from_a = slot + (from_a ^ turned), from_b += slot;
    if constexpr (kByRows && kMatrices)
      from_b += (part * BN + column) * BK * kSize + Math::template lane_row_b<BK>(lane) ^ turned;
    else if constexpr (kByRows)
      from_b += (part * BN + column) * BK * kSize + Math::template lane_b_by_k<BK>(lane) ^ turned;
    else
      from_b += column * kSize + Math::template lane_b_by_n<kColumnStride>(lane);
    constexpr int kStep = BK < Math::kStep ? BK : Math::kStep, kFlush = Math::kFlush * kStep;
    Sums some;
    UNROLL for (int k = 0; k < BK; k += kStep) {
      if (P % BK && k >= left) break;
      typename Math::A a[MT];
      typename Math::B b[NT];
      load_operands<kStep>(a, b, from_a, from_b, k);
      if (k == 0) meanwhile();
      if constexpr (kFlush > 0) {
        if (k % kFlush == 0) {
          UNROLL for (int i = 0; i < MT * NT * 4; ++i) some[i / (NT * 4)][i / 4 % NT][i % 4] = 0;
        }
      }
      UNROLL for (int m = 0; m < MT; ++m)
        UNROLL for (int n = 0; n < NT; ++n) Math::template multiply<kStep>(kFlush ? some[m][n] : y[m][n], a[m], b[n]);
      if constexpr (kFlush > 0) {
        if ((k + kStep) % kFlush == 0 || k + kStep >= BK || (P % BK && k + kStep >= left)) {
          UNROLL for (int i = 0; i < MT * NT * 4; ++i)
            y[i / (NT * 4)][i / 4 % NT][i % 4] += some[i / (NT * 4)][i / 4 % NT][i % 4];
        }
      }
    }
  }
  template <int K>
  DEVICE void load_operands(typename Math::A (&a)[MT], typename Math::B (&b)[NT], u32 from_a, u32 from_b, int k) const {
    constexpr bool kRoundA = !kByRows || Pass::ROUND_X;
    UNROLL for (int m = 0; m < MT; ++m) {
      const u32 from = (from_a ^ k * kSize) + m * 16 * BK * kSize;
      if constexpr (kMatrices)
        Math::template load_row_a<K, BK, kRoundA>(a[m], from);
      else
        Math::template load_a<K, BK, kRoundA>(a[m], from);
    }
    if constexpr (kByRows && kMatrices) {
      Math::template load_row_b<K, BK>(b, from_b ^ k * kSize);
    } else if constexpr (kByRows) {
      Math::template load_b_by_k<K, BK>(b, from_b ^ k * kSize);
    } else {
      u32 columns[NT];
      UNROLL for (int n = 0; n < NT; ++n) columns[n] = from_b + (k * kColumnStride + n * 8) * kSize;
      Math::template load_b_by_n<K, kColumnStride, NT, 8, Pass::ROUND_X>(b, columns, lane.index);
    }
  }

  // Infinities and NaNs are not what they should be once an operand is split: such sums are made again, from memory.
  DEVICE void repair(Sums& y, int fast) const {
    u64 broken = 0;
    UNROLL for (int i = 0; i < MT * NT * 4; ++i)
      broken |= u64(!is_finite(y[i / (NT * 4)][i / 4 % NT][i % 4])) << i;
    if (broken == 0) return;
    ROLL for (int j = 0; j < MT * NT * 4; ++j) {
      if (!(broken >> j & 1)) continue;
      const int r = row + j / (NT * 4) * 16 + j % 4 / 2 * 8 + lane.g, c = column + j / 4 % NT * 8 + lane.t * 2 + j % 2;
      const float sum = repaired(r, c, fast);
      UNROLL for (int i = 0; i < MT * NT * 4; ++i)
        if (i == j) y[i / (NT * 4)][i / 4 % NT][i % 4] = sum;
    }
  }
  DEVICE float repaired(int r, int c, int fast) const {
    const float* x = static_cast<const float*>(params.x);
    const float* weight = static_cast<const float*>(params.weights[Pass::WEIGHT]);
    const int from = kByRows ? weight_row(c) : q + r < Q ? q + r : -1;
    if (from < 0 || !has(fast) || (kByRows ? first + r >= rows() : first + c >= right_edge())) return 0;
    float sum = 0;
    for (int t = term; t < term + Pass::TERMS; ++t) {
      const float* w = weight + weight_offset(from, fast, t);
      const float* v = x + (kByRows ? x_offset(first + r, fast, t)
                                    : column_at(c) + (t - term) * x_term());
      ROLL for (int p = 0; p < P; ++p) {
        if constexpr (kSeveral)
          sum += w[p] * *(kByRows ? state_of(first + r, fast, p) : column_of(c, p));
        else
          sum += w[p] * v[i64(p) * (kByRows ? Pass::X_STEP : Pass::INNER)];
      }
    }
    return sum;
  }

  // Where an element of the result's first row lies in shared memory: words of a cell change places, so that the lanes
  // that store together meet in no bank.
  static DEVICE u32 cell(int e) {
    const u32 at = e / kCell * (BM + 1) * Pass::STORE + e % kCell * kSize;
    return at ^ cell_key(e / kCell * kCell) << 2;
  }
  static DEVICE u32 cell_key(int e) {
    constexpr int kUnit = kPairs ? 2 * kSize : kSize, kMask = Pass::STORE < 16 || kUnit > 8 ? 0 : kUnit > 4 ? 2 : 3;
    const int j = e / (kGroups * TB) * TB + e % TB;
    return kByRows ? j >> 1 & kMask : 0;
  }
  // Feature of a result by rows, without OUTER.
  DEVICE i64 feature(int j, int fast) const {
    return i64(slow) * FAST * Q + (i64(j / Pass::B) * FAST + fast) * Pass::B + j % Pass::B;
  }
  DEVICE Sum<Element> bias_at(int r, int c, int g) const {
    i64 at;
    bool there;
    if constexpr (kByRows) {
      there = first + r < rows() && weight_row(c) >= 0 && has(g);
      if constexpr (Pass::BIAS_INNER > 1)
        at = (i64(g) / Pass::BIAS_INNER * Q + q + c) * Pass::BIAS_INNER + g % Pass::BIAS_INNER;
      else
        at = (first + r) % Pass::OUTER * Q + feature(q + c, g);
    } else {
      there = first + c < right_edge() && q + r < Q;
      at = ((first_row + (inner + c) / Pass::INNER) % Pass::OUTER * Q + q + r) * Pass::INNER + (inner + c) % Pass::INNER;
    }
    u32 words[ceil_div(kSize, 4)];
    load_global<kSize>(static_cast<const Element*>(params.bias) + at, words, there);
    return number_of<Element>(words, 0);
  }
  // All of it is on its way at once. By rows, where samples have one row each, their bias is the same.
  DEVICE void add_bias(Sums& y, int g) const {
    UNROLL for (int n = 0; n < NT; ++n)
      UNROLL for (int i = 0; i < 2; ++i) {
        const int c = column + n * 8 + lane.t * 2 + i;
        Sum<Element> bias;
        UNROLL for (int h = 0; h < MT * 2; ++h) {
          if (h == 0 || !kByRows || Pass::OUTER > 1) bias = bias_at(row + h * 8 + lane.g, c, g);
          y[h / 2][n][h % 2 * 2 + i] += bias;
        }
      }
  }

  // A group's sums, with bias and activation, to the result in shared memory.
  DEVICE void put(Sums& y, int step) const {
    const int g = step * WG + part;
    if constexpr (Math::kRepairs) repair(y, fast + g);
    if constexpr (Pass::BIAS) add_bias(y, fast + g);
    UNROLL for (int n = 0; n < NT; ++n) {
      const int c = column + n * 8 + lane.t * 2;
      if (kByRows && TJ < BN && c >= TJ) continue;
      const auto place = [&](int c) {
        const int e = kByRows ? (c / TB * kGroups + g) * TB + c % TB : c;
        return memory + Pass::RESULT + cell(e) + (row + lane.g) * Pass::STORE;
      };
      const u32 to0 = place(c), to1 = kPairs ? 0 : place(c + 1);
      UNROLL for (int h = 0; h < MT * 2; ++h) {
        UNROLL for (int i = 0; i < 2; ++i) {
          Sum<Element>& sum = y[h / 2][n][h % 2 * 2 + i];
          sum = activation.of(sum);
          if constexpr (Pass::ROUND_Y) sum = Math::rounded(sum);
        }
        const auto x0 = y[h / 2][n][h % 2 * 2], x1 = y[h / 2][n][h % 2 * 2 + 1];
        if constexpr (kPairs) {
          store_shared(to0 + h * 8 * Pass::STORE, Pair<Element>(x0, x1));
        } else {
          store_shared(to0 + h * 8 * Pass::STORE, narrow<Element>(x0));
          if (!kByRows || TJ >= BN || c + 1 < TJ) store_shared(to1 + h * 8 * Pass::STORE, narrow<Element>(x1));
        }
      }
    }
  }

  // The result to memory: a thread takes some cells of a row, then those below.
  DEVICE void store() const {
    constexpr int kTogether = kThreads > kCells ? kThreads / kCells : 1, kAcross = kThreads > kCells ? kCells : kThreads;
    Element* y = static_cast<Element*>(params.y) + term * y_term();
    if (thread >= kTogether * kAcross) return;
    ROLL for (int j = thread % kAcross; j < kCells; j += kAcross) {
      const int e = j * kCell, r0 = thread / kAcross;
      i64 at;
      i64 rows_here = Q - q;  // from the tile's first
      if constexpr (kByRows) {
        const int c = q + e / (TB * kGroups) * TB + e % TB, g = fast + e / TB % kGroups;
        if (c >= Q || !has(g)) continue;
        at = feature(c, g), rows_here = rows() - first;
      } else {
        if (first + e >= right_edge()) continue;
        at = place_in_y(first_row + (inner + e) / Pass::INNER) + i64(q) * Pass::INNER + (inner + e) % Pass::INNER;
      }
      constexpr bool kEven = !kByRows || Pass::OUTER == 1 || Pass::Y_SAMPLE == i64(Pass::OUTER) * Q;
      constexpr i64 kBelow = !kByRows ? Pass::INNER : Pass::OUTER == 1 ? Pass::Y_SAMPLE : Q;
      const u32 from = memory + Pass::RESULT + j * (BM + 1) * Pass::STORE, key = cell_key(e);
      const int end = rows_here < BM ? int(rows_here) : BM;
      Element* to = y + at + (kByRows ? place_in_y(first + r0) : r0 * kBelow);
      UNROLL_BY(4) for (int r = r0; r < end; r += kTogether, to += kTogether * kBelow) {
        auto words = load_words<Pass::STORE>(from + r * Pass::STORE);
        if constexpr (Pass::STORE == 16) words = unswizzled(words, key);
        store_words<Pass::STORE>(kEven ? to : y + at + place_in_y(first + r), words);
      }
    }
  }
  // Word i of a cell lies at i ^ key.
  static DEVICE Words<16> unswizzled(Words<16> x, u32 key) {
    if (key & 2) { const u64 swapped = x.word[0]; x.word[0] = x.word[1], x.word[1] = swapped; }
    if (key & 1) x.word[0] = x.word[0] >> 32 | x.word[0] << 32, x.word[1] = x.word[1] >> 32 | x.word[1] << 32;
    return x;
  }

  DEVICE void choose_tile(i64 tile_of_samples, int tile) {
    const int columns = tile % kColumnTiles, groups = tile / kColumnTiles % kGroupTiles;
    q = columns * (kByRows ? TJ : BM);
    fast = groups * kGroups, slow = tile / (kColumnTiles * kGroupTiles) % (Pass::GROUPS / FAST);
    term = tile / (kColumnTiles * kGroupTiles * (Pass::GROUPS / FAST));
    first = tile_of_samples * (kByRows ? BM : BN);
    first_row = first / Pass::INNER, inner = int(first % Pass::INNER);
  }

  DEVICE void run() {
    // Blocks side by side in time share weights and samples: all tiles of SPAN tiles of samples, then of the next.
    for (int y = blockIdx.y; y < kTiles; y += gridDim.y) {
      constexpr int kSpan = Pass::SPAN;
      const i64 n = i64(y) * gridDim.x + blockIdx.x, from_sample = n / (kSpan * kTiles) * kSpan;
      const int span = int(min(i64(kSpan), gridDim.x - from_sample)), rest = int(n % (kSpan * kTiles));
      choose_tile(from_sample + rest % span, rest / span);
      const Source source = this->source();
      Cursor next = {0, 0, 0};
      int into = 0, from = 0;
      auto fetch = [&] {
        load(source, next, memory + into * kSlotBytes, next.step < Pass::STEPS);
        next.k += BK;
        if (next.k >= P) next.k = 0, ++next.term;
        if (next.term == Pass::TERMS) next.term = 0, ++next.step;
        commit_copies();
        into = into + 1 == Pass::SLOTS ? 0 : into + 1;
      };
      UNROLL for (int slot = 0; slot + 1 < Pass::SLOTS; ++slot) fetch();
      ROLL for (int step = 0; step < Pass::STEPS; ++step) {
        Sums y = {};
        ROLL for (int chunk = 0, k = 0; chunk < Pass::TERMS * ceil_div(P, BK); ++chunk) {
          wait_for_copies<Pass::SLOTS - 2>();
          __syncthreads();
          multiply(y, memory + from * kSlotBytes, P - k, fetch);
          k = k + BK >= P ? 0 : k + BK;
          from = from + 1 == Pass::SLOTS ? 0 : from + 1;
        }
        if constexpr (Pass::RESULT == 0) __syncthreads();  // the result takes the slots' place
        put(y, step);
      }
      wait_for_copies<0>();
      __syncthreads();
      store();
      __syncthreads();
    }
  }
};
