// Tiles of units between memory, where Regions say how they lie, and shared memory, where Layouts do: by the threads of a group,
// in pieces of 16 bytes or less. Units beyond the last one, and what is missing of a slice's last
// chunk, come as zeros, and are not stored.
//
// Pass: Element; WARPS, GROUPS, UNITS of a tile, UNITS_PER_SAMPLE
#pragma once
#include "move/memory.cuh"
#include "move/several.cuh"
#include "types/layout.cuh"
#include "types/params.cuh"

template <class Pass> struct Tiles {
  using Element = typename Pass::Element;
  static constexpr int kSize = sizeof(Element), kThreads = Pass::WARPS * 32, kBlock = kThreads * Pass::GROUPS;
  const int group, thread;  // thread within the group
  const i64 units;
  DEVICE explicit Tiles(const Params& params)
      : group(threadIdx.x / kThreads), thread(threadIdx.x % kThreads), units(params.batch * Pass::UNITS_PER_SAMPLE) {}

  // Units of a tile that are there
  DEVICE int present(i64 first) const { return units - first < Pass::UNITS ? int(units - first) : Pass::UNITS; }

  // How a group's threads go through a tile: all of its units, where they lie together in memory, or some of them at once, THREADS
  // each. R: where units lie in memory, L: in shared memory, BYTES of one access.
  template <class R, class L, int BYTES> struct Moved {
    static constexpr int kCount = R::kDense ? Pass::UNITS * R::kSize : R::kSize, kPieces = kCount * kSize / BYTES;
    static constexpr int kFit = R::kDense || kPieces >= kThreads ? 1 : kThreads / kPieces;
    static constexpr int kAtOnce = kFit < Pass::UNITS ? kFit : Pass::UNITS, THREADS = kThreads / kAtOnce;
    using Walk = Lines<L, kCount, R::template kRun<L>, R::template kLineStep<L>, BYTES / kSize, THREADS>;
  };
  // of(where such a part begins in memory, its first element in the tile, whether an element of it is there); of each unit its
  // first `limit` elements, where it may reach behind what it is a part of.
  template <class R, class M, class Of> DEVICE void parts_of(i64 first, Of of, int limit = R::kSize) const {
    const auto part = [&](i64 begin, int there, int width, int element) {
      if constexpr (!R::kDense) there = min(there, limit);
      if (there == M::kCount && width == R::C)
        of(begin, element, [](int) { return true; });
      else
        of(begin, element, [&](int e) { return e < there && (R::WIDTH == 0 || e % R::C < width); });
    };
    if constexpr (R::kDense) return part(R::unit(first), present(first) * R::kSize, R::C, 0);
    const int present = this->present(first), chunk = R::chunk(first);
    const i64 slice = R::from(first);
    ROLL for (int unit = thread / M::THREADS; unit < Pass::UNITS; unit += M::kAtOnce) {
      if (M::kAtOnce * M::THREADS < kThreads && thread >= M::kAtOnce * M::THREADS) break;
      const int here = chunk + unit, column = here % R::CHUNKS * R::C;
      part(slice + here / R::CHUNKS * R::SLICE + column, unit < present ? R::kSize : 0,
           R::WIDTH > 0 ? min(R::C, R::WIDTH - column) : R::C, unit * R::kSize);
    }
  }

  // x, and y below: a pointer, or Several.
  template <class R, class L, int COPY, class X> DEVICE void load_pieces(const X& x, i64 first, u32 to) const {
    using M = Moved<R, L, COPY>;
    const typename M::Walk lines(thread % M::THREADS);
    parts_of<R, M>(first, [&](i64 begin, int element, auto here) {
      const auto from = x + begin;
      if constexpr (COPY >= 4)
        lines.template each<8>(
            element, [](int, i64, int) { return 0; },
            [&](int place, i64 offset, int e, int) { copy_async<COPY>(to + place * kSize, at_or_begin(from, offset, here(e)), here(e)); });
      else
        lines.template each<16>(
            element, [&](int, i64 offset, int e) { return here(e) ? *(from + offset) : Element{}; },
            [&](int place, i64, int, Element x) { store_shared(to + place * kSize, x); });
    });
  }
  template <class R, class L, int STORE, class Y>
  DEVICE void store_pieces(i64 first, u32 from, const Y& y, int limit = R::kSize) const {
    using M = Moved<R, L, STORE>;
    const typename M::Walk lines(thread % M::THREADS);
    parts_of<R, M>(
        first,
        [&](i64 begin, int element, auto here) {
          const auto to = y + begin;
          lines.template each<STORE < 4 ? 16 : 8>(
              element, [&](int place, i64, int) { return load_words<STORE>(from + place * kSize); },
              [&](int, i64 offset, int e, const Words<STORE>& word) {
                if (here(e)) store_words<STORE>(to + offset, word);
              });
        },
        limit);
  }

  // What is too small to be copied, to shared memory: the loads of several are on their way together.
  template <int COUNT, int STEP, class Value, class At> static DEVICE void by_registers(int begin, Value value, At at) {
    constexpr int kRounds = ceil_div(COUNT, STEP), kAtOnce = kRounds < 16 ? kRounds : 16;
    ROLL for (int j = begin; j < COUNT; j += STEP * kAtOnce) {
      Element some[kAtOnce];
      UNROLL for (int i = 0; i < kAtOnce; ++i)
        if (j + i * STEP < COUNT) some[i] = value(j + i * STEP);
      UNROLL for (int i = 0; i < kAtOnce; ++i)
        if (j + i * STEP < COUNT) store_shared(at(j + i * STEP), some[i]);
    }
  }
};
