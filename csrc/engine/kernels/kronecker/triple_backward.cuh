// The outer one of three tied contractions of large modes, backward, on sm_90a, with the state before it made again by the same
// kernel: for each sample, of X [po, p0, p1] and G [qo, q0, q1],
//
//     T = A X B',  dO += G T',  dT = O' G
//
// T's are made, and sent to the blocks that share q0, as by triple.cuh, but to slabs, and rounded. A block has the same columns of
// G, of which who multiplies copies 64 after 64, some ahead. Of 16 bits these are a slab of both products as they are: dO's k's
// are its columns, and dT's its rows; dT leaves through it. Of 32 bits they are left operands, in registers: of dT' as G' O, which
// one warpgroup makes, and of dO, which another one does.
// dX's and the other weights' gradients are another pass's, which reads dT.
//
// Pass: what triple.cuh has, PO and QO up to 64; DEPTH slots for G, of each warpgroup or, of 32 bits, of both; GRAD (the parameter that G is); MOST blocks
//       that the other pass has, and its UNITS of a sample: each has sums of dO here
#pragma once
#include "multiply/slabs.cuh"
#include "multiply/splits.cuh"
#include "finish/sums.cuh"
#include "kernels/kronecker/triple.cuh"

template <class Pass> struct TripleBackward : Triple<Pass> {
  using Base = Triple<Pass>;
  using typename Base::Element;
  using typename Base::Part;
  using Base::PO, Base::QO, Base::Q0, Base::Q1, Base::BUFFERS, Base::CLUSTER, Base::LAST, Base::SHARES;
  using Base::kRows, Base::kTiles, Base::kMiddleBytes, Base::kResultBytes, Base::kMakers;
  using Base::params, Base::lane, Base::warpgroup, Base::thread, Base::rank, Base::o, Base::middle, Base::results, Base::samples;
  static constexpr int DEPTH = Pass::DEPTH, kSlab = 8192, kSums = QO * PO;
  static constexpr int kSize = Base::kSize, kSlot = 64 * 64 * kSize, kRow = 4 * kSize;  // pieces of 64 columns
  static_assert(PO % 16 == 0 && QO % 16 == 0 && PO <= 64 && QO <= 64 && Q0 % CLUSTER == 0 && kRows * Q1 % 64 == 0);
  static constexpr int kSharing = kSize == 4 ? LAST : 1, kStep = LAST / kSharing;  // warpgroups that take a tile; tiles at once
  static_assert(LAST > 0 && kTiles / SHARES % kStep == 0 && DEPTH > 1 && (kSize == 2 || LAST == 2));

  DEVICE TripleBackward(const Params& given) : Base(given) {}

  DEVICE void run() const {
    Base::run([&](int group) { make_gradients(group); });
  }

  // Behind the barriers of all warpgroups by themselves
  static DEVICE void sync_last() { sync_group<LAST * 4, 16>(3 + kMakers / 128); }
  // Warpgroups that share slots
  DEVICE void sync() const {
    if constexpr (kSharing > 1)
      sync_last();
    else
      sync_warpgroup(warpgroup);
  }

  // Columns of a sample, from a tile's first one on
  static DEVICE i64 place_of(i64 sample, int rows, int rank, int tile) {
    return sample * (rows * Q0 * Q1) + rank * (kRows * Q1) + tile * 64;
  }
  DEVICE void copy(u32 slot, i64 sample, int tile, int group) const {
    const Element* from = static_cast<const Element*>(params.weights[Pass::GRAD]) + place_of(sample, QO, rank, tile);
    UNROLL for (int j = 0; j < QO * kRow; j += 128 * kSharing) {
      const int row = (j + (kSharing > 1 ? group * 128 : 0) + thread) / kRow, piece = thread % kRow;
      copy_async<16>(slot + piece / 8 * kSlab + swizzled(row, piece % 8), from + row * (Q0 * Q1) + piece * (16 / kSize), true);
    }
  }

  DEVICE void make_gradients(int group) const {
    const int first = kSharing > 1 ? 0 : group;
    const u32 slots = results + first * kResultBytes;
    float d_o[PO / 2] = {};
    u32 turn = 0, slot = 0, free = 0;
    i64 next = blockIdx.x;  // what is copied next
    int next_tile = first;
    const auto copy_next = [&] {
      if (next < samples) copy(slots + free * kSlot, next, next_tile, group);
      commit_copies();
      if (++free == DEPTH) free = 0;
      next_tile += kStep;
      if (next_tile >= kTiles) next_tile = first, next += gridDim.x;
    };
    Base::expect_first(group);
    for (int i = 0; i < DEPTH - 1; ++i) copy_next();
    ROLL for (i64 sample = blockIdx.x; sample < samples; sample += gridDim.x, ++turn) {
      const u32 buffer = turn % BUFFERS;
      ROLL for (int tile = first; tile < kTiles; tile += kStep) {
        if (tile == first && group < kStep) {
          wait_for_bytes(Base::full(buffer), turn / BUFFERS & 1);
          if (group == 0 && thread == 0 && sample + i64(BUFFERS) * gridDim.x < samples)
            expect_bytes(Base::full(buffer), Base::bytes());
        }
        wait_for_copies<DEPTH - 2>();
        fence_copy_engine();
        sync();  // all of G is there, and the last dT has left
        copy_next();
        const u32 g = slots + slot * kSlot, t = middle + buffer * kMiddleBytes + tile * kSlot;
        if (++slot == DEPTH) slot = 0;
        Element* to = static_cast<Element*>(params.y) + place_of(sample, PO, rank, tile);
        if constexpr (kSize == 4) {
          if (group > 0) {
            give_back(g, to);
          } else {
            add(d_o, g, t);
            release_if_read(buffer, tile);
          }
        } else {
          add_and_give_back(d_o, g, t, buffer, tile, to);
        }
      }
    }
    wait_for_copies<0>();
    store(d_o, group);
  }

  DEVICE void release_if_read(u32 buffer, int tile) const {
    constexpr int kTilesOfShare = kTiles / SHARES;
    if (tile % kTilesOfShare + kStep >= kTilesOfShare) Base::release(buffer, tile / kTilesOfShare);
  }

  // Of 16 bits
  DEVICE void add_and_give_back(float (&d_o)[PO / 2], u32 g, u32 t, u32 buffer, int tile, Element* to) const {
    float d_t[32];
    ask_for_products<QO / 16>([&](int s) {
      Wgmma<Part, 64>::multiply_turned(d_t, by_column(o, 0, s), by_column(g, 0, s), s > 0);
    });
    UNROLL for (int s = 0; s < 4; ++s) Wgmma<Part, PO>::multiply(d_o, by_k(g, 0, s), by_k(t, 0, s));
    commit_products();
    wait_for_products<0>();
    touch(d_t), touch(d_o);
    release_if_read(buffer, tile);
    sync_warpgroup(warpgroup);  // nobody reads G any more
    Slabs<Element, 64>::template store<PO, 64, AddsTo::NOTHING, Q0 * Q1>(d_t, g, thread / 32 * 16, lane, 1.f, to);
  }

  // Of 32 bits, four steps of k at once. What a tile adds is summed apart, as the matrix unit truncates what it adds to.
  DEVICE void add(float (&d_o)[PO / 2], u32 g, u32 t) const {
    const int row = thread / 32 * 16 + lane.index % 16;
    float sums[PO / 2];
    UNROLL for (int first = 0; first < 2; ++first) {
      u32 left[4][4];
      UNROLL for (int s = 0; s < 4; ++s) {
        load_matrices<false>(left[s], g + first * kSlab + swizzled(row, s * 2 + lane.index / 16));
        UNROLL for (int i = 0; i < 4; ++i) left[s][i] = tf32_of(left[s][i]);
      }
      make_products<4>(sums, [&](int s) {
        Wgmma<Part, PO>::multiply(sums, left[s], operand(t + first * kSlab) + s * 2, first > 0 || s > 0);
      });
    }
    UNROLL for (int i = 0; i < PO / 2; ++i) d_o[i] += sums[i];
  }
  // A lane's k's are 2t and 2t + 1, its rows, columns of G, neighbours.
  DEVICE void give_back(u32 g, Element* to) const {
    const int column = Base::column(0);
    const u32 from = g + column / 32 * kSlab + column % 4 * 4;
    float d_t[PO / 2];
    UNROLL for (int first = 0; first < QO / 8; first += 4) {
      u32 left[4][4];
      UNROLL for (int s = first; s < QO / 8 && s < first + 4; ++s)
        UNROLL for (int k = 0; k < 2; ++k) {
          u32 two[2];
          load_u32x2(from + swizzled(s * 8 + lane.t * 2 + k, column % 32 / 4), two);
          left[s - first][2 * k] = tf32_of(two[0]), left[s - first][2 * k + 1] = tf32_of(two[1]);
        }
      open_products();
      UNROLL for (int s = first; s < QO / 8 && s < first + 4; ++s)
        Wgmma<Part, PO>::multiply(d_t, left[s - first], operand(o) + (s / 4 * Base::kSlabO >> 4) + s % 4 * 2, s > 0);
      commit_products();
      wait_for_products<0>();
      touch(d_t);
    }
    to += lane.t * (2 * Q0 * Q1) + column;
    UNROLL for (int j = 0; j < PO / 4; ++j) {
      const u32 two[2] = {__float_as_uint(d_t[j / 2 * 4 + j % 2]), __float_as_uint(d_t[j / 2 * 4 + j % 2 + 2])};
      store_global<8>(to + (j / 2 * 8 + j % 2) * (Q0 * Q1), two);
    }
  }

  // What all warpgroups have summed, by the first one, and zeros for who has nothing here
  DEVICE void store(float (&d_o)[PO / 2], int group) const {
    constexpr int kFours = PO / 8;
    const auto four = [&](int other, int n) { return results + other * kResultBytes + (n * 128 + thread) * 16; };
    sync_warpgroup(warpgroup);  // the last dT has left
    if (group > 0 && group < kStep)
      UNROLL for (int n = 0; n < kFours; ++n)
        put_sums(four(group, n), {d_o[n * 4], d_o[n * 4 + 1], d_o[n * 4 + 2], d_o[n * 4 + 3]});
    sync_last();
    if (group > 0) return;
    const int blocks = gridDim.x * CLUSTER, block = blockIdx.x * CLUSTER + rank;
    const int present = int(min(params.batch * Pass::UNITS, i64(Pass::MOST)));
    float* to = static_cast<float*>(params.sums);
    UNROLL for (int n = 0; n < kFours; ++n) {
      UNROLL for (int other = 1; other < kStep; ++other) {
        float more[4];
        get_sums(four(other, n), more);
        UNROLL for (int i = 0; i < 4; ++i) d_o[n * 4 + i] += more[i];
      }
      UNROLL for (int h = 0; h < 2; ++h) {
        const int row = thread / 32 * 16 + lane.g + h * 8;
        if (QO == 64 || row < QO)
          store_two<true>(to + i64(block) * kSums + row * PO + n * 8 + lane.t * 2, d_o[n * 4 + h * 2], d_o[n * 4 + h * 2 + 1], true);
      }
    }
    const u32 zeros[4] = {};
    for (int other = block + blocks; other < present; other += blocks)
      for (int j = thread * 4; j < kSums; j += 512) store_global<16>(to + i64(other) * kSums + j, zeros);
  }
};
