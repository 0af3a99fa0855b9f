// Weights that stay in shared memory for all tiles of a block, behind its barriers: how they come there, and where a stage has its own.
//
// Pass: what chain.cuh says
#pragma once
#include "move/tiles.cuh"
#include "multiply/mma.cuh"

// P, Q, I: the contraction's sizes; ROWS: the tile's units times what lies before the mode. MT x NT tiles of 16 x 8 are a
// warp's share. In and Out: layouts of its state and of the next. Offsets in bytes: in, out in the group's memory (-1: the
// slot), weight in the block's. SPLITS says that what a warp tile has of several rows of a state lies in Out at constants behind
// the first, PAIRS that two neighbouring sums are stored at once. SCALE is where a number for each term lies that the sums are multiplied
// by, or -1. FROM_SUMS: the state is not in shared memory but what a warp has just summed. Without tiles, threads contract a small mode.
// End: what stands behind the contraction, if it is a layer of several: Q (its features; S::Q may be more, with zeros), BIAS (whether
// it has one), Activation; in bytes bias_at, behind the weights' first one, and bias_step. Layers that are alike are terms of one.
template <bool BY_ROWS_, int P_, int Q_, int I_, int ROWS_, int MT_, int NT_, class In_, class Out_, int IN_, int OUT_,
          int WEIGHT_, bool IN_PLACE_, bool SPLITS_, bool PAIRS_, int SCALE_, int W_STRIDE_, bool FROM_SUMS_, class End_ = void>
struct Stage {
  static constexpr bool BY_ROWS = BY_ROWS_, FROM_SUMS = FROM_SUMS_, IN_PLACE = IN_PLACE_, SPLITS = SPLITS_, PAIRS = PAIRS_;
  static constexpr int P = P_, Q = Q_, I = I_, ROWS = ROWS_, MT = MT_, NT = NT_, IN = IN_, OUT = OUT_, WEIGHT = WEIGHT_;
  static constexpr int SCALE = SCALE_;
  using In = In_;
  using Out = Out_;
  using End = End_;
  static constexpr int IP = BY_ROWS ? 1 : round_up(I, 8), PP = round_up(P, 8);
  static constexpr bool BY_THREADS = MT == 0;  // not by the matrix unit: a thread has all p's of a column
  static constexpr int M = BY_ROWS ? ROWS : Q, WIDE = NT * 8;
  // By columns, a warp tile has DOWN rows of the state, or ACROSS of them are side by side in one.
  static constexpr int DOWN = !BY_THREADS && WIDE % IP == 0 ? WIDE / IP : 1;
  static constexpr int ACROSS = BY_THREADS ? 1 : ceil_div(BY_ROWS ? Q : IP, WIDE);
  static constexpr int M_TILES = BY_THREADS ? 1 : ceil_div(M, MT * 16), N_TILES = BY_ROWS ? ACROSS : ceil_div(ROWS, DOWN) * ACROSS;
  static constexpr int TILES = M_TILES * N_TILES;
  static constexpr int TO = BY_ROWS ? Out::at(1) : Out::I % (Q * I) == 0 ? I : Out::at(I);  // in Out, from a q to the next
  static constexpr int W_STRIDE = W_STRIDE_;  // between a weight's rows
  static constexpr int W_ROWS = BY_THREADS ? Q : BY_ROWS ? N_TILES * NT * 8 : M_TILES * MT * 16;
  // All of a state have one weight; others are kernels/recurrent/untied.cuh's.
  static constexpr bool TIED = true, EVENLY = true;
  static constexpr int PARTS = 1;
  static constexpr DEVICE bool has(int, int) { return true; }
  static constexpr DEVICE int group(int, int) { return 0; }
};

