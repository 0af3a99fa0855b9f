// How a step's rows of tensors come to the blocks that share out a state (sides.cuh), and leave them. What a block has of a row
// are lines that lie together there, own rows or parts of all rows.
//
// Pass: what sides.cuh asks for; OUTPUTS, tensors with a row for each step that is written
#pragma once
#include "kernels/recurrent/sides.cuh"

template <class Pass> struct SideStreams : Sides<Pass> {
  using Base = Sides<Pass>;
  using typename Base::Both, typename Base::Element, typename Base::Two;
  using Base::kOne, Base::kSize, Base::lane, Base::memory, Base::warp;
  DEVICE explicit SideStreams(const Params& p) : Base(p) {}

  // Where the first of two lies in a slot
  template <class S> DEVICE int stream_place(const Two& two) const {
    const int of_unit = S::BY_ROWS ? S::OWN : S::WHOLE;
    const int line = two.unit * of_unit + (S::BY_ROWS ? two.n : two.m);
    return line * S::STREAM_ROW + (S::BY_ROWS ? two.m : two.n);
  }
  template <class S> DEVICE Both take(u32 step, int stream, const Two& two) const {
    const u32 from = Base::stream_address(step, stream) + stream_place<S>(two) * kSize;
    Both both;
    if constexpr (kSize == 2)
      both.words[0] = S::BY_ROWS ? load_u16(from) | u32(load_u16(from + S::STREAM_ROW * kSize)) << 16 : load_u32(from);
    else
      UNROLL for (int i = 0; i < Both::kWords; ++i)
        both.words[i] = load_u32(from + (i / Both::kEach * (S::BY_ROWS ? S::STREAM_ROW : 1) * kSize + i % Both::kEach * 4));
    return both;
  }
  // All of a lane's numbers: of 16 bits, where tiles are whole, two streams' at once
  template <class S, int N> DEVICE void take_all(u32 step, Both (&x)[Pass::STREAMS][2][N]) const {
    constexpr int kTogether = kSize == 2 && S::kWholeM && S::kWholeN && kOne && S::STREAM_ROW % 8 == 0 ? 2 : 1;
    UNROLL for (int stream = 0; stream < Pass::STREAMS; stream += kTogether)
      UNROLL for (int n = 0; n < S::NT; ++n) {
        if constexpr (kTogether == 1) {
          UNROLL for (int h = 0; h < 2; ++h)
            if (const Two two = Base::template two<S>(h, n); two.there) x[stream][h][n] = take<S>(step, stream, two);
        } else {
          const int m = warp % S::M_TILES * 16 + lane.index / 8 % 2 * 8, own = (warp / S::M_TILES * S::NT + n) * 8;
          const int row = S::BY_ROWS ? own + lane.index % 8 : m + lane.index % 8, behind = S::BY_ROWS ? m : own;
          const u32 from = Base::stream_address(step, stream) + (row * S::STREAM_ROW + behind) * kSize;
          if (stream + 1 < Pass::STREAMS) {
            u32 four[4];
            load_matrices<S::BY_ROWS>(four, from + lane.index / 16 * Pass::kStreamBytes);
            UNROLL for (int i = 0; i < 4; ++i) x[stream + i / 2][i % 2][n].words[0] = four[i];
          } else {
            u32 two[2];
            load_matrices<S::BY_ROWS>(two, from);
            UNROLL for (int i = 0; i < 2; ++i) x[stream][i][n].words[0] = two[i];
          }
        }
      }
  }
  // What a thread moves of a step's rows, of some TENSORS: pieces of lines that lie together there. Where these are, but for the
  // row, stays in registers if they are few.
  template <class S, int TENSORS = Pass::STREAMS> struct Pieces {
    static constexpr int kLines = S::BY_ROWS ? S::OWN : S::WHOLE, kLine = S::BY_ROWS ? S::WHOLE : S::OWN;
    static constexpr int kStep = S::BY_ROWS ? S::WHOLE : S::OTHER;  // from a line to the next
    static constexpr int kFit = (kLine | kStep) * kSize, BYTES = kFit % 16 == 0 ? 16 : kFit % 8 == 0 ? 8 : 4;
    static constexpr int kOfLine = kLine * kSize / BYTES, kOfStream = kLines * kOfLine, kAll = TENSORS * kOfStream;
    static constexpr int kThreads = Pass::WARPS * 32, COUNT = ceil_div(kAll, kThreads);
    static constexpr bool kStay = COUNT <= 4, kThere = S::kWholeN && kAll % kThreads == 0;
    const void* from[kStay ? COUNT : 1];
    u32 to[kStay ? COUNT : 1];  // ~0: nothing
  };
  template <class S, int TENSORS>
  DEVICE void find(const Element* const (&tensors)[TENSORS], int i, const void*& from, u32& to) const {
    using P = Pieces<S, TENSORS>;
    const int j = threadIdx.x + i * P::kThreads, stream = j / P::kOfStream, line = j % P::kOfStream / P::kOfLine;
    const int piece = j % P::kOfLine * (P::BYTES / kSize);
    const bool there = P::kThere || (j < P::kAll && (S::OTHER % S::OWN == 0 || (S::BY_ROWS ? line : piece) < Base::template mine<S>()));
    to = there ? stream * Pass::kStreamBytes + (line * S::STREAM_ROW + piece) * kSize : ~0u;
    const Element* x = tensors[0];
    UNROLL for (int k = 1; k < TENSORS; ++k)
      if (stream == k) x = tensors[k];
    from = x + i64(Base::template first<S>()) * (S::BY_ROWS ? S::WHOLE : 1) + line * P::kStep + piece;
  }
  template <class S, int TENSORS>
  DEVICE void find_all(const Element* const (&tensors)[TENSORS], Pieces<S, TENSORS>& pieces) const {
    if constexpr (Pieces<S, TENSORS>::kStay) {
      UNROLL for (int i = 0; i < Pieces<S, TENSORS>::COUNT; ++i) {
        find<S>(tensors, i, pieces.from[i], pieces.to[i]);
        stay_here(pieces.from[i]);
      }
    }
  }
  // To a slot, from rows that begin `behind` elements behind the tensors' first ones
  template <class S>
  DEVICE void load(const Element* const (&inputs)[Pass::STREAMS], const Pieces<S>& pieces, u32 slot, i64 behind, int unit) const {
    using P = Pieces<S>;
    slot += unit * P::kLines * S::STREAM_ROW * kSize;
    UNROLL_BY(P::kStay ? P::COUNT : 2) for (int i = 0; i < P::COUNT; ++i) {
      const void* from;
      u32 to;
      if constexpr (P::kStay)
        from = pieces.from[i], to = pieces.to[i];
      else
        find<S>(inputs, i, from, to);
      if (P::kThere || to != ~0u) copy_async<P::BYTES>(slot + to, static_cast<const Element*>(from) + behind, true);
    }
  }
  // What leaves goes the same way back, of 16 bits where tiles and pieces are whole: matrices to where lines lie as they do in a
  // slot, and, behind the block's barrier, pieces of 16 bytes to a row of a tensor, which begins behind(tensor) elements behind its
  // first one. Each side has a place of its own: who writes the next step's does not wait for who reads this one's.
  template <class S> static constexpr bool kStaged = kSize == 2 && S::kWholeM && S::kWholeN && kOne &&
                                                     Pieces<S, Pass::OUTPUTS>::BYTES == 16 && Pieces<S, Pass::OUTPUTS>::kStay;
  template <class S> DEVICE void stage(int tensor, int n, const Both& upper, const Both& lower) const {
    const int m = warp % S::M_TILES * 16 + lane.index / 8 % 2 * 8, own = (warp / S::M_TILES * S::NT + n) * 8;
    const int row = S::BY_ROWS ? own + lane.index % 8 : m + lane.index % 8, behind = S::BY_ROWS ? m : own;
    const u32 words[2] = {upper.words[0], lower.words[0]};
    store_matrices<S::BY_ROWS>(memory + S::OUT_AT + tensor * Pass::kStreamBytes + (row * S::STREAM_ROW + behind) * kSize, words);
  }
  template <class S, class Behind> DEVICE void give_staged(const Pieces<S, Pass::OUTPUTS>& pieces, const Behind& behind) const {
    using P = Pieces<S, Pass::OUTPUTS>;
    UNROLL for (int i = 0; i < P::COUNT; ++i) {
      if (!P::kThere && pieces.to[i] == ~0u) continue;
      const int tensor = (threadIdx.x + i * P::kThreads) / P::kOfStream;
      Element* const to = static_cast<Element*>(const_cast<void*>(pieces.from[i])) + behind(tensor);
      store_words<16>(to, load_words<16>(memory + S::OUT_AT + pieces.to[i]));
    }
  }
  // Two numbers to a tensor's row
  template <class S> DEVICE static void give(Element* to, const Both& both) {
    if constexpr (!S::BY_ROWS)
      store_words<2 * kSize>(to, reinterpret_cast<const Words<2 * kSize>&>(both));
    else
      UNROLL for (int i = 0; i < 2; ++i) store_global(to + i * Base::template kApart<S>, narrow<Element>(both.of(i)));
  }
};
