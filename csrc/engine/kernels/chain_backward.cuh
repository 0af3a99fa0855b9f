// All gradients of a list of tied contractions at one visit, in any order, of any sizes: from x and grad_y of a tile of units,
//
//     S[0] = x,  S[i+1] = W[i] S[i];     G[k] = grad_y,  dW[i] += G[i+1] S[i]',  G[i] = W[i]' G[i+1],  grad_x = G[0]
//
// States S and gradients G lie in shared memory as Chain's stages read them (kernels/chain.cuh); G[i] takes the place of S[i],
// which nobody reads behind dW[i]. A warp keeps its tiles of every dW in registers for all units that its group takes; what a
// unit adds is summed apart, as the matrix unit truncates what it adds to. Where a dW has fewer tiles than a group has warps,
// several warps share a tile and divide what it is summed over. In the end a block adds up the sums of these and of its groups,
// and writes them; a second kernel adds up those of the blocks. Blocks along y of the grid have a term each of a sum of products,
// or, of a single large weight, one of PARTS of its gradient's tiles, and of the rows of grad_x, PART of them. Or a block has all
// TERMS, one after another: x is there once, grad_y once or for each of them, G[1] is kept for each, and grad_x is the sum of what
// they make.
//
// Pass:  Math, Element; WARPS, GROUPS, UNITS of a tile, SLOTS; UNITS_PER_SAMPLE, Input and Output (Regions of x and of grad_y);
//        COPY_X, COPY_G, STORE: bytes of one access; PADDED: whether zeros may come behind what is loaded of a row;
//        kWeightBytes; kStateBytes of x's slot, kGradBytes of one of the GRADS gradients behind it, kSlotBytes of all,
//        kGroupBytes; TERMS of a block, which is also the RANK of its sums; PARTS, PART and ROWS (of a part of grad_x, and of
//        all), PART_STEP (elements from part to part); X_TERM, G_TERM, Y_TERM: a sample's features where each term has a state
//        of its own (one term behind the other), or 0; Returned (Region of what a block makes of grad_x), GRAD (the parameter
//        that grad_y is), RETURNS (whether grad_x is made), COUNT (sums of a block), SUMS_AT (where those of all blocks begin);
//        Source and Sink: void, or Several, the tensors that x and grad_x are; MEETINGS (how often a group meets in walk());
//        X, G (layouts of the slots), Final (of grad_x), FirstX and FirstG (stages that read these), Sums, load_weights(),
//        walk(), store_sums()
#pragma once
#include "kernels/chain.cuh"
#include "finish/sums.cuh"

// Of one weight [Q, P]: tiles of MT x NT times 16 x 8, of which a warp has COUNT, and SHARE warps have different ones. X and G are
// the layouts of the states before and behind its contraction, ROWS of them, with I behind the mode. BEGIN: where a block's sums
// of its terms begin. RAW_X, RAW_G: whether these states are as memory has them.
template <int P_, int Q_, int I_, int ROWS_, int MT_, int NT_, int COUNT_, int SHARE_, class X_, class G_, int BEGIN_, bool RAW_X_,
          bool RAW_G_>
struct Learned {
  static constexpr bool RAW_X = RAW_X_, RAW_G = RAW_G_;
  static constexpr int P = P_, Q = Q_, I = I_, ROWS = ROWS_, MT = MT_, NT = NT_, COUNT = COUNT_, SHARE = SHARE_, BEGIN = BEGIN_;
  using X = X_;
  using G = G_;
  static constexpr bool BY_ROWS = I == 1;
  static constexpr int IP = round_up(I, 8), M_TILES = ceil_div(Q, 16 * MT), TILES = M_TILES * ceil_div(P, 8 * NT);
};

