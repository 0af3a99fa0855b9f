// Parts of a tile of samples, between memory and shared memory, without a division for each access: a thread has the same place
// in the runs that it takes, and the steps from one of these to the next are constants.
#pragma once
#include "move/packed.cuh"

// Runs of RUN elements, PIECE at once by a thread, COUNT of them for each of SAMPLES: those of some samples at a time, or equal
// parts of a sample's. From a sample's to the next one's, and from a run to the next, elements lie FROM_SAMPLE and FROM_RUN apart
// in memory, TO_SAMPLE and TO_RUN in shared memory.
template <int THREADS, int SAMPLES, int COUNT, int RUN, int PIECE, int FROM_SAMPLE, int FROM_RUN, int TO_SAMPLE, int TO_RUN>
struct MonarchRuns {
  static constexpr int kPieces = RUN / PIECE, kRounds = ceil_div(kPieces, THREADS), kFit = kRounds > 1 ? 1 : THREADS / kPieces;
  static constexpr int kSome = kFit / COUNT, kSamples = kSome < 1 ? 1 : kSome < SAMPLES ? kSome : SAMPLES;
  static constexpr int kTurns = ceil_div(COUNT, kFit), kAtOnce = ceil_div(COUNT, kTurns), kEach = kTurns * kRounds;
  static constexpr int kSteps = ceil_div(SAMPLES, kSamples);
  static_assert(RUN % PIECE == 0);
  struct Place { int sample, run, element, to, from; };

  // what(place, x), of all that a thread has of samples before `end`: first one for some of them, then the next one for the same
  template <class X, int TOGETHER, class... What> static DEVICE void each(int end, const What&... what) {
    constexpr int kPart = kEach < TOGETHER ? kEach : TOGETHER, kBatch = TOGETHER / kPart;
    const int line = kRounds > 1 ? 0 : threadIdx.x / kPieces, sample = line / kAtOnce, run = line % kAtOnce;
    const int element = (kRounds > 1 ? threadIdx.x : threadIdx.x % kPieces) * PIECE;
    if (sample >= kSamples) return;
    const int to = sample * TO_SAMPLE + run * TO_RUN, from = sample * FROM_SAMPLE + run * FROM_RUN + element;
    ROLL for (int step = 0; step < kSteps; step += kBatch)
      ROLL for (int first = 0; first < kEach; first += kPart) {
        X taken[kBatch][kPart];
        const auto go = [&](const auto& what) {
          UNROLL for (int b = 0; b < kBatch; ++b)
            UNROLL for (int i = 0; i < kPart; ++i) {
              const int turn = (first + i) / kRounds, behind = (first + i) % kRounds * (THREADS * PIECE), later = (step + b) * kSamples;
              const Place at = {sample + later, run + turn * kAtOnce, element + behind,
                                to + later * TO_SAMPLE + turn * (kAtOnce * TO_RUN),
                                from + later * FROM_SAMPLE + turn * (kAtOnce * FROM_RUN) + behind};
              if (at.sample < end && (COUNT % kAtOnce == 0 && kEach % kPart == 0 || at.run < COUNT) && (kRounds == 1 || at.element < RUN))
                what(at, taken[b][i]);
            }
        };
        (go(what), ...);
      }
  }
};

// Some groups of a tensor, to shared memory: [SAMPLES][SOME][PADDED], rows of STRIDE elements. In memory a sample has ALL groups of
// P numbers: one group after the other, or, where numbers are STEP > 1 apart, side by side. What is not there is zero; padding is
// left as it is. LOAD: bytes of an access; 2 go through registers, eight numbers of a group at once.
template <class Element, int THREADS, int SAMPLES, int ALL, int P, int SOME, i64 STEP, int PADDED, int STRIDE, int LOAD>
struct MonarchRows {
  static constexpr bool kAlong = STEP == 1, kEights = kAlong && LOAD == 2;
  static constexpr int kSize = sizeof(Element), kPiece = kEights ? 8 : LOAD / kSize;
  using Runs = MonarchRuns<THREADS, SAMPLES, kAlong ? SOME : P, kAlong ? round_up(P, kPiece) : SOME, kPiece, ALL * P,
                           kAlong ? P : int(STEP), STRIDE, kAlong ? PADDED : 1>;

  // Of samples and groups from these on
  static DEVICE void load(const Element* x, i64 sample, i64 batch, int group, u32 to) {
    const int left = batch - sample < SAMPLES ? int(batch - sample) : SAMPLES;
    const Element* first = x + sample * (i64(ALL) * P) + i64(group) * (kAlong ? P : 1);
    const Element* end = x + batch * (i64(ALL) * P);
    const auto has = [&](const auto& at) {
      return at.sample < left && (ALL % SOME == 0 || group + (kAlong ? at.run : at.element) < ALL);
    };
    const auto place = [&](const auto& at) { return to + (at.to + at.element * (kAlong ? 1 : PADDED)) * kSize; };
    if constexpr (LOAD >= 4)
      Runs::template each<int, 4>(SAMPLES, [&](const auto& at, int&) {
        const bool here = has(at);
        copy_async<LOAD>(place(at), here ? first + at.from : x, here);
      });
    else if constexpr (kEights) {
      const auto there = [&](const auto& at) { return has(at) ? P - at.element : 0; };
      Runs::template each<Eight, 4>(
          SAMPLES, [&](const auto& at, Eight& x) { x.load(first + at.from, end, there(at)); },
          [&](const auto& at, Eight& x) { x.put(place(at), first + at.from, there(at)); });
    } else
      Runs::template each<Element, 16>(
          SAMPLES, [&](const auto& at, Element& x) { x = has(at) ? first[at.from] : Element{}; },
          [&](const auto& at, Element& x) { store_shared(place(at), x); });
  }
};
