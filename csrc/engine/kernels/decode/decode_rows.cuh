// Rows of a weight times a few vectors, as a decoder's step has them. TEAM neighbouring lanes have a row, or some, pieces of 16 bytes
// in turn, which are on their way to registers before anybody waits for the vectors in shared memory. Sums are added in one order.
#pragma once
#include "move/memory.cuh"
#include "types/params.cuh"

// 16 bytes of a row, by accesses of LOAD. Elements of 2 bytes that come one by one have a register each.
template <class Element, int LOAD> struct RowPiece {
  static constexpr int kSize = sizeof(Element), kNumbers = 16 / kSize, kEach = LOAD / kSize;
  u32 of[16 / LOAD][LOAD < 4 ? 1 : LOAD / 4];
  // `left` are there from `from` on, none if that is not positive.
  DEVICE void ask(const Element* from, int left) {
    UNROLL for (int i = 0; i < 16 / LOAD; ++i) load_global<LOAD>(from + i * kEach, of[i], i * kEach < left);
  }
  DEVICE Sum<Element> number(int i) const {
    return LOAD < 4 ? number_of<Element>(of[i], 0) : number_of<Element>(&of[0][0], i);
  }
};

// A lane's part of ROWS rows of COUNT elements, AT_ONCE pieces of each at once. A piece of a vector is read once for all of them.
template <class Element, int COUNT, int LOAD, int TEAM, int ROWS, int AT_ONCE> struct TeamRows {
  using Real = Sum<Element>;
  static constexpr int kSize = sizeof(Element), kNumbers = 16 / kSize, kPieces = ceil_div(COUNT, TEAM * kNumbers);
  static constexpr int kAtOnce = kPieces < AT_ONCE ? kPieces : AT_ONCE, kRounds = ceil_div(kPieces, kAtOnce);
  static constexpr int kVector = kRounds * kAtOnce * TEAM * kNumbers;  // elements of a vector, zeros behind COUNT
  const int lane;
  RowPiece<Element, LOAD> pieces[ROWS][kAtOnce];
  DEVICE explicit TeamRows(int lane) : lane(lane) {}

  DEVICE int place(int round, int i) const { return ((round * kAtOnce + i) * TEAM + lane) * kNumbers; }
  // rows(r) is where one begins, null where there is none, whose numbers are zero.
  template <class Rows> DEVICE void fetch(const Rows& rows) {
    UNROLL for (int r = 0; r < ROWS; ++r) {
      const Element* const row = rows(r);
      UNROLL for (int i = 0; i < kAtOnce; ++i) pieces[r][i].ask(row + place(0, i), row ? COUNT - place(0, i) : 0);
    }
  }
  // This lane's part of products with SAMPLES vectors is added to sums. MORE: behind it `next` rows are on their way.
  template <bool MORE, int SAMPLES, class Rows, class Next>
  DEVICE void multiply(const Rows& rows, const Next& next, u32 vectors, Real (&sums)[ROWS][SAMPLES]) {
    ROLL for (int round = 0; round < kRounds; ++round) {
      const bool last = round + 1 == kRounds;
      UNROLL for (int i = 0; i < kAtOnce; ++i) {
        Real weight[ROWS][kNumbers];
        UNROLL for (int r = 0; r < ROWS; ++r) {
          UNROLL for (int j = 0; j < kNumbers; ++j) weight[r][j] = pieces[r][i].number(j);
          if constexpr (MORE || kRounds > 1) {
            const Element* const row = last ? next(r) : rows(r);
            const int at = place(last ? 0 : round + 1, i);
            pieces[r][i].ask(row + at, row ? COUNT - at : 0);
          }
        }
        UNROLL for (int s = 0; s < SAMPLES; ++s) {
          RowPiece<Element, 16> x;
          load_u32x4(vectors + (s * kVector + place(round, i)) * kSize, x.of[0]);
          UNROLL for (int r = 0; r < ROWS; ++r)
            UNROLL for (int j = 0; j < kNumbers; ++j) sums[r][s] += weight[r][j] * x.number(j);
        }
      }
    }
  }
};

// Sums of SAMPLES samples, of which each lane of a team has a part: at every step lanes hand on half of theirs, so that at the end each
// has kOwn samples, or, of few, kSharing lanes the same one.
template <int TEAM, int SAMPLES> struct TeamSums {
  static constexpr int kOwn = SAMPLES < TEAM ? 1 : SAMPLES / TEAM, kSharing = SAMPLES < TEAM ? TEAM / SAMPLES : 1;
  static DEVICE int sample(int lane, int i) { return lane / kSharing * kOwn + i; }
  static DEVICE bool owns(int lane) { return lane % kSharing == 0; }
  template <int BY = TEAM / 2, int COUNT = SAMPLES, class Real> static DEVICE void add_up(int lane, Real (&sums)[SAMPLES]) {
    if constexpr (BY > 0) {
      constexpr int kHalf = COUNT > 1 ? COUNT / 2 : 1;
      UNROLL for (int i = 0; i < kHalf; ++i) {
        if constexpr (COUNT > 1) {
          const Real first = sums[i], second = sums[i + kHalf];
          const bool has_second = lane & BY;
          sums[i] = (has_second ? second : first) + of_lane(has_second ? first : second, BY);
        } else {
          sums[i] += of_lane(sums[i], BY);
        }
      }
      add_up<BY / 2, kHalf>(lane, sums);
    }
  }
};

// SAMPLES vectors to shared memory, by accesses of LOAD bytes: from(sample, column) is where one reads, null where zeros are. Kernels
// before may have made them that had not ended when this one began.
template <class Element, int SAMPLES, int VECTOR, int THREADS, int LOAD, class From> DEVICE void bring_vectors(u32 to, const From& from) {
  constexpr int kEach = LOAD / int(sizeof(Element)), kOfOne = VECTOR / kEach, kAll = SAMPLES * kOfOne;
  struct Access { u32 words[LOAD < 4 ? 1 : LOAD / 4]; };
  move_together<kAll, THREADS, (kAll <= 2 * THREADS ? 2 : 8)>(
      [&](int j) {
        Access access;
        const Element* const at = j < kAll ? from(j / kOfOne, j % kOfOne * kEach) : nullptr;
        load_made<LOAD>(at, access.words, at != nullptr);
        return access;
      },
      [&](int j, const Access& access) {
        if (j >= kAll) return;
        if constexpr (LOAD == 16)
          store_u32x4(to + j * LOAD, access.words);
        else if constexpr (LOAD == 2)
          store_shared(to + j * LOAD, u16(access.words[0]));
        else {
          UNROLL for (int i = 0; i < LOAD / 4; ++i) store_shared(to + j * LOAD + i * 4, access.words[i]);
        }
      });
}
template <class Element> DEVICE Element load_element(u32 from) {
  if constexpr (sizeof(Element) == 2)
    return {load_u16(from)};
  else
    return load_sum(from, Element());
}

// Where a decoder's tensors are among the weights: csrc/ops/decode.cpp puts them there.
enum DecoderTensor { kEmbedding, kEmbeddingRows, kContext, kState, kHead, kHeadBias, kTemperature, kLayers };
template <class T> DEVICE const T* decoder_tensor(const Params& params, int i) { return static_cast<const T*>(params.weights[i]); }