template <class Pass> struct ChainBackward : Chain<Pass> {
  using Base = Chain<Pass>;
  using typename Base::Element;
  using Base::group, Base::kBlock, Base::kSize, Base::kThreads, Base::lane, Base::memory, Base::params, Base::thread,
      Base::units, Base::warp, Base::weights;
  using Math = typename Pass::Math;
  using Real = Sum<Element>;
  static constexpr int kStep = Math::kStep;
  static constexpr bool kPairs = kSize == 4;  // k's by n and m
  static constexpr bool kSplit = Math::kRepairs;
  static constexpr int kFlush = Math::kFlush > 0 ? Math::kFlush : 1;
  template <class D> using Tile = Real[D::MT][D::NT][4];
  template <class D> using Tiles = Tile<D>[Pass::TERMS][D::COUNT];

  DEVICE ChainBackward(const Params& p) : Base(p) {}
  DEVICE void sync() const { sync_group<Pass::WARPS, Pass::GROUPS>(group + 1); }  // the block's own barrier is for the end

  // Zeros where a state has more than its sizes and a product is summed over it: p's up to whole steps, and what lies behind the
  // mode, or the rows, which gradients of weights are summed over.
  template <class S, bool TAILS = true> DEVICE void zero_padding(u32 state) const {
    using L = typename S::In;
    Base::template zero_padding<S, TAILS>(state);
    if constexpr (TAILS && !S::BY_ROWS && S::IP != S::I) {
      for (int j = thread; j < S::ROWS * S::P; j += kThreads)
        Base::template zeros<S::IP - S::I>(state + (j / S::P * L::ROW + j % S::P * L::STEP + S::I) * kSize);
    }
    if constexpr (S::BY_ROWS && S::ROWS % kStep) {
      constexpr int kWords = (round_up(S::ROWS, kStep) - S::ROWS) * L::ROW / Base::kWord;
      for (int j = thread; j < kWords; j += kThreads)
        store_u32x4(state + S::ROWS * L::ROW * kSize + j * 16, {0, 0, 0, 0});
    }
  }

  // What a tile has of a state: of each ROWS of it, a unit, and of columns behind the mode those of a chunk that is not whole. The
  // rest is zeros in every state: an infinite weight makes a NaN of them, and gradients of weights are summed over all.
  template <int ROWS> struct Present {
    using R = typename Pass::Input;
    const int units, chunk;
    DEVICE explicit Present(int units, i64 first) : units(units), chunk(R::chunk(first)) {}
    DEVICE bool all() const { return R::WIDTH == 0 && (Pass::UNITS == 1 || units == Pass::UNITS); }
    DEVICE bool operator()(int row, int column) const {
      const int unit = Pass::UNITS > 1 ? row / ROWS : 0;
      const bool in_chunk = R::WIDTH == 0 || column % R::C < R::WIDTH - (chunk + unit) % R::CHUNKS * R::C;
      return (Pass::UNITS == 1 || unit < units) && in_chunk;
    }
  };
  template <class S, class There> DEVICE void clear_missing(typename Base::template Sums<S>& y, int tile, There there) const {
    const auto [row, o, i] = Base::template corner<S>(tile);
    UNROLL for (int n = 0; n < S::NT; ++n) {
      const int down = !S::BY_ROWS && S::DOWN > 1 ? n * 8 / S::IP : 0;
      UNROLL for (int m = 0; m < S::MT; ++m)
        UNROLL for (int j = 0; j < 4; ++j)
          if (S::BY_ROWS ? !there(row + lane.g + m * 16 + j / 2 * 8, 0) : !there(o + down, i + n * 8 - down * S::IP + lane.t * 2 + j % 2))
            y[m][n][j] = 0;
    }
  }

  // One contraction of a term, or the sum of those of SUMMED terms, whose states are APART bytes from each other. NEXT is the stage
  // that reads the result, or void where that is grad_x.
  template <class S, class NEXT, int SUMMED = 1, int APART = 0>
  DEVICE void contract(u32 from, u32 to, i64 tile_index, int term = 0) const {
    const i64 first = tile_index * Pass::UNITS;
    const Present<S::ROWS / Pass::UNITS> there(Base::present(first), first);
    if constexpr (S::BY_THREADS) {
      Base::template by_threads<S, is_void<NEXT>, SUMMED, APART>(term, from, to, first, there);
    } else {
      ROLL for (int tile = warp; tile < S::TILES; tile += Pass::WARPS) {
        typename Base::template Sums<S> y = {};
        Base::template accumulate<S, SUMMED, APART>(y, tile, term, from);
        if (!is_void<NEXT> && !there.all()) clear_missing<S>(y, tile, there);
        Base::template write<S, is_void<NEXT>>(y, tile, to, tile_index * Pass::UNITS);
      }
    }
    if constexpr (!is_void<NEXT>) zero_padding<NEXT>(to);
    sync();
  }

  // What a tile of units adds to the gradient of a term's weight.
  template <class D> DEVICE void learn(Tiles<D>& sums, u32 x, u32 g, int term) const {
    const int share = warp % D::SHARE, fold = warp / D::SHARE;
    UNROLL for (int j = 0; j < D::COUNT; ++j) {
      const int tile = share + (part() * D::COUNT + j) * D::SHARE;
      if (tile < D::TILES) {
        const int q = tile % D::M_TILES * D::MT * 16, p = tile / D::M_TILES * D::NT * 8;
        Tile<D> y = {};
        if constexpr (D::BY_ROWS)
          over_rows<D>(y, x + p * kSize, g + q * kSize, fold);
        else
          over_inner<D>(y, x + p * D::X::STEP * kSize, g + q * D::G::STEP * kSize, fold);
        UNROLL for (int t = 0; t < Pass::TERMS; ++t)
          if (Pass::TERMS == 1 || t == term) add_sums(sums[t][j], y);
      }
    }
  }

  // Steps that a warp's fold has of all, some at once. What the matrix unit truncates of low products is nothing beside high ones.
  template <class D> static constexpr int kFolds = Pass::WARPS / D::SHARE;
  template <class D, class Step> static DEVICE void over_steps(Tile<D>& y, int steps, int fold, Step step) {
    if constexpr (kSplit) {
      Tile<D> low = {};
      ROLL for (int at = fold * kFlush; at < steps; at += kFolds<D> * kFlush) {
        Tile<D> high = {};
        UNROLL for (int j = 0; j < kFlush; ++j)
          if (at + j < steps) step(at + j, high, low);
        add_sums(y, high);
      }
      UNROLL for (int m = 0; m < D::MT; ++m)
        UNROLL for (int n = 0; n < D::NT; ++n)
          UNROLL for (int i = 0; i < 4; ++i) y[m][n][i] += or_zero(low[m][n][i]);
    } else {
      UNROLL_BY(2) for (int at = fold; at < steps; at += kFolds<D>) step(at, y, y);
    }
  }

  template <class D, int K>
  static DEVICE void multiply(Tile<D>& y, Tile<D>& low, const typename Math::A (&a)[D::MT], const typename Math::B (&b)[D::NT]) {
    UNROLL for (int m = 0; m < D::MT; ++m)
      UNROLL for (int n = 0; n < D::NT; ++n) {
        if constexpr (kSplit)
          Math::multiply_apart(y[m][n], low[m][n], a[m], b[n]);
        else
          Math::template multiply<K>(y[m][n], a[m], b[n]);
      }
  }

  // Of the last mode: over the rows, q's and p's side by side.
  template <class D> DEVICE void over_rows(Tile<D>& y, u32 x, u32 g, int fold) const {
    constexpr int kG = D::G::ROW, kX = D::X::ROW;
    g += Math::template lane_a_by_m<kG, kPairs>(lane), x += Math::template lane_b_by_n<kX, kPairs>(lane);
    over_steps<D>(y, ceil_div(D::ROWS, kStep), fold, [&](int step, Tile<D>& high, Tile<D>& low) {
      typename Math::A a[D::MT];
      typename Math::B b[D::NT];
      u32 from[D::NT];
      UNROLL for (int m = 0; m < D::MT; ++m)
        Math::template load_a_by_m<kG, kPairs, D::RAW_G>(a[m], g + (step * kStep * kG + m * 16) * kSize);
      UNROLL for (int n = 0; n < D::NT; ++n) from[n] = x + (step * kStep * kX + n * 8) * kSize;
      Math::template load_b_by_n<kStep, kX, D::NT, 8, D::RAW_X, kPairs>(b, from, lane.index);
      multiply<D, kStep>(high, low, a, b);
    });
  }

  // Of others: over the rows, and in each over what lies behind the mode, side by side. Where that is half a step, two rows are one.
  template <class D> DEVICE void over_inner(Tile<D>& y, u32 x, u32 g, int fold) const {
    constexpr int kG = D::G::STEP, kX = D::X::STEP, kRow = ceil_div(D::IP, kStep);  // steps of a row
    g += Math::template lane_row_a<kG>(lane), x += Math::template lane_row_b<kX>(lane);
    if constexpr (kStep == 16 && D::IP == 8) {
      constexpr int kG2 = 2 * D::G::ROW * kSize, kX2 = 2 * D::X::ROW * kSize, kTwos = D::ROWS / 2;
      if (D::ROWS % 2 && fold == kTwos % kFolds<D>) inner_step<D, 8>(y, y, g + kTwos * kG2, x + kTwos * kX2);
      // Lanes that name the second eight k's name the next row's first.
      g += lane.index & 16 ? (D::G::ROW - 8) * kSize : 0, x += lane.index & 8 ? (D::X::ROW - 8) * kSize : 0;
      return over_steps<D>(y, kTwos, fold, [&](int step, Tile<D>& high, Tile<D>& low) {
        inner_step<D, 16>(high, low, g + step * kG2, x + step * kX2);
      });
    }
    over_steps<D>(y, D::ROWS * kRow, fold, [&](int step, Tile<D>& high, Tile<D>& low) {
      const int row = step / kRow, i = step % kRow * kStep;
      const u32 left = g + (row * D::G::ROW + i) * kSize, right = x + (row * D::X::ROW + i) * kSize;
      if constexpr (kStep == 16 && D::IP % 16 == 8) {  // the last step of a row is half of one
        if (i + 16 > D::IP) return inner_step<D, 8>(high, low, left, right);
      }
      inner_step<D, kStep>(high, low, left, right);
    });
  }
  template <class D, int K> DEVICE void inner_step(Tile<D>& high, Tile<D>& low, u32 left, u32 right) const {
    typename Math::A a[D::MT];
    typename Math::B b[D::NT];
    UNROLL for (int m = 0; m < D::MT; ++m)
      Math::template load_row_a<K, D::G::STEP, D::RAW_G>(a[m], left + m * 16 * D::G::STEP * kSize);
    Math::template load_row_b<K, D::X::STEP, D::NT, D::RAW_X>(b, right);
    multiply<D, K>(high, low, a, b);
  }

  // A block's sums of a weight to where they belong, of its groups and of warps that share a tile in their order.
  template <class D> DEVICE void store(const Tiles<D>& sums) const {
    UNROLL for (int t = 0; t < Pass::TERMS; ++t) store_term<D>(sums[t], term() + t);
  }
  template <class D> DEVICE void store_term(const Tile<D> (&sums)[D::COUNT], int term) const {
    Real* to = static_cast<Real*>(params.sums) + Pass::SUMS_AT + i64(blockIdx.x) * Pass::COUNT + D::BEGIN + term * (D::Q * D::P);
    constexpr int kOf = D::MT * D::NT, kMembers = 32 * D::SHARE;
    add_up<D::COUNT * kOf, kBlock, kMembers, Pass::GROUPS * Pass::kGroupBytes, Real>(
        weights + Pass::kWeightBytes,
        [&](int n) -> const Real(&)[4] { return sums[n / kOf][n % kOf / D::NT][n % D::NT]; },
        [&](int n, int member, const Real(&sum)[4]) {
          const Lane at(member % 32);
          const int tile = member / 32 + (part() * D::COUNT + n / kOf) * D::SHARE;
          const int q = (tile % D::M_TILES * D::MT + n % kOf / D::NT) * 16 + at.g;
          const int p = (tile / D::M_TILES * D::NT + n % D::NT) * 8 + at.t * 2;
          UNROLL for (int i = 0; i < 4; ++i)
            if (tile < D::TILES && q + i / 2 * 8 < D::Q && p + i % 2 < D::P)
              store_global(to + (q + i / 2 * 8) * D::P + p + i % 2, sum[i]);
        });
  }

  DEVICE u32 slot_of(int slot) const { return memory + slot * Pass::kSlotBytes; }
  DEVICE u32 state(int offset) const { return memory + Pass::SLOTS * Pass::kSlotBytes + offset; }

  static DEVICE int term() { return Pass::PARTS > 1 ? blockIdx.y / Pass::PARTS : blockIdx.y; }
  static DEVICE int part() { return Pass::PARTS > 1 ? blockIdx.y % Pass::PARTS : 0; }

  // What a term has of a tensor that has a state for each.
  template <i64 FEATURES> DEVICE i64 of_term() const { return i64(term()) * params.batch * FEATURES; }

  // Whether lines of them come by registers, padded
  static constexpr bool kPadsX = Pass::PADDED && Base::template pads_lines<typename Pass::Input, typename Pass::X, Pass::COPY_X>;
  static constexpr bool kPadsG = Pass::PADDED && Pass::COPY_G < 4 && Pass::Output::template kWholeRows<typename Pass::G>;

  // A tile of x and of each grad_y, if there is such a tile.
  DEVICE void load(i64 tile, i64 tiles, int slot) const {
    if (tile < tiles) {
      const auto* g = static_cast<const Element*>(params.weights[Pass::GRAD]) + of_term<Pass::G_TERM>();
      using Input = typename Pass::Input;
      using Output = typename Pass::Output;
      auto x = source_of<typename Pass::Source, Element>(params);
      if constexpr (Pass::X_TERM > 0) x += of_term<Pass::X_TERM>();
      const i64 here = tile * Pass::UNITS, next = (tile + Base::step()) * Pass::UNITS;
      Base::template load_pieces<Input, typename Pass::X, Pass::COPY_X, Pass::PADDED>(x, here, slot_of(slot));
      if constexpr (Pass::PADDED && Base::template comes_by_registers<Pass::COPY_X>) Base::template fetch<Input>(x, next);
      ROLL for (int t = 0; t < Pass::GRADS; ++t) {
        const Element* grad = g + t * params.batch * Pass::G_TERM;
        Base::template load_pieces<Output, typename Pass::G, Pass::COPY_G, Pass::PADDED>(
            grad, here, slot_of(slot) + Pass::kStateBytes + t * Pass::kGradBytes);
        if constexpr (Pass::PADDED && Pass::COPY_G < 4) Base::template fetch<Output>(grad, next);
      }
    }
    commit_copies();
  }

  // Where this group has no tile: as for one, before and behind what is made of it as well
  DEVICE void meet(i64 tile, i64 tiles) const {
    meet_as_others<Pass::GROUPS>(tile - i64(group) * gridDim.x, tiles, 2 + Pass::MEETINGS, [&] { sync(); });
  }

  DEVICE void run() const {
    const i64 tiles = Base::tiles(), step = Base::step();
    const i64 first = i64(group) * gridDim.x + blockIdx.x;  // few tiles are one for each block
    ROLL for (int slot = 0; slot < Pass::SLOTS; ++slot) load(first + slot * step, tiles, slot);
    Base::hold_weights(*this);
    typename Pass::template Sums<ChainBackward> sums;
    int slot = 0;
    i64 tile = first;
    ROLL for (; tile < tiles; tile += step) {
      wait_for_copies<Pass::SLOTS - 1>();
      const u32 x = slot_of(slot), g = x + Pass::kStateBytes;
      zero_padding<typename Pass::FirstX, !kPadsX>(x);
      ROLL for (int t = 0; t < Pass::GRADS; ++t) zero_padding<typename Pass::FirstG, !kPadsG>(g + t * Pass::kGradBytes);
      sync();
      Pass::walk(*this, sums, x, g, tile);
      if constexpr (Pass::RETURNS) {
        using Returned = typename Pass::Returned;
        constexpr int kOfRow = Returned::kSize / Pass::PART;
        auto y = sink_of<typename Pass::Sink, Element>(params);
        if constexpr (Pass::Y_TERM > 0 || Pass::PARTS > 1) y += of_term<Pass::Y_TERM>() + part() * Pass::PART_STEP;
        Base::template store_pieces<Returned, typename Pass::Final, Pass::STORE>(
            tile * Pass::UNITS, x, y, (Pass::ROWS - part() * Pass::PART) * kOfRow);
      }
      sync();  // its result has left
      load(tile + Pass::SLOTS * step, tiles, slot);
      if (++slot == Pass::SLOTS) slot = 0;
    }
    wait_for_copies<0>();
    meet(tile, tiles);
    __syncthreads();
    Pass::store_sums(*this, sums);
  }
};
