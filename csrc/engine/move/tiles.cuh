// Tiles of units between memory, where Regions say how they lie, and shared memory, where Layouts do: by the threads of a group,
// in pieces of 16 bytes or less. Units beyond the last one, and what is missing of a slice's last
// chunk, come as zeros, and are not stored.
//
// Pass: Element; WARPS, GROUPS, UNITS of a tile, UNITS_PER_SAMPLE
#pragma once
#include "move/memory.cuh"
#include "move/packed.cuh"
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
    static constexpr int kCount = R::kDense ? Pass::UNITS * R::kSize : R::kSize, kRun = R::template kRun<L>;
    static constexpr int kPieces = kCount / kRun * ceil_div(kRun * kSize, BYTES);
    static constexpr int kFit = R::kDense || kPieces >= kThreads ? 1 : kThreads / kPieces;
    static constexpr int kAtOnce = kFit < Pass::UNITS ? kFit : Pass::UNITS, THREADS = kThreads / kAtOnce;
    using Walk = Lines<L, kCount, kRun, R::template kLineStep<L>, BYTES / kSize, THREADS>;
  };
  // How many elements of a part are there from one on: All, as the compiler knows, or Some.
  template <int COUNT> struct All {
    static constexpr bool kAll = true;
    DEVICE int operator()(int) const { return COUNT; }
  };
  template <class R> struct Some {
    static constexpr bool kAll = false;
    const int there, width;
    DEVICE int operator()(int e) const { return R::WIDTH == 0 ? there - e : min(there - e, width - e % R::C); }
  };
  static constexpr i64 kNoEnd = i64(1) << 62;
  // of(where such a part begins in memory, its first element in the tile, how many are there from an element on); of each unit its
  // first `limit` elements, where it may reach behind what it is a part of. All are of parts that begin before `end`.
  template <class R, class M, class Of> DEVICE void parts_of(i64 first, Of of, int limit = R::kSize, i64 end = kNoEnd) const {
    const auto part = [&](i64 begin, int there, int width, int element) {
      if constexpr (!R::kDense) there = min(there, limit);
      if (there == M::kCount && width == R::C && begin < end)
        of(begin, element, All<M::kCount>{});
      else
        of(begin, element, Some<R>{there, width});
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

  // x, and y below: a pointer, or Several. Of elements that only 2 bytes divide, eight of a line come at once, by registers, with
  // zeros up to the next multiple of eight if lines may be PADDED and are whole rows of the layout.
  template <class R, class L, int COPY, bool PADDED = true, class X> DEVICE void load_pieces(const X& x, i64 first, u32 to) const {
    constexpr bool kByRegisters = COPY < 4, kEights = kByRegisters && PADDED && is_pointer<X> && R::template kWholeRows<L>;
    using M = Moved<R, L, kEights ? 16 : COPY>;
    const typename M::Walk lines(thread % M::THREADS);
    // Of the tensor, and of a part with what an Eight may reach behind it.
    const i64 elements = (units / R::CHUNKS - 1) * R::SLICE + R::kExtent;
    constexpr i64 kReach = (R::kDense ? i64(M::kCount) : (R::ROWS - 1) * R::STEP + R::C) + 10;
    const auto move = [&](i64 begin, int element, auto there) {
      const auto from = x + begin;
      if constexpr (!kByRegisters) {
        lines.template each<4>(
            element, [](int, i64, int, int) { return 0; },
            [&](int place, i64 offset, int e, int, int) {
              copy_async<COPY>(to + place * kSize, at_or_begin(from, offset, there(e) > 0), there(e) > 0);
            });
      } else if constexpr (kEights) {
        static_assert(L::ROW % 8 == 0 && (L::I == 1 || L::STEP % 8 == 0), "lines begin at whole 16 bytes");
        lines.template each<4>(
            element,
            [&](int, i64 offset, int e, int left) {
              Eight eight;
              if constexpr (decltype(there)::kAll)
                eight.load(from + offset);
              else
                eight.load(from + offset, x + elements, min(left, there(e)));
              return eight;
            },
            [&](int place, i64 offset, int e, int left, const Eight& eight) {
              eight.put(to + place * kSize, from + offset, decltype(there)::kAll ? left : min(left, there(e)));
            });
      } else {
        lines.template each<16>(
            element, [&](int, i64 offset, int e, int) { return there(e) > 0 ? *(from + offset) : Element{}; },
            [&](int place, i64, int, int, Element x) { store_shared(to + place * kSize, x); });
      }
    };
    parts_of<R, M>(first, move, R::kSize, kEights ? elements - kReach : kNoEnd);
  }
  // Asks L2 for a tile, if there is one, whose loads will be waited for: of elements of 2 bytes, few are on their way at once.
  template <class R> DEVICE void fetch(const Element* x, i64 first) const {
    constexpr int kLine = 128 / kSize, kRows = R::kSize / R::C;
    constexpr int kEach = R::WIDTH > 0 ? 1 : R::C / kLine + 1;  // a last chunk may have no more
    const int count = first < units ? present(first) * kRows * kEach : 0;
    ROLL for (int j = thread; j < count; j += kThreads)
      prefetch(x + R::unit(first + j / (kRows * kEach)) + R::at(j / kEach % kRows * R::C) + min(j % kEach * kLine, R::C - 1));
  }
  template <class R, class L, int STORE, class Y>
  DEVICE void store_pieces(i64 first, u32 from, const Y& y, int limit = R::kSize) const {
    using M = Moved<R, L, STORE>;
    const typename M::Walk lines(thread % M::THREADS);
    parts_of<R, M>(
        first,
        [&](i64 begin, int element, auto there) {
          const auto to = y + begin;
          lines.template each<STORE < 4 ? 16 : 8>(
              element, [&](int place, i64, int, int) { return load_words<STORE>(from + place * kSize); },
              [&](int, i64 offset, int e, int, const Words<STORE>& word) {
                if (there(e) > 0) store_words<STORE>(to + offset, word);
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
