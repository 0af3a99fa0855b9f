// Dense layers one behind another, which the blocks of a cluster share out: each has some q's of every layer, whose weights stay in
// its shared memory for all tiles.
//
//     state of a tile, in every block -> [W, own q's] -> bias, activation -> own q's of the next state, to every block of the cluster
//
// It is a Chain (kernels/chain.cuh) of one group, whose stages are by rows, of layers; Q of a stage is a block's share, Q of its
// End all of the layer's. A layer ends with a barrier of the cluster, behind which its state is whole in each block. The last one has
// none: its sums go to memory, and the next tile's first state to where nobody reads any more, since states have two places in
// turns, from tile to tile.
//
// Pass: what chain.cuh says of loads and stages; CLUSTER, blocks along y; kStateBytes of a state's place; stages(), which calls hand_on()
//       for each layer but the last one, ask() behind the first, and finish() for the last; load_weights(), which calls load_rows(), and
//       place_weights(), which calls place_rows()
#pragma once
#include "finish/sums.cuh"
#include "kernels/chain.cuh"

template <class Pass> struct StackCluster : Chain<Pass> {
  using Base = Chain<Pass>;
  using typename Base::Element, typename Base::Math;
  using Base::kSize, Base::lane, Base::memory, Base::params, Base::units, Base::warp;
  template <class S> using Sums = typename Base::template Sums<S>;
  static constexpr int CLUSTER = Pass::CLUSTER;
  static_assert(Pass::GROUPS == 1 && Pass::SLOTS == 1);
  const int rank;

  DEVICE StackCluster(const Params& p) : Base(p), rank(blockIdx.y) {}

  // Of a layer's q's, where the block's own begin, and how many there are: none, if others have them all
  template <class S> DEVICE int first() const { return rank * S::Q; }
  template <class S> DEVICE int own() const {
    const int left = S::End::Q - first<S>();
    return left > 0 ? min(left, S::Q) : 0;
  }
  // COUNT numbers of a run to shared memory, 16 bytes at a time, with zeros behind those that are `there`
  template <int COUNT> static DEVICE void fetch(u32 to, const Element* from, int there) {
    static_assert(COUNT * kSize % 16 == 0);
    ROLL for (int at = threadIdx.x * 16; at < COUNT * kSize; at += Base::kBlock * 16) {
      const int left = there * kSize - at;
      copy_bytes(to + at, left > 0 ? from + at / kSize : from, left > 0 ? min(16, left) : 0);
    }
  }
  // A block's rows of a weight lie together in memory. Where these are odd, of 16 bits, they come as they lie there, 16 bytes at a
  // time, and are put to their places when all of them have come.
  template <int P> static constexpr bool kOdd = P * kSize % 4 != 0;
  template <class S, int P> DEVICE void load_rows(int term, const Element* weight) const {
    weight += (own<S>() ? first<S>() : 0) * P;
    if constexpr (kOdd<P>)
      fetch<S::Q * P>(Base::template weight_address<S>(term), weight, own<S>() * P);
    else
      Base::template load_weight<S, S::Q, P>(term, weight, own<S>());
  }
  // From the last row on, so that what a row takes the place of has been read
  template <class S, int P> DEVICE void place_rows(int term) const {
    if constexpr (kOdd<P>) {
      constexpr int kOfRow = S::PP / 8, kCount = S::W_ROWS * kOfRow, kEach = 4, kAtOnce = kEach * Base::kBlock;
      const u32 at = Base::template weight_address<S>(term);
      ROLL for (int begin = (ceil_div(kCount, kAtOnce) - 1) * kAtOnce; begin >= 0; begin -= kAtOnce) {
        u32 words[kEach][4] = {};
        UNROLL for (int i = 0; i < kEach; ++i) {
          const int j = begin + i * Base::kBlock + threadIdx.x, q = j / kOfRow, p = j % kOfRow * 8;
          if (q < own<S>()) take_words<Element, P>(at + q * P * kSize, p, p + 8 <= P, 4, words[i]);
        }
        __syncthreads();
        UNROLL for (int i = 0; i < kEach; ++i) {
          const int j = begin + i * Base::kBlock + threadIdx.x;
          if (j < kCount) store_u32x4(at + (j / kOfRow * S::W_STRIDE + j % kOfRow * 8) * kSize, words[i]);
        }
        __syncthreads();
      }
    }
  }
  template <class S> DEVICE void load_own_bias(int term, const Element* bias) const {
    fetch<S::ACROSS * S::WIDE>(Base::template bias_address<S>(term), bias + (own<S>() ? first<S>() : 0), own<S>());
  }

  // Where states lie, in turns
  DEVICE u32 state() const { return memory + Pass::kSlotBytes; }
  DEVICE u32 other(u32 state) const { return 2 * this->state() + Pass::kStateBytes - state; }

  // A warp tile of the block's q's, and of each two neighbours of them of(row, q among all, first, second)
  template <class S, class Of> DEVICE void make(int term, u32 from, Of of) const {
    ROLL for (int tile = warp; tile < S::TILES; tile += Pass::WARPS) {
      Sums<S> y = {};
      Base::template accumulate<S>(y, tile, term, from);
      Base::template end_layer<S, false>(y, tile, term, own<S>());
      const auto corner = Base::template corner<S>(tile);
      UNROLL for (int h = 0; h < 2 * S::MT; ++h)
        UNROLL for (int n = 0; n < S::NT; ++n) {
          const int row = corner.row + lane.g + h * 8, column = corner.i + n * 8 + lane.t * 2;
          if ((S::M % (S::MT * 16) == 0 || row < S::M) && (S::Q % S::WIDE == 0 || column < S::Q))
            of(row, first<S>() + column, y[h / 2][n][h % 2 * 2], y[h / 2][n][h % 2 * 2 + 1]);
        }
    }
  }

  // To all blocks; KEEPS: to memory as well, to the place of the parameter `kept`
  template <class S, bool KEEPS> DEVICE void hand_on(int term, u32 from, u32 to, i64 tile, int kept) const {
    make<S>(term, from, [&](int row, int q, Sum<Element> one, Sum<Element> two) {
      if (q >= S::Out::P) return;
      one = Math::rounded(one), two = Math::rounded(two);
      const u32 place = to + (row * S::Out::ROW + q) * kSize;
      UNROLL for (int block = 0; block < CLUSTER; ++block) give(in_block(place, block), Pair<Element>(one, two));
      if constexpr (KEEPS) put<S>(const_cast<void*>(params.weights[kept]), tile, row, q, one, two);
    });
    sync_cluster();
  }
  static DEVICE void give(u32 to, const Pair<Element>& two) {
    if constexpr (kSize == 2)
      store_in_block(to, two.bits);
    else
      store_in_block(to, two.x, two.y);
  }
  // Two neighbours to a tensor of a layer's q's, if that has them
  template <class S> DEVICE void put(void* tensor, i64 tile, int row, int q, Sum<Element> one, Sum<Element> two) const {
    constexpr int Q = S::End::Q;
    const i64 unit = tile * Pass::UNITS + row;
    if (unit < units && q < Q) store_two<Q % 2 == 0>(static_cast<Element*>(tensor) + unit * Q + q, one, two, q + 1 < Q);
  }

  template <class S> DEVICE void finish(int term, u32 from, i64 tile) const {
    make<S>(term, from, [&](int row, int q, Sum<Element> one, Sum<Element> two) { put<S>(params.y, tile, row, q, one, two); });
  }

  // The next tile of x, which nobody in this block reads any more
  DEVICE void ask(i64 tile) const { Base::load(tile + Base::step(), 0); }

  DEVICE void run() const {
    const i64 first = blockIdx.x;
    Base::load(first, 0);
    Base::hold_weights(*this);
    Pass::place_weights(*this);
    sync_cluster();  // all have begun
    u32 to = state();
    ROLL for (i64 tile = first; tile < Base::tiles(); tile += Base::step()) {
      wait_for_copies<0>();
      Base::pad(0);
      Base::sync();
      Pass::stages(*this, to, tile);
    }
    wait_for_copies<0>();
  }
};