template <class Pass> struct HeldWeights : Tiles<Pass> {
  using Base = Tiles<Pass>;
  using Math = typename Pass::Math;
  using typename Base::Element;
  using Base::kBlock, Base::kSize;
  const u32 weights;  // the shared address of the block's weights

  DEVICE HeldWeights(const Params& p) : Base(p), weights(shared_address(shared_memory) + Pass::kBarrierBytes) {}

  // Weight [Q, P] to its place in shared memory, rows and columns padded with zeros; or as many of its rows as are `there`.
  template <class S, int Q = S::Q, int P = S::P> DEVICE void load_weight(int term, const Element* weight, int there = Q) const {
    constexpr bool kPermuted = Math::place_of(1, S::FROM_SUMS) != 1;
    constexpr int kRowBytes = P * kSize, kPiece = kRowBytes % 16 == 0 ? 16 : kRowBytes % 8 == 0 ? 8 : kRowBytes % 4 == 0 ? 4 : 2;
    constexpr int kEach = kPermuted ? 1 : kPiece / kSize;
    constexpr int kRow = S::PP / kEach, kCount = S::W_ROWS * kRow;
    const u32 to = weight_address<S>(term);
    const auto place = [&](int q, int p) { return to + (q * S::W_STRIDE + Math::place_of(p, S::FROM_SUMS)) * kSize; };
    if constexpr (kEach * kSize >= 4) {
      UNROLL_BY(4) for (int j = threadIdx.x; j < kCount; j += kBlock) {
        const int q = j / kRow, p = j % kRow * kEach;
        const bool present = q < there && p < P;
        copy_async<kEach * kSize>(place(q, p), weight + (present ? q * P + p : 0), present);
      }
    } else {
      Base::template by_registers<kCount, kBlock>(
          threadIdx.x,
          [&](int j) {
            const int q = j / kRow, p = j % kRow;
            return q < there && p < P ? weight[q * P + p] : Element{};
          },
          [&](int j) { return place(j / kRow, j % kRow); });
    }
  }

  // A weight made as it is loaded: `at` gives its elements, of as many rows. TURNED: it lies in memory the other way round.
  template <class S, bool TURNED, int Q = S::Q, class At> DEVICE void make_weight(int term, At at) const {
    const u32 to = weight_address<S>(term);
    ::make_weight<Element, Q, S::P, S::W_ROWS, S::PP, kBlock, 16, TURNED>(at, [&](int q, int p, Element x) {
      store_shared(to + (q * S::W_STRIDE + Math::place_of(p, S::FROM_SUMS)) * kSize, x);
    });
  }
  // A layer's bias, with zeros where its stage pads q
  template <class S> DEVICE void load_bias(int term, const Element* bias) const {
    using End = typename S::End;
    constexpr int kCount = S::ACROSS * S::WIDE;
    const u32 to = bias_address<S>(term);
    if constexpr (kSize >= 4) {
      for (int j = threadIdx.x; j < kCount; j += kBlock)
        copy_async<kSize>(to + j * kSize, bias + (j < End::Q ? j : 0), j < End::Q);
    } else {
      Base::template by_registers<kCount, kBlock>(
          threadIdx.x, [&](int j) { return j < End::Q ? bias[j] : Element{}; }, [&](int j) { return to + j * kSize; });
    }
  }

  // A weight that is a product is multiplied by a scale, and sums of it by what takes that back: of each term by itself, as a
  // term's weights may be small in one mode and large in another.
  template <class S> DEVICE void keep_scale(int term, float scale) const {
    if (threadIdx.x == 0) store_shared(shared_address(shared_memory) + S::SCALE + term * 4, 1 / scale);
  }
  template <class S> DEVICE float kept_scale(int term) const {
    return __uint_as_float(load_u32(shared_address(shared_memory) + S::SCALE + term * 4));
  }

  template <class S> DEVICE u32 weight_address(int term) const {
    return weights + S::WEIGHT + term * S::W_ROWS * S::W_STRIDE * kSize;
  }

  template <class S> DEVICE u32 bias_address(int term) const { return weights + S::End::bias_at + term * S::End::bias_step; }

  // Weights in shared memory, behind what has been asked for, for all threads. `kernel` is this, or what has it as its base.
  template <class Kernel> DEVICE void hold_weights(const Kernel& kernel) const {
    Pass::load_weights(kernel);
    commit_copies();
    wait_for_copies<0>();
    __syncthreads();
    if constexpr (Math::kRounds) {
      round_weights();
      __syncthreads();
    }
  }
  DEVICE void round_weights() const {
    if constexpr (Math::kRounds)
      for (int at = threadIdx.x * 4; at < Pass::kWeightBytes; at += kBlock * 4)
        store_shared(weights + at, tf32_of(load_u32(weights + at)));
  }
};
