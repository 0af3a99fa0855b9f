// What passes of two large factors in double have in common on sm_90a, where states and weights leave no room for each other in
// shared memory: chunks of kDepth k's go by, through a ring of SLOTS that four warps fill by asynchronous copies. Eight warps
// multiply them, four by two, each some tiles of 16 rows and of 8 columns.
#pragma once
#include "kernels/operands.cuh"
#include "move/ring.cuh"

template <class Math, class Element, int SLOTS, int SLOT_BYTES> struct DoubleRing {
  using Tensors = Operands<Math, Element, 256>;
  using A = typename Math::A;
  using B = typename Math::B;
  static constexpr int kSize = sizeof(Element), kStep = Math::kStep, kDepth = 16, kChunk = kDepth + 4;
  static constexpr int kThreads = 256, kCopiers = 128;

  const Lane lane;
  const int down, along;  // this warp's place among the four by two
  const Ring<SLOTS, SLOT_BYTES> ring;

  DEVICE explicit DoubleRing(u32 slots)
      : down(threadIdx.x / 32 / 2), along(threadIdx.x / 32 % 2), ring(slots) {}
  DEVICE u32 slot(int c) const { return ring.at(c % SLOTS); }
  DEVICE void init() const { ring.init(kCopiers, kThreads); }
  // By who copies, before chunk c and behind it
  DEVICE void wait_for_room(int c) const {
    if (c >= SLOTS) wait_for_bytes(ring.empty(c % SLOTS), c / SLOTS & 1 ^ 1);
  }
  DEVICE void hand_over(int c) const { arrive_with_copies(ring.full(c % SLOTS)); }

  // ROWS x COLUMNS of a matrix whose rows have FROM elements; what is not there is zero.
  template <int ROWS, int COLUMNS, int STRIDE, int FROM>
  static DEVICE void copy(u32 to, const Element* from, int rows, int columns) {
    constexpr int kBytes = FROM % 2 ? 8 : 16, kEach = kBytes / kSize, kRow = COLUMNS / kEach;
    UNROLL_BY(4) for (int j = threadIdx.x % kCopiers; j < ROWS * kRow; j += kCopiers) {
      const int row = j / kRow, column = j % kRow * kEach;
      const bool present = row < rows && column < columns;
      copy_async<kBytes>(to + (row * STRIDE + column) * kSize, present ? from + row * FROM + column : from, present);
    }
  }

  // sums += left x right, of chunk c
  template <int TILES, int NT, class Left, class Right>
  DEVICE void multiply(Element (&sums)[TILES][NT][4], int c, const Left& left, const Right& right) const {
    wait_for_bytes(ring.full(c % SLOTS), c / SLOTS & 1);
    constexpr int kSteps = kDepth / kStep;
    Tensors::template multiply_tiles<TILES, NT, kSteps, kSteps, 2>(
        [&](int m, int n) -> Element(&)[4] { return sums[m][n]; }, left, right);
    arrive(ring.empty(c % SLOTS));
  }
  // Operands of this warp: its `tiles` of 16 rows with k or m contiguous, and its columns, all in one matrix.
  template <int STRIDE> DEVICE auto rows(u32 from, int tiles) const {
    return Tensors::template tiles_by_rows<STRIDE, false>(
        from + down * tiles * 16 * STRIDE * kSize + Math::template lane_row_a<STRIDE>(lane));
  }
  template <int STRIDE> DEVICE auto rows_by_m(u32 from, int tiles) const {
    return Tensors::template tiles_by_m<STRIDE, false>(
        from + down * tiles * 16 * kSize + Math::template lane_a_by_m<STRIDE>(lane));
  }
  template <int STRIDE> DEVICE auto columns(u32 from, int tiles) const {
    return Tensors::template by_k<STRIDE>(from + along * tiles * 8 * STRIDE * kSize + Math::template lane_row_b<STRIDE>(lane));
  }
  template <int STRIDE> DEVICE auto columns_by_n(u32 from, int tiles) const {
    return Tensors::template by_n<STRIDE>(
        from + along * tiles * 8 * kSize + Math::template lane_b_by_n<STRIDE>(lane), lane.index);
  }
};
