// What is the same, forward and back, of a gated recurrent unit with a dense recurrent matrix and many sequences, on Hopper's matrix
// unit: along y of the grid each block has OWN features of the state and their rows of the matrix, of all gates, in shared memory, as
// spread.cuh's blocks have. All blocks are on the GPU at once. Each of a block's WARPGROUPS takes groups of 64 sequences, one after the
// other, through all of their steps.
//
//     a warp:        all blocks have handed on? ─> slabs of the group's states, by the copy engine ─> a ring of shared memory
//     a warpgroup:   states [64, HIDDEN] x own rows of the matrix ─> sums ─> gates ─> own features of the new states, handed on
//
// What is handed on (HANDED states of a sequence at once) lies in params.sums as the matrix unit reads it, slab behind slab, in two places
// in turn: who hands on for the second time has seen that all have handed on for the first time, and so are through with what lay
// there before. A counter says how often blocks have handed on; counters are zero before the kernel.
//
// Rows of the matrix are in such an order that what a thread sums of a sequence are runs of neighbouring features: by accesses of 4
// bytes, of 8 sequences at once, a step back took nearly twice as long.
//
// Pass: Element, Math; HIDDEN, OWN, PARTS (blocks along y), HANDED; SUMMED, gates whose sums stay apart; TURNED, whether weights are
//       turned; WARPGROUPS, SLOTS (of a warpgroup's ring), MORE and FEWER (registers of who multiplies and who brings); kWalk
//       (recurrent_rows.cuh), DOWN; kSlotsAt, kRowsAt, kBarriersAt in shared memory; kStatesAt in params.sums
#pragma once
#include "kernels/recurrent/recurrent_rows.cuh"
#include "move/ring.cuh"
#include "multiply/mma.cuh"
#include "multiply/wgmma.cuh"

