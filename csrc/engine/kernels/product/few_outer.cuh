// Weights' gradients of few samples: dW[q, p] = sum_n G[q, n] X[p, n], of states with samples side by side. The p's of a lane's
// piece of a row are columns of as many tiles, so that four lanes store 64 bytes of it.
#pragma once
#include "finish/totals.cuh"
#include "kernels/product/few_words.cuh"

// Gradients of the weights of all groups, from states that have `samples` side by side, a multiple of 8 of them: G
// [group][Q][samples] and X [group][P][samples]. SHARE warps have tiles of HEIGHT times 16 rows and STRIPS * kChunk columns
// together, and every SHARE-th chunk of samples each: they add up in shared memory. Tiles are stored by runs of RUN: where
// these are short, by way of shared memory, so that lanes side by side store whole sectors. AHEAD: one chunk of samples is
// multiplied while the next one is on its way; without, registers go to more warps instead.
template <class Math, int P, int Q, int HEIGHT, int STRIPS, int RUN, bool AHEAD, int SHARE>
struct FewOuter : FewMath<Math> {
  using Base = FewMath<Math>;
  using Element = typename Base::Element;
  static constexpr int kPiece = Base::kPiece, kChunk = Base::kChunk, kSize = Base::kSize, kEights = kPiece / 2;
  static constexpr int kRows = HEIGHT * 16, kColumns = STRIPS * kChunk;
  static constexpr int kAcross = ceil_div(P, kColumns), kDown = ceil_div(Q, kRows);
  static constexpr int kRow = kColumns * kSize + 64, kStaged = kRows * kRow;  // bytes in shared memory
  using Totals = WarpTotals<typename Base::Total, kRows, kColumns, SHARE, true, kPiece>;
  using Piece = FewPiece<Math, 16>;
  const Lane lane;
  const int warp, way;  // of those that share a tile
  const u32 memory;     // of this warp, or of these
  const int samples;
  const Element *rows, *columns;
  int q, p;
  struct Chunk { Piece g[HEIGHT * 2], x[STRIPS][kEights]; };  // of samples
  Chunk chunks[AHEAD ? 2 : 1];
  DEVICE FewOuter(u32 memory, int samples)
      : warp(threadIdx.x / 32), way(warp % SHARE), memory(memory + warp / SHARE * (SHARE > 1 ? Totals::kBytes : kStaged)),
        samples(samples) {}
  // Of tile eights j a lane has columns of its own.
  DEVICE int column() const { return lane.g / 2 * kPiece + lane.g % 2; }
  DEVICE void to_tile(const Element* g, const Element* x, int tile) {
    const int group = tile / (kAcross * kDown);
    q = tile % kDown * kRows, p = tile / kDown % kAcross * kColumns;
    rows = g + (i64(group) * Q + q + lane.g) * samples + lane.t * kPiece;
    columns = x + (i64(group) * P + p + column()) * samples + lane.t * kPiece;
  }
  DEVICE void ask(Chunk& chunk, int n) {
    const int left = samples - n - lane.t * kPiece, down = Q - q - lane.g, across = P - p - column();
    const auto ask = [&](Piece& piece, const Element* from, bool here) {
      if (n + kChunk <= samples)
        piece.template ask_some<true>(from, here ? kPiece : 0);
      else
        piece.template ask<true>(from, here ? left : 0);
    };
    UNROLL for (int h = 0; h < HEIGHT * 2; ++h) ask(chunk.g[h], rows + (h * 8 * samples + n), h * 8 < down);
    UNROLL for (int strip = 0; strip < STRIPS; ++strip)
      UNROLL for (int j = 0; j < kEights; ++j) {
        const int at = strip * kChunk + j * 2;
        ask(chunk.x[strip][j], columns + (at * samples + n), at < across);
      }
  }
  using Sums = typename Base::Sums[HEIGHT][STRIPS][kEights];
  static DEVICE void multiply(Sums& y, const Chunk& chunk) {
    typename Base::A a[HEIGHT][Base::kSteps];
    UNROLL for (int h = 0; h < HEIGHT; ++h)
      UNROLL for (int s = 0; s < Base::kSteps; ++s) {
        const auto &u = chunk.g[h * 2], &l = chunk.g[h * 2 + 1];
        a[h][s] = Base::left(u.word(s * 2), l.word(s * 2), u.word(s * 2 + 1), l.word(s * 2 + 1));
      }
    UNROLL for (int strip = 0; strip < STRIPS; ++strip)
      UNROLL for (int j = 0; j < kEights; ++j) {
        typename Base::B b[Base::kSteps];
        UNROLL for (int s = 0; s < Base::kSteps; ++s)
          b[s] = Base::right(chunk.x[strip][j].word(s * 2), chunk.x[strip][j].word(s * 2 + 1));
        UNROLL for (int h = 0; h < HEIGHT; ++h) Base::multiply(y[h][strip][j], a[h], b);
      }
  }
  // The tile of rows from q_ and columns from p_ on, of the group's gradient
  DEVICE void store(Element* to, const Sums& y, int q_, int p_) const {
    UNROLL for (int strip = 0; strip < STRIPS; ++strip)
      UNROLL for (int h = 0; h < HEIGHT * 2; ++h) {
        const int row = h * 8 + lane.g, at = strip * kChunk + lane.t * kPiece;
        typename Base::Total sums[kPiece];
        UNROLL for (int i = 0; i < kPiece; ++i) sums[i] = Base::total(y[h / 2][strip][i / 2], h % 2 * 2 + i % 2);
        if constexpr (RUN * kSize == 16)
          store_runs<RUN>(to + i64(q_ + row) * P + p_ + at, sums, q_ + row < Q ? P - p_ - at : 0);
        else
          store_shared_run<Element>(memory + row * kRow + at * kSize, sums);
      }
    if constexpr (RUN * kSize < 16) {
      constexpr int kRuns = kColumns / RUN;
      using Run = Words<RUN * kSize>;
      __syncwarp();
      ROLL for (int from = 0; from < kRows * kRuns; from += 32 * 8) {
        Run run[8];
        UNROLL for (int i = 0; i < 8; ++i) {
          const int cell = from + i * 32 + lane.index;
          run[i] = load_words<RUN * kSize>(memory + cell / kRuns * kRow + cell % kRuns * (RUN * kSize));
        }
        UNROLL for (int i = 0; i < 8; ++i) {
          const int cell = from + i * 32 + lane.index, row = q_ + cell / kRuns, column = p_ + cell % kRuns * RUN;
          if (row < Q && column < P) store_words<RUN * kSize>(to + i64(row) * P + column, run[i]);
        }
      }
      __syncwarp();
    }
  }
  // Its part of the sums, to where those who share the tile add them up
  DEVICE void put(const Sums& y) const {
    UNROLL for (int strip = 0; strip < STRIPS; ++strip)
      UNROLL for (int h = 0; h < HEIGHT * 2; ++h) {
        typename Base::Total sums[kPiece];
        UNROLL for (int i = 0; i < kPiece; ++i) sums[i] = Base::total(y[h / 2][strip][i / 2], h % 2 * 2 + i % 2);
        Totals{memory}.put(way, h * 8 + lane.g, strip * kChunk + lane.t * kPiece, sums);
      }
  }
  DEVICE void store_all(Element* to, int q_, int p_) const {
    constexpr int kRuns = kColumns / RUN;
    ROLL for (int cell = way * 32 + lane.index; cell < kRows * kRuns; cell += SHARE * 32) {
      const int row = cell / kRuns, column = cell % kRuns * RUN;
      typename Base::Total sums[RUN];
      Totals{memory}.sum(row, column, sums);
      if (q_ + row < Q && p_ + column < P) store_run(to + i64(q_ + row) * P + p_ + column, sums);
    }
  }
  // Every `stride`-th tile from `tile` on, of which a block's warps have some side by side; what the next one reads is on its way
  // while this one's sums are stored.
  template <bool MORE> DEVICE void run(Element* to, const Element* g, const Element* x, int groups, int tile, int stride) {
    constexpr int kStep = (AHEAD ? 2 : 1) * SHARE * kChunk, kSecond = SHARE * kChunk;
    const int all = groups * kAcross * kDown, begin = way * kChunk;
    const int side = warp / SHARE, most = SHARE > 1 ? all + side : all;  // who shares comes to barriers without a tile as well
    tile += side;
    if (tile < all) {
      to_tile(g, x, tile);
      ask(chunks[0], begin);
    } else if (SHARE == 1) {
      return;
    }
    ROLL while (tile < most) {
      Sums y;
      const bool here = SHARE == 1 || tile < all;
      const int of_q = q, of_p = p, next = MORE ? tile + stride : most;
      // Of a tile a chunk at least, of zeros where there is none
      ROLL for (int n = begin; here && (n < samples || (SHARE > 1 && n == begin)); n += kStep) {
        const bool two = AHEAD && n + kSecond < samples;
        if (two) ask(chunks[AHEAD], n + kSecond);
        multiply(y, chunks[0]);
        if (n + kStep < samples) {
          ask(chunks[0], n + kStep);
        } else if (next < all) {
          to_tile(g, x, next);
          ask(chunks[0], begin);
        }
        if (two) multiply(y, chunks[AHEAD]);
      }
      Element* const of_group = to + i64(tile / (kAcross * kDown)) * Q * P;
      if constexpr (SHARE == 1) {
        store(of_group, y, of_q, of_p);
      } else {
        put(y);
        __syncthreads();
        if (here) store_all(of_group, of_q, of_p);
        if constexpr (MORE) __syncthreads();
      }
      tile = next;
    }
  }
};