template <class Pass> struct Many {
  using Element = typename Pass::Element;
  using Math = typename Pass::Math;
  static constexpr int OWN = Pass::OWN, HIDDEN = Pass::HIDDEN, HANDED = Pass::HANDED, N = Pass::SUMMED * OWN;
  static constexpr int kSize = sizeof(Element), kRows = 64, kSlab = kRows * 128, kWide = 128 / kSize;  // elements of a slab's row
  static constexpr int kSlabs = ceil_div(HIDDEN, kWide), kLastSteps = ceil_div((HIDDEN - (kSlabs - 1) * kWide) * kSize, 32);
  static constexpr int kConsumers = 128 * Pass::WARPGROUPS, kThreads = kConsumers + 128;
  static constexpr int kCodes = 4;   // steps whose rows are known
  static constexpr int kHalves = 2;  // a thread's sequences
  // Tiles of products that a run of a thread's features comes from, the features of a run, and a thread's runs of a sequence
  static constexpr int kTiles = kSize == 2 && OWN % 32 == 0 ? 4 : 2, kRun = 2 * kTiles, kRuns = OWN / (4 * kRun);
  using Slots = Ring<Pass::SLOTS, kSlab>;
  using Cursor = typename Slots::Cursor;
  using Known = Barriers<kCodes>;

  const Params& params;
  const u32 shared;
  const int part;  // the first of the block's features
  const Walk walk;

  DEVICE explicit Many(const Params& p)
      : params(p), shared(shared_address(shared_memory) + 1023 & ~1023u), part(blockIdx.y * OWN), walk(p, Pass::kWalk) {}

  DEVICE static int warpgroup() { return uniform(threadIdx.x / 128); }
  DEVICE Slots ring(int warpgroup) const {
    return {shared + Pass::kSlotsAt + warpgroup * (Pass::SLOTS * kSlab), shared + Pass::kBarriersAt + warpgroup * Slots::kBarrierBytes};
  }
  // Where rows lie, of steps one behind another of all groups of a warpgroup: by their numbers, and whether they are known. A group
  // has one more than it has steps.
  DEVICE Rows<kRows, kCodes> rows(int warpgroup) const { return {shared + Pass::kRowsAt + warpgroup * (kRows * kCodes * 8)}; }
  DEVICE Known known(int warpgroup) const {
    return Known(shared + Pass::kBarriersAt + Pass::WARPGROUPS * Slots::kBarrierBytes + warpgroup * Known::kBarrierBytes);
  }
  // A warpgroup's number among all that have other sequences, and what it shares with those of the other parts
  DEVICE i64 number(int warpgroup) const { return i64(blockIdx.x) * Pass::WARPGROUPS + warpgroup; }
  DEVICE u32* counter(int warpgroup) const { return static_cast<u32*>(params.sums) + number(warpgroup) * 32; }
  DEVICE char* handed(int warpgroup, u32 times) const {
    return static_cast<char*>(params.sums) + Pass::kStatesAt + (number(warpgroup) * 2 + (times & 1)) * (HANDED * kSlabs * kSlab);
  }

  // The column of products that is own feature q's, and, in a run, the place of feature i's sum of a gate
  DEVICE static int column_of(int q) {
    return q / (4 * kRun) * (4 * kRun) + q % kRun / 2 * 8 + q % (4 * kRun) / kRun * 2 + q % 2;
  }
  DEVICE static constexpr int sum_of(int gate, int half, int run, int i) {
    return (gate * (OWN / 8) + run * kTiles + i / 2) * 4 + half * 2 + i % 2;
  }

  // Own rows of each gate's matrix, or columns, as operand B: gates one below the other, or, summed together, one behind the other
  DEVICE void load_weights() const {
    constexpr int kEach = HIDDEN * kSize % 16 == 0 ? 16 / kSize : 1, kLine = Pass::TURNED ? OWN : kSlabs * kWide;
    constexpr int kLines = Pass::TURNED ? kSlabs * kWide : OWN, kOfLine = kLine / kEach, kOfGate = kOfLine * kLines;
    constexpr int kTogether = 8, kWords = kEach * kSize < 4 ? 1 : kEach * kSize / 4;
    ROLL for (int first = threadIdx.x; first < kGates * kOfGate; first += kTogether * kThreads) {
      u32 words[kTogether][kWords];
      const auto q_and_p = [&](int i, int& gate, int& q, int& p) {
        const int j = first + i * kThreads, line = j % kOfGate / kOfLine, along = j % kOfLine * kEach;
        gate = j / kOfGate, q = Pass::TURNED ? along : line, p = Pass::TURNED ? line : along;
        return gate < kGates;
      };
      UNROLL for (int i = 0; i < kTogether; ++i) {
        int gate, q, p;
        const bool there = q_and_p(i, gate, q, p) && part + q < HIDDEN && p < HIDDEN;
        const Element* const weight = static_cast<const Element*>(params.weights[there ? gate : 0]);
        load_global<kEach * kSize>(weight + (Pass::TURNED ? i64(p) * HIDDEN + part + q : i64(part + q) * HIDDEN + p), words[i], there);
      }
      UNROLL for (int i = 0; i < kTogether; ++i) {
        int gate, q, p;
        if (!q_and_p(i, gate, q, p)) continue;
        if constexpr (Math::kRounds) UNROLL for (u32& word : words[i]) word = tf32_of(word);
        const auto place = [&](int q, int p) {
          const int slab = p / kWide + (Pass::SUMMED == 1 ? gate * kSlabs : 0), row = column_of(q) + (Pass::SUMMED == 1 ? 0 : gate * OWN);
          return shared + slab * (N * 128) + swizzled(row, p % kWide * kSize / 16) + p * kSize % 16;
        };
        if constexpr (kEach > 1 && !Pass::TURNED) {
          store_u32x4(place(q, p), words[i]);
        } else {
          UNROLL for (int e = 0; e < kEach; ++e) {
            if constexpr (kSize == 2)
              store_shared(place(q + e, p), u16(words[i][e / 2] >> e % 2 * 16));
            else
              store_shared(place(q + e, p), words[i][e]);
          }
        }
      }
    }
  }

  // go(first sequence, steps, the number of their first rows) for each group of a warpgroup
  template <class Go> DEVICE void each_group(int warpgroup, const Go& go) const {
    u32 number_of_rows = 0;
    ROLL for (i64 begin = number(warpgroup) * kRows; begin < params.batch; begin += i64(gridDim.x) * (Pass::WARPGROUPS * kRows)) {
      const u32 steps = walk.longest(begin, kRows, params.batch);
      go(begin, steps, number_of_rows);
      number_of_rows += steps + 1;
    }
  }

  // A warp brings what is multiplied, and says where rows lie.
  DEVICE void produce() const {
    const int mine = threadIdx.x / 32 - kConsumers / 32, lane = threadIdx.x % 32;
    if (mine >= Pass::WARPGROUPS) return;
    const Slots ring = this->ring(mine);
    const Known known = this->known(mine);
    Cursor cursor{0, 1};
    u32 times = 0;
    each_group(mine, [&](i64 begin, u32 steps, u32 first_rows) {
      const auto ahead_of = [&](int row) { return Ahead<Pass::DOWN>(walk, begin + row, begin + row < params.batch); };
      Ahead<Pass::DOWN> first = ahead_of(lane), second = ahead_of(lane + 32);
      first.advance(0), second.advance(0);
      const auto publish = [&](u32 step) {
        if (step > steps) return;
        known.wait_until_empty(first_rows + step);
        rows(mine).publish(first_rows + step, lane, first.advance(step + 1));
        rows(mine).publish(first_rows + step, lane + 32, second.advance(step + 1));
        arrive(known.full((first_rows + step) % kCodes));
      };
      publish(0), publish(1);
      ROLL for (u32 step = 0; step < steps; ++step, ++times) {
        if (lane == 0) {
          wait_for_others(mine, times + 1);
          const char* from = handed(mine, times);
          ROLL for (int slab = 0; slab < HANDED * kSlabs; ++slab, from += kSlab) {
            const u32 full = ring.begin_to_fill(cursor);
            load_run(ring.at(cursor.slot), from, kSlab, full);
            cursor.next();
          }
        }
        __syncwarp();
        publish(step + 2);
      }
    });
  }
  DEVICE void wait_for_others(int warpgroup, u32 times) const {
    const u32* const counter = this->counter(warpgroup);
    u32 counted[1];
    do load_now<4>(counter, counted);
    while (int(counted[0] - times * Pass::PARTS) < 0);
    come_after(counter);
    fence_memory_for_copies();
  }

  // A run of one of a thread's sequences; `there`: whether anything is there of its features that the matrix has
  struct Run {
    int unit, feature;  // its first
    bool there;
  };
  DEVICE static int unit(int half) { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + half * 8; }
  // go(half, run's number, run) for all of a thread, each there if its sequence is
  template <class Go> DEVICE void each_run(const bool (&there)[kHalves], const Go& go) const {
    UNROLL for (int half = 0; half < kHalves; ++half)
      UNROLL for (int i = 0; i < kRuns; ++i) go(half, i, Run{unit(half), i * (4 * kRun) + int(threadIdx.x) % 4 * kRun, there[half]});
  }
  DEVICE void sequences(i64 begin, bool (&there)[kHalves]) const {
    UNROLL for (int half = 0; half < kHalves; ++half) there[half] = begin + unit(half) < params.batch;
  }

  // What memory has of a run, by pieces that rows are multiples of. Asked for, whoever takes a number waits for it.
  static constexpr int kPiece = HIDDEN % kRun == 0 ? kRun : HIDDEN % 4 == 0 ? 4 : HIDDEN % 2 == 0 ? 2 : 1, kPieces = kRun / kPiece;
  static constexpr int kBytes = kPiece * kSize, kWords = kBytes < 4 ? 1 : kBytes / 4;
  DEVICE bool is_there(const Run& run, int piece) const {
    return run.there && (HIDDEN % OWN == 0 || part + run.feature + piece * kPiece < HIDDEN);
  }
  struct Asked {
    u32 words[kPieces][kWords];
    DEVICE float number(int i) const { return number_of<Element>(words[i / kPiece], i % kPiece); }
  };
  DEVICE void ask(const Element* from, const Run& run, Asked& asked) const {
    UNROLL for (int j = 0; j < kPieces; ++j) load_global<kBytes>(from + run.feature + j * kPiece, asked.words[j], is_there(run, j));
  }
  DEVICE void give(Element* to, const Run& run, const float (&x)[kRun]) const {
    UNROLL for (int j = 0; j < kPieces; ++j) {
      if (!is_there(run, j)) continue;
      Element* const at = to + run.feature + j * kPiece;
      if constexpr (kBytes < 4) {
        store_global(at, narrow<Element>(x[j]));
      } else {
        u32 words[kWords];
        words_of<Element>(words, [&](int i) { return x[j * kPiece + i]; });
        store_global<kBytes>(at, words);
      }
    }
  }

  // What a thread hands on of a state, with zeros for features that the matrix has not; and then, when all of the warpgroup have
  // done so, says so.
  DEVICE void hand_on(char* to, int state, const Run& run, const float (&x)[kRun]) const {
    const int column = part + run.feature;
    if (round_up(HIDDEN, OWN) > kSlabs * kWide && column >= kSlabs * kWide) return;
    u32 words[kRun * kSize / 4];
    words_of<Element>(words, [&](int i) { return HIDDEN % OWN == 0 || column + i < HIDDEN ? Math::rounded(x[i]) : 0.f; });
    to += (state * kSlabs + column / kWide) * kSlab + swizzled(run.unit, column % kWide * kSize / 16) + column * kSize % 16;
    store_global<kRun * kSize>(to, words);
  }
  DEVICE void have_handed_on(int warpgroup) const {
    sync_warpgroup(warpgroup);
    if (threadIdx.x % 128 == 0) count(counter(warpgroup));
  }

  // Products of the next slab; the one taken before is free when they are asked for.
  template <int STEPS> DEVICE void take_slab(float (&sums)[N / 2], const Slots& ring, Cursor& cursor, int number, int& last) const {
    ring.wait_until_full(cursor);
    const u64 left = operand(ring.at(cursor.slot)), right = operand(shared + number * (N * 128));
    ask_for_products<STEPS>([&](int step) {
      Wgmma<Element, N>::multiply(sums, left + 2 * step, right + 2 * step, number > 0 || step > 0);
    });
    if (number > 0) {
      wait_for_products<1>();
      ring.release(last);
    }
    last = cursor.slot;
    cursor.next();
  }
  DEVICE void multiply(float (&sums)[N / 2], int warpgroup, Cursor& cursor) const {
    const Slots ring = this->ring(warpgroup);
    int last = 0;
    UNROLL for (int state = 0; state < HANDED; ++state) {
      const int begin = state * kSlabs;
      ROLL for (int slab = 0; slab < kSlabs - 1; ++slab) take_slab<4>(sums, ring, cursor, begin + slab, last);
      take_slab<kLastSteps>(sums, ring, cursor, begin + kSlabs - 1, last);
    }
    wait_for_products<0>();
    touch(sums);
    ring.release(last);
  }

  template <class Consume> DEVICE void go(const Consume& consume) const {
    for (int i = 0; i < Pass::WARPGROUPS; ++i) ring(i).init(1, 4), known(i).init(32, 128);
    load_weights();
    fence_copy_engine();
    __syncthreads();
    part_ways<kConsumers, Pass::MORE, Pass::FEWER>([&] { consume(warpgroup()); }, [&] { produce(); });
  }
};
