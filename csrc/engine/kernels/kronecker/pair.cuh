// A pass of two tied contractions, of the last two modes, on sm_90a: Y[q0, q1] = A[q0, p0] X[p0, p1] B[q1, p1]' for each unit.
//
// A warpgroup makes 64 rows of T = B X', whose sums, rounded, are as they stand the left operand of Y' = T A'. X and A are
// read from shared memory by the matrix unit, both with k contiguous; B stays in registers. Units go in chunks of p0
// through a ring of slots, which one warpgroup fills. The others are GROUPS x PARTS: groups take turns in units, parts
// share q1.
//
// MAPPED, the copy engine fills the ring, and rounds to tf32 on the way. All blocks begin with the same weights: their first
// chunks but two come behind these, and are only asked for into L2 before. Two parts go half a unit apart, or half of the ring,
// so that one stores while the other multiplies.
//
// float as accurate as FMA: an operand is the sum of three bf16 pieces, which hold all its bits, and the six largest of
// their nine products count. Those of the first pieces are summed apart from the rest: small numbers lose nothing to
// large ones, and where an operand is infinite or NaN, the rest, which would be NaN, is left out.
//
// Of a sum of products, Y' adds up what each term makes of X while that is in its slot; both weights of all terms are in shared
// memory then.
//
// A small mode before these two may be contracted as well. Then a unit is P such X's, a chunk the same rows of all, and
// groups share the Q mixtures of every unit. In tf32 who copied a piece of each makes their mixtures, by FMA. In 16 bits
// warps do by products of 16 columns, 8 p's and 8 q's: of what the copy engine brought, columns become operand A, and sums
// rows again, on their way through ldmatrix and stmatrix. So that neither meets itself in a bank, there an X is 16 bytes,
// and here a mixture 128 bytes, further from the one before than it is long.
//
// A thread's places in y are the same for all units of a sample's one, so that its numbers of a bias stay in registers, and of 32
// bits what these have no room for in shared memory. Else they come for each unit, several at once; or, of 16 bits, they are copied
// to where results will be put, as they lie there, while products run: a warp copies what it reads.
//
// Pass: Math, Element, Part (what the matrix unit takes), Activation, BIAS; PIECES of an Element; P, Q (1 without such a mode),
//       P0, P1, Q0, Q1, UNITS_PER_SAMPLE; TERMS of a sum, CHUNK of p0, SLOTS, STAGES (chunks on their way to slots, 0 if they go
//       there at once), AHEAD (chunks under way to slots), MAPPED (of two parts), PARTS, GROUPS; HELD pieces of B in registers;
//       RESULTS that a warpgroup stages; BIAS_HELD and BIAS_SHARED, eights of q0 whose bias is kept so, BIAS_COPIED; registers of a thread, COPY_REGISTERS of who copies and REGISTERS of the others, or 0;
//       weight_m(params, q, p) of the mixtures, weight_a and weight_b; FACTOR_M, FACTOR_A, FACTOR_B: the parameter that these
//       are, or -1 where they are products, and what those are scaled by, normal_m, normal_a and normal_b; Source: void, or
//       Several, the tensors that x is, which neither mixtures nor maps take
#pragma once
#include "multiply/mixing.cuh"
#include "multiply/mma.cuh"
#include "types/params.cuh"
#include "finish/pointwise.cuh"
#include "multiply/splits.cuh"
#include "move/ring.cuh"
#include "move/several.cuh"

struct Maps { TensorMap x; };

template <class Pass> struct TwoFactors {
  using Element = typename Pass::Element;
  using Part = typename Pass::Part;
  using Math = typename Pass::Math;
  static constexpr int kSize = sizeof(Element), kUnit = sizeof(Part), kStep = 32 / kUnit, kSlab = 128 / kUnit;
  static constexpr int kEach = 16 / kUnit;  // elements of a piece of 16 bytes in shared memory
  static constexpr int P = Pass::P, Q = Pass::Q, PIECES = Pass::PIECES, HELD = Pass::HELD, TERMS = Pass::TERMS;
  static constexpr int P0 = Pass::P0, P1 = Pass::P1, Q0 = Pass::Q0, Q1 = Pass::Q1, CHUNK = Pass::CHUNK, SLOTS = Pass::SLOTS;
  static constexpr int kChunks = ceil_div(P0, CHUNK), kN = round_up(Q0, 16), kM = Pass::PARTS * 64;
  static constexpr int kStepsB = ceil_div(P1, kStep), kStepsA = CHUNK / kStep;
  static constexpr int kSlabA = kN * 128, kBytesA = ceil_div(kChunks * CHUNK, kSlab) * kSlabA;  // of one piece
  static constexpr int kSlabB = kM * 128, kBytesB = ceil_div(P1, kSlab) * kSlabB;
  static constexpr int kTermA = PIECES * kBytesA, kTermB = (PIECES - HELD) * kBytesB;
  static constexpr int kSlabX = CHUNK * 128, kBytesX = ceil_div(P1, kSlab) * kSlabX, kStateBytes = PIECES * kBytesX;
  static constexpr bool kMixes = P * Q > 1, kStages = Pass::STAGES > 0, kMixesByProducts = kMixes && kSize == 2;
  static constexpr int kPitch = kStateBytes + (kMixesByProducts ? 128 : 0);  // from a mixture to the next
  static constexpr int kStates = kMixesByProducts ? 8 : P > Q && !kStages ? P : Q;  // that a slot has room for
  static constexpr int kSlotBytes = kStates * kPitch;
  static constexpr int kConsumers = Pass::GROUPS * Pass::PARTS, kThreads = (kConsumers + 1) * 128;
  static_assert(TERMS == 1 || (!kMixes && HELD == 0));
  static_assert(!Pass::MAPPED || (!kMixes && !kStages && kUnit == 4 && Pass::GROUPS == 1 && Pass::PARTS == 2));
  // Chunks between the parts. Those that the first one has behind it fill the ring until the second one has read them, too.
  static constexpr int kHalf = kChunks / 2 < SLOTS / 2 ? kChunks / 2 : SLOTS / 2;
  // A group that waits for a slot has to have seen what was there before.
  static_assert(kMixes || Pass::GROUPS == 1 || SLOTS >= Pass::GROUPS * kChunks);
  static constexpr int kShare = kMixes ? ceil_div(Q, Pass::GROUPS) : 1;  // of a unit's mixtures
  static constexpr int kAhead = kStages ? Pass::STAGES - 1 : Pass::AHEAD;  // chunks under way when one is handed over
  static constexpr int kRowPieces = P1 / kEach, kPieces = CHUNK * kRowPieces, kTurns = ceil_div(kPieces, 128);
  static constexpr int kCopies = kSize / kUnit;  // for a piece
  static constexpr int kStagePitch = CHUNK * P1 * kSize + 16;  // from an X to the next, where mixtures are products
  static constexpr int kStageBytes = kMixesByProducts ? P * kStagePitch : kTurns * 128 * P * kCopies * 16;
  static constexpr int kBarrierBytes = 1024, kMixture = 256;  // where weights of mixtures lie, rows of whole 16 bytes, or zeros
  static constexpr bool kScalesA = Pass::FACTOR_A < 0 && is_same<Element, f16>;
  static constexpr bool kScalesB = Pass::FACTOR_B < 0 && is_same<Element, f16>;
  static constexpr int kBiasHeld = Pass::BIAS ? Pass::BIAS_HELD : 0, kBiasShared = Pass::BIAS ? Pass::BIAS_SHARED : 0;
  static constexpr bool kCopiesBias = Pass::BIAS && Pass::BIAS_COPIED;
  static_assert(kSize == 4 || kBiasShared == 0);
  static_assert(!kCopiesBias || (kSize == 2 && kBiasHeld == 0));
  // States that a bias is asked for ahead: to where the results of the one before have just left
  static constexpr int kBiasAhead = Pass::RESULTS > 1 ? Pass::RESULTS - 1 : 1;
  using Bias = u32[kBiasHeld ? kBiasHeld : 1][kSize];  // of a thread

  const Params& params;
  const Maps* const maps;
  const Lane lane;
  const int warpgroup, thread;
  const u32 memory, a, b;
  const Ring<SLOTS, kSlotBytes> ring;
  const u32 behind;  // behind the slots: chunks on their way, then results
  const i64 units;
  const typename Pass::Activation activation;

  DEVICE TwoFactors(const Params& p, const Maps& m) : TwoFactors(p, &m) {}
  DEVICE TwoFactors(const Params& p, const Maps* m = nullptr)
      : params(p), maps(m), warpgroup(uniform(threadIdx.x / 128)), thread(threadIdx.x % 128),
        memory(shared_address(shared_memory)), a(memory + kBarrierBytes), b(a + TERMS * kTermA),
        ring(b + TERMS * kTermB, memory), behind(ring.at(SLOTS)), units(p.batch * Pass::UNITS_PER_SAMPLE),
        activation(p) {}

  DEVICE u32 arrived(u32 stage) const { return ring.full(2 * SLOTS + stage); }
  // Mapped: that weights have come, and that a part has so much of a unit behind it that the other one may go on
  DEVICE u32 weights_there() const { return memory + kMixture; }
  DEVICE u32 halfway(int part) const { return memory + kMixture + 8 + part * 8; }
  DEVICE u32 mixture(int q) const { return memory + kMixture + q * round_up(P, 4) * 4; }

  // Of a block with `threads`: its barriers, and what no copy writes
  DEVICE void begin(int threads) const {
    ring.init(Pass::MAPPED ? 1 : 128, (kMixes ? kConsumers : Pass::PARTS) * 4);
    if (Pass::MAPPED && threadIdx.x == 0) init_barrier(weights_there(), 1);
    if (Pass::MAPPED && threadIdx.x < 2) init_barrier(halfway(threadIdx.x), 4);
    if constexpr (kMixesByProducts) {
      if (threadIdx.x < Pass::STAGES) init_barrier(arrived(threadIdx.x), 1);
      if (threadIdx.x < 4) store_shared(memory + kMixture + threadIdx.x * 4, 0u);
    } else if constexpr (kMixes) {
      const int q = threadIdx.x / P, p = threadIdx.x % P;
      if (q < Q) store_shared(mixture(q) + p * 4, Pass::weight_m(params, q, p));
    }
    if constexpr (P1 % kStep && !Pass::MAPPED)  // padding of the slots, which copies leave alone
      for (int at = threadIdx.x * 4; at < SLOTS * kSlotBytes; at += threads * 4) store_shared(ring.slots + at, 0u);
  }
  DEVICE void run() const {
    begin(kThreads);
    fence_copy_engine();
    __syncthreads();
    if (warpgroup == kConsumers) {
      give_registers<Pass::COPY_REGISTERS>();
      if constexpr (kMixesByProducts)
        produce_mixtures();
      else if constexpr (Pass::MAPPED)
        produce_by_map();
      else
        produce(blockIdx.x, [](i64 unit) { return unit + gridDim.x; });
    } else {
      take_registers<Pass::REGISTERS>();
      consume(Pass::normal_a(params), Pass::normal_b(params));
    }
  }

  // To shared memory, padded with zeros: A, and the pieces of B that are not in registers.
  DEVICE void load_weights(float scale = 1.f) const {
    load_weight<0, Pass::FACTOR_A, kN, kBytesA, kSlabA, Q0, P0>(
        a, [&](int q, int p, int term) { return scale * Pass::weight_a(params, q, p, term); });
    if constexpr (HELD < PIECES)
      load_weight<HELD, Pass::FACTOR_B, kM, kBytesB, kSlabB, Q1, P1, false>(
          b, [&](int q, int p, int term) { return Pass::weight_b(params, q, p, term); });
  }
  // All terms' weights, several loads of a thread on their way. Where their left operand are SUMS of 32 bits, a lane's k's are
  // 2t and 2t + 1. row_of says which row is where.
  struct InOrder {
    DEVICE int operator()(int row) const { return row; }
  };
  template <int FIRST, int FACTOR, int ROWS, int BYTES, int SLAB, int ROW, int COLUMN, bool SUMS = true, class At,
            class RowOf = InOrder>
  DEVICE void load_weight(u32 to, At at, RowOf row_of = {}) const {
    constexpr bool kWords = FACTOR >= 0 && COLUMN * kSize % 16 == 0;
    constexpr int kTogether = kWords ? 16 / kSize : kUnit == 2 && COLUMN % 2 == 0 ? 2 : 1;
    constexpr int kRow = BYTES / SLAB * kSlab / kTogether, kAll = ROWS * kRow;
    UNROLL_BY(kUnit == 4 ? 16 : 8) for (int at_all = threadIdx.x; at_all < TERMS * kAll; at_all += kConsumers * 128) {
      const int term = TERMS > 1 ? at_all / kAll : 0, j = at_all - term * kAll;
      const u32 begin = to + term * ((PIECES - FIRST) * BYTES);
      const auto place = [&](int q, int p) {
        const int k = (kUnit == 4 && SUMS ? Math::place_of(p, true) : p) * kUnit;
        return begin + k / 128 * SLAB + swizzled(q, k % 128 / 16) + k % 16;
      };
      constexpr bool kInSlabs = kUnit == 4 && kWords;  // a warp has four rows of one, which meet in no bank
      const int q = kInSlabs ? j / 8 % ROWS : j / kRow;
      const int p = kInSlabs ? j / (8 * ROWS) * kSlab + j % 8 * 4 : j % kRow * kTogether;
      const bool present = q < ROW && p < COLUMN;
      if constexpr (kWords) {
        u32 word[4] = {};
        const auto* weight = static_cast<const Element*>(params.weights[FACTOR]) + term * (ROW * COLUMN);
        if (present) load_global(weight + row_of(q) * COLUMN + p, word);
        if constexpr (kSize == 2)
          store_u32x4(place(q, p), word);
        else if constexpr (kUnit == 4 && !SUMS)
          store_u32x4(place(q, p), {tf32_of(word[0]), tf32_of(word[1]), tf32_of(word[2]), tf32_of(word[3])});
        else if constexpr (kUnit == 4)
          UNROLL for (int i = 0; i < 2; ++i)  // every other one lies beside it
            store_f32x2(place(q, p + i), __uint_as_float(tf32_of(word[i])), __uint_as_float(tf32_of(word[2 + i])));
        else
          store_weight<FIRST, BYTES>(word, [&](int i) { return place(q, p + i); });
      } else {
        u32 word[kTogether] = {};
        UNROLL for (int i = 0; i < kTogether; ++i)
          if (present) word[i] = __float_as_uint(at(row_of(q), p + i, term));
        store_weight<FIRST, BYTES>(word, [&](int i) { return place(q, p + i); });
      }
    }
  }
  // Neighbours, as floats, to their places: rounded or split.
  template <int FIRST, int BYTES, int N, class Place>
  static DEVICE void store_weight(const u32 (&x)[N], Place place) {
    UNROLL for (int i = 0; i < N; i += kUnit == 4 || N == 1 ? 1 : 2) {
      if constexpr (kUnit == 4) {
        store_shared(place(i), tf32_of(x[i]));
      } else {
        u32 word[PIECES];
        split<Part>(__uint_as_float(x[i]), N > 1 ? __uint_as_float(x[(i + 1) % N]) : 0.f, word);
        UNROLL for (int piece = FIRST; piece < PIECES; ++piece) {
          if constexpr (N > 1)
            store_shared(place(i) + (piece - FIRST) * BYTES, word[piece]);
          else
            store_shared(place(i) + (piece - FIRST) * BYTES, u16(word[piece]));
        }
      }
    }
  }

  // Copies this block's chunks as there is room, and hands each over once it has arrived.
  template <class Next> DEVICE void produce(i64 unit, const Next& next) const {
    constexpr i64 kElements = P * P0 * P1;
    auto x = source_of<typename Pass::Source, Element>(params) + unit * kElements;
    int chunk = 0, slot = 0, stage = 0, ready = 0, ready_chunk = 0, ready_stage = 0, begun = 0, under_way = 0;
    u32 phase = 1;  // of the slot that is taken next, by copies or from their stage
    ROLL while (true) {
      const bool more = unit < units;
      if (more) {
        if constexpr (!kStages) take(slot, phase);
        const u32 to = ring.at(slot ? slot - 1 : SLOTS - 1);
        const auto from = further(x, chunk * (CHUNK * P1));
        each_piece(chunk, [&](int turn, int j, u32 place, bool present) {
          UNROLL for (int p = 0; p < P; ++p)
            UNROLL for (int i = 0; i < kCopies; ++i)
              copy_async<16>(kStages ? stage_address(stage, turn) + (p * kCopies + i) * 2048 : to + place + p * kStateBytes,
                             at_or_begin(from, p * (P0 * P1) + j * kEach + i * (16 / kSize), present), present);
        });
        if (kStages && ++stage == Pass::STAGES) stage = 0;
        if (++chunk == kChunks) {
          const i64 before = unit;
          chunk = 0, unit = next(unit);
          x = further(x, (unit - before) * kElements);
        }
        ++under_way;
      }
      commit_copies();
      if (begun < kAhead) {
        ++begun;
        continue;
      }
      if (under_way-- == 0) break;
      wait_for_copies<kAhead>();
      if constexpr (kStages) take(slot, phase);
      if constexpr (kStages || kMixes || Math::kRounds)
        each_piece(ready_chunk, [&](int turn, int, u32 place, bool) {
          const u32 to = ring.at(ready) + place;
          prepare(kStages ? stage_address(ready_stage, turn) : to, to);
        });
      fence_copy_engine();
      arrive(ring.full(ready));
      if (++ready == SLOTS) ready = 0;
      if (++ready_chunk == kChunks) ready_chunk = 0;
      if (kStages && ++ready_stage == Pass::STAGES) ready_stage = 0;
    }
  }
  // The same by the copy engine, for one thread. Others ask L2 for what else fills the ring while weights come.
  DEVICE void produce_by_map() const {
    constexpr int kFirst = 2;  // chunks before weights
    constexpr int kUnitBytes = P0 * P1 * 4, kRing = SLOTS * CHUNK * P1 * 4, kWhole = ceil_div(SLOTS, kChunks) * kUnitBytes;
    if (thread >= 32) {
      ROLL for (int at = kFirst * CHUNK * P1 * 4 + (thread - 32) * 128; at < (kRing < kWhole ? kRing : kWhole);
                at += 96 * 128) {
        const i64 unit = blockIdx.x + i64(at / kUnitBytes) * gridDim.x;
        if (unit < units) prefetch(static_cast<const char*>(params.x) + unit * kUnitBytes + at % kUnitBytes);
      }
    }
    if (thread) return;
    int slot = 0, begun = 0;
    u32 phase = 1;
    ROLL for (i64 unit = blockIdx.x; unit < units; unit += gridDim.x)
      ROLL for (int chunk = 0; chunk < kChunks; ++chunk) {
        if (begun++ == kFirst) wait_for_bytes(weights_there(), 0);
        const u32 to = ring.at(slot), arrives = ring.full(slot);
        take(slot, phase);
        expect_bytes(arrives, kBytesX);
        UNROLL for (int slab = 0; slab < kBytesX / kSlabX; ++slab) {
          const int at[5] = {slab * kSlab, chunk * CHUNK, int(unit), 0, 0};
          load_box(to + slab * kSlabX, maps->x, at, arrives);
        }
      }
  }
  DEVICE void take(int& slot, u32& phase) const {
    wait_for_bytes(ring.empty(slot), phase);
    if (++slot == SLOTS) slot = 0, phase ^= 1;
  }
  DEVICE u32 stage_address(int stage, int turn) const {
    return behind + stage * kStageBytes + turn * (P * kCopies * 2048) + thread * 16;
  }
  // The 16-byte pieces of a chunk that this thread moves: number, place in a slot, and whether X has it; zeros stand behind
  // the last row of X, since what was there before may have been no number.
  template <class Do> DEVICE void each_piece(int chunk, Do act) const {
    const int count = P0 % CHUNK && chunk == kChunks - 1 ? P0 % CHUNK * kRowPieces : kPieces;
    UNROLL_BY(kMixes || PIECES > 1 ? 1 : kTurns) for (int turn = 0; turn < kTurns; ++turn) {
      const int j = turn * 128 + thread, row = j / kRowPieces, piece = j % kRowPieces;
      if (kPieces % 128 == 0 || j < kPieces)
        act(turn, j, piece / 8 * kSlabX + swizzled(row, piece % 8), P0 % CHUNK == 0 || j < count);
    }
  }
  // What was copied, mixed, rounded or split, as the matrix unit wants it.
  DEVICE void prepare(u32 from, u32 to) const {
    float x[P][kEach];
    UNROLL for (int p = 0; p < P; ++p)
      UNROLL for (int i = 0; i < kCopies; ++i) {
        u32 word[4];
        load_u32x4(from + (kStages ? (p * kCopies + i) * 2048 : p * kStateBytes), word);
        UNROLL for (int k = 0; k < 4; ++k) x[p][i * 4 + k] = __uint_as_float(word[k]);
      }
    if constexpr (!kMixes) {
      put(x[0], to);
    } else {
      ROLL for (int q = 0; q < Q; ++q) {
        float y[kEach] = {};
        UNROLL for (int p = 0; p < P; p += 4) {
          u32 weight[4];
          load_u32x4(mixture(q) + p * 4, weight);
          UNROLL for (int i = 0; i < 4 * kEach; ++i)
            if (p + i / kEach < P) y[i % kEach] += __uint_as_float(weight[i / kEach]) * x[p + i / kEach][i % kEach];
        }
        put(y, to + q * kStateBytes);
      }
    }
  }
  static DEVICE void put(const float (&x)[kEach], u32 to) {
    u32 word[PIECES][4];
    UNROLL for (int i = 0; i < 4; ++i) {
      if constexpr (kUnit == 4) {
        word[0][i] = tf32_of(__float_as_uint(x[i]));
      } else {
        u32 pieces[PIECES];
        split<Part>(x[2 * i], x[2 * i + 1], pieces);
        UNROLL for (int piece = 0; piece < PIECES; ++piece) word[piece][i] = pieces[piece];
      }
    }
    UNROLL for (int piece = 0; piece < PIECES; ++piece) store_u32x4(to + piece * kBytesX, word[piece]);
  }

  // The same by products: one thread asks the copy engine for a chunk as soon as its stage has been read.
  DEVICE void produce_mixtures() const {
    i64 asked = blockIdx.x;  // unit and chunk that are asked for next
    int asked_chunk = 0;
    const auto ask = [&](int stage) {
      if (asked >= units) return;
      if (thread == 0) {
        const u32 bytes = rows_of(asked_chunk) * P1 * kSize;
        const Element* from = static_cast<const Element*>(params.x) + asked * (P * P0 * P1) + asked_chunk * (CHUNK * P1);
        expect_bytes(arrived(stage), P * bytes);
        ROLL for (int p = 0; p < P; ++p)
          load_run(behind + stage * kStageBytes + p * kStagePitch, from + p * (P0 * P1), bytes, arrived(stage));
      }
      if (++asked_chunk == kChunks) asked_chunk = 0, asked += gridDim.x;
    };
    ROLL for (int stage = 0; stage < Pass::STAGES; ++stage) ask(stage);

    const float scale = Pass::normal_m(params), unscale = 1 / scale;
    const u32 weights = mixing_weights<Element>(
        lane, [&](int q, int p) { return q < Q && p < P ? scale * Pass::weight_m(params, q, p) : 0.f; });
    int slot = 0, stage = 0;
    u32 phase = 1, stage_phase = 0;
    ROLL for (i64 unit = blockIdx.x; unit < units; unit += gridDim.x)
      ROLL for (int chunk = 0; chunk < kChunks; ++chunk) {
        const u32 to = ring.at(slot);
        wait_for_bytes(arrived(stage), stage_phase);
        take(slot, phase);
        mix_chunk(behind + stage * kStageBytes, to, rows_of(chunk) * kRowPieces, weights, unscale);
        fence_copy_engine();
        arrive(ring.full(slot ? slot - 1 : SLOTS - 1));
        sync_warpgroup(warpgroup);
        ask(stage);
        if (++stage == Pass::STAGES) stage = 0, stage_phase ^= 1;
      }
  }
  static DEVICE int rows_of(int chunk) { return P0 % CHUNK && chunk == kChunks - 1 ? P0 % CHUNK : CHUNK; }
  // Pieces of 16 bytes, 8 columns, of all X's and of all mixtures. Of the former `count` are there; zeros stand behind.
  DEVICE void mix_chunk(u32 from, u32 to, int count, u32 weights, float scale) const {
    static_assert(kPieces % 8 == 0 && P <= 8 && Q <= 8);
    const int row = lane.index % 8, matrix = lane.index / 8;
    const u32 x = from + row * kStagePitch + matrix * 16;
    UNROLL_BY(2) for (int j = thread / 32 * 8; j < kPieces; j += 32) {
      u32 left[2][4], word[2][4];
      UNROLL for (int half = 0; half < 2; ++half)
        load_matrices<true>(left[half], P == 8 || row < P ? x + (j + half * 4) * 16 : memory + kMixture);
      UNROLL for (int half = 0; half < 2; ++half) {
        mix_columns<Element>(word[half], left[half], weights, scale);
        if constexpr (P0 % CHUNK)
          UNROLL for (int i = 0; i < 4; ++i) word[half][i] = j + half * 4 + i < count ? word[half][i] : 0;
        // A mixture begins as many rows of 128 bytes behind a multiple of 1024 as it has before it.
        const int at = j + half * 4 + matrix, behind = at / kRowPieces + row, piece = at % kRowPieces;
        store_matrices_transposed(to + row * kStateBytes + piece / 8 * kSlabX + swizzled(behind, piece % 8), word[half]);
      }
    }
  }

  template <int N> using Sums = SplitSums<N, PIECES>;
  using Left = u32[PIECES][kStepsA][4];
  using Held = u32[HELD ? HELD : 1][kStepsB][4];

  DEVICE void consume(float scale_a, float scale_b) const {
    const float unscale_a = 1 / scale_a, unscale_b = 1 / scale_b;
    const int group = warpgroup / Pass::PARTS, part = warpgroup % Pass::PARTS, first = part * 64 + thread / 32 * 16;
    Held held;
    Bias bias;
    if constexpr (kHoldsPieces) ask_for_pieces(held[0], first + lane.g);
    if constexpr (kCopiesBias)
      UNROLL for (int ahead = 0; ahead < kBiasAhead; ++ahead)
        ask_for_bias(blockIdx.x + (kMixes ? 0 : i64(group) * gridDim.x), ahead, group, part, ahead);
    load_weights(scale_a);
    fence_copy_engine();
    sync_consumers<kConsumers * 128>();
    if (Pass::MAPPED && threadIdx.x == 0) arrive(weights_there());
    if constexpr (kBiasHeld + kBiasShared > 0) keep_bias(bias, first);
    if constexpr (kHoldsPieces)
      hold_pieces(held[0]);
    else if constexpr (HELD > 0)
      UNROLL for (int s = 0; s < kStepsB; ++s)
        UNROLL for (int i = 0; i < 4; ++i) hold(held, s, i, first + lane.g + i % 2 * 8, scale_b);
    u32 position = kMixes ? 0 : group * kChunks;
    [[maybe_unused]] int buffer = 0;
    const i64 step = i64(gridDim.x) * (kMixes ? 1 : Pass::GROUPS);
    [[maybe_unused]] u32 turn = part;  // the first part waits for the second one's half of the unit before
    ROLL for (i64 unit = blockIdx.x + (kMixes ? 0 : i64(group) * gridDim.x); unit < units; unit += step) {
      if constexpr (Pass::MAPPED) wait_for_bytes(halfway(1 - part), ++turn & 1);
      Sums<kN> y[kShare];
      ROLL for (int chunk = 0; chunk < kChunks; ++chunk, ++position) {
        if (Pass::MAPPED && chunk == kHalf) {  // each warp: none may still wait here for what is two phases ago by then
          __syncwarp();
          if (lane.index == 0) arrive(halfway(part));
        }
        const u32 slot = position % SLOTS;
        ring.wait_until_full(position);
        UNROLL for (int share = 0; share < kShare; ++share)
          ROLL for (int term = 0; term < TERMS; ++term) {
            Sums<CHUNK> t;
            multiply_b(t, held, ring.at(slot) + (kMixes ? mixed(group, share) * kPitch : 0), part, term);
            wait_for_products<0>();
            t.arrived();
            if (share == kShare - 1 && term == TERMS - 1) ring.release(slot, lane.index);
            if constexpr (kScalesB) scale_sums(t.high, unscale_b);
            Left left;
            pack(left, t.high);
            multiply_a(y[share], left, chunk, term);
          }
      }
      wait_for_products<0>();
      if constexpr (!kMixes) position += (Pass::GROUPS - 1) * kChunks;
      UNROLL for (int share = 0; share < kShare; ++share) {
        y[share].arrived();
        const bool again = kMixes && Q % Pass::GROUPS && mixed(group, share) != group * kShare + share;
        if (again && !kCopiesBias) break;
        if constexpr (kScalesA) scale_sums(y[share].high, unscale_a);
        const i64 state = unit * Q + (kMixes ? mixed(group, share) : 0);
        finish(y[share].high, state, first, bias, buffer);
        if constexpr (kSize == 2)
          store_staged(y[share].high, state, part, buffer, again,
                       [&](int left) { ask_for_bias(unit, share + kBiasAhead, group, part, left); });
        else
          store(y[share].high, state, first);
      }
    }
  }
  // Which mixture; the last one again where groups do not divide them.
  static DEVICE int mixed(int group, int share) { return min(group * kShare + share, Q - 1); }

  // Of rows of whole 64 bytes a lane asks for 16, and gets, of what its quad has, every fourth word.
  static constexpr bool kHoldsPieces = HELD > 0 && Pass::FACTOR_B >= 0 && PIECES == 1 && P1 * kSize % 64 == 0;
  DEVICE void ask_for_pieces(u32 (&held)[kStepsB][4], int q) const {
    const Element* factor = static_cast<const Element*>(params.weights[Pass::FACTOR_B]) + q * P1 + lane.t * (16 / kSize);
    UNROLL for (int half = 0; half < 2; ++half)
      UNROLL for (int s = 0; s < kStepsB; s += 2) {
        u32 words[4];
        load_global(factor + half * 8 * P1 + s * (32 / kSize), words, Q1 % 64 == 0 || q + half * 8 < Q1);
        put_words(held, half, s, words);
      }
  }
  static DEVICE void hold_pieces(u32 (&held)[kStepsB][4]) {
    UNROLL for (int half = 0; half < 2; ++half)
      UNROLL for (int s = 0; s < kStepsB; s += 2) {
        u32 words[4] = {held[s][half], held[s][half + 2], held[s + 1][half], held[s + 1][half + 2]};
        exchange_words<4>(words);
        if constexpr (kUnit == 4)
          UNROLL for (u32& word : words) word = tf32_of(word);
        put_words(held, half, s, words);
      }
  }
  static DEVICE void put_words(u32 (&held)[kStepsB][4], int half, int s, const u32 (&words)[4]) {
    held[s][half] = words[0], held[s][half + 2] = words[1], held[s + 1][half] = words[2], held[s + 1][half + 2] = words[3];
  }
  // The word of operand B in register i of step s
  DEVICE void hold(Held& held, int s, int i, int q, float scale) const {
    const int p = s * kStep + i / 2 * (kStep / 2) + lane.t * (4 / kUnit);
    const auto at = [&](int p) { return q < Q1 && p < P1 ? scale * Pass::weight_b(params, q, p) : 0.f; };
    if constexpr (kUnit == 4) {
      held[0][s][i] = tf32_of(__float_as_uint(at(p)));
    } else if constexpr (PIECES == 1 && Pass::FACTOR_B >= 0 && P1 % 2 == 0) {
      const Element* factor = static_cast<const Element*>(params.weights[Pass::FACTOR_B]);
      held[0][s][i] = q < Q1 && p < P1 ? *reinterpret_cast<const u32*>(factor + q * P1 + p) : 0;
    } else {
      u32 word[PIECES];
      split<Part>(at(p), at(p + 1), word);
      UNROLL for (int piece = 0; piece < HELD; ++piece) held[piece][s][i] = word[piece];
    }
  }

  DEVICE void multiply_b(Sums<CHUNK>& t, const Held& held, u32 state, int part, int term = 0) const {
    multiply_pieces<PIECES, kStepsB>(t, false, [&](float(&sums)[CHUNK / 2], int s, int i, int j, bool add) {
      const u64 x = operand(state + j * kBytesX) + (s / 4 * kSlabX >> 4) + s % 4 * 2;
      if (i < HELD)
        Wgmma<Part, CHUNK>::multiply(sums, held[i < HELD ? i : 0][s], x, add);
      else
        Wgmma<Part, CHUNK>::multiply(
            sums, operand(b + term * kTermB + (i - HELD) * kBytesB + part * 8192) + (s / 4 * kSlabB >> 4) + s % 4 * 2, x,
            add);
    });
  }
  DEVICE void multiply_a(Sums<kN>& y, const Left& left, int chunk, int term = 0) const {
    const u32 a = this->a + term * kTermA;
    multiply_pieces<PIECES, kStepsA>(y, chunk > 0 || term > 0, [&](float(&sums)[kN / 2], int s, int i, int j, bool add) {
      const int k = chunk * kStepsA + s;
      Wgmma<Part, kN>::multiply(sums, left[i][s], operand(a + j * kBytesA) + (k / 4 * kSlabA >> 4) + k % 4 * 2, add);
    });
  }

  static DEVICE void pack(Left& left, const float (&t)[CHUNK / 2]) {
    UNROLL for (int s = 0; s < kStepsA; ++s)
      UNROLL for (int i = 0; i < 4; ++i) {
        if constexpr (kUnit == 4) {
          left[0][s][i] = tf32_of(__float_as_uint(t[s * 4 + i % 2 * 2 + i / 2]));
        } else {
          const int at = (2 * s + i / 2) * 4 + i % 2 * 2;
          u32 word[PIECES];
          split<Part>(t[at], t[at + 1], word);
          UNROLL for (int piece = 0; piece < PIECES; ++piece) left[piece][s][i] = word[piece];
        }
      }
  }

  // Bias and activation. Sum 4 n + 2 h + i of a thread is Y[8 n + 2 t + i, first + g + 8 h].
  DEVICE void finish(float (&y)[kN / 2], i64 state, int first, const Bias& bias, int buffer) const {
    if constexpr (kCopiesBias) {
      wait_for_copies<kBiasAhead - 1>();
      __syncwarp();
      each_of_columns(staged(buffer), [&](int n, const u32 (&words)[2]) { add(y, n, words); });
      __syncwarp();
    } else if constexpr (Pass::BIAS) {
      UNROLL for (int n = 0; n < kBiasHeld; ++n) add(y, n, bias[n]);
      UNROLL for (int n = kBiasHeld; n < kBiasHeld + kBiasShared; ++n) {
        u32 words[4];
        load_u32x4(kept_bias(n), words);
        add(y, n, words);
      }
      each_of_bias<kBiasHeld + kBiasShared, kN / 8>(
          state % (Pass::UNITS_PER_SAMPLE * Q), first, [&](int n, const u32 (&words)[kSize]) { add(y, n, words); });
    }
    UNROLL for (int j = 0; j < kN / 2; ++j) y[j] = activation.of(y[j]);
  }
  // What a thread has of an eight of a bias's q0, as of their sums
  template <int WORDS> static DEVICE void add(float (&y)[kN / 2], int n, const u32 (&words)[WORDS]) {
    UNROLL for (int i = 0; i < 4; ++i) y[n * 4 + i] += number_of<Element>(words, i);
  }
  // From memory, several eights on their way at once
  template <int FROM, int TO, class Do> DEVICE void each_of_bias(i64 state, int first, const Do& act) const {
    constexpr int kAtOnce = kMixes || PIECES > 1 ? 4 : 8;
    const void* begin = params.bias;
    stay_here(begin);  // or all places are kept through the loop of units
    const Element* bias = static_cast<const Element*>(begin) + state * (Q0 * Q1) + (lane.t * 2 * Q1 + first + lane.g);
    UNROLL for (int from = FROM; from < TO; from += kAtOnce) {
      u32 numbers[kAtOnce][4][1];
      UNROLL for (int j = 0; j < kAtOnce * 4 && from + j / 4 < TO; ++j) {
        const int q0 = (from + j / 4) * 8 + j % 2, behind = j / 2 % 2 * 8;
        load_global<kSize>(bias + (q0 * Q1 + behind), numbers[j / 4][j % 4],
                           (kN == Q0 || q0 + lane.t * 2 < Q0) && (Q1 % 64 == 0 || first + lane.g + behind < Q1));
      }
      UNROLL for (int j = 0; j < kAtOnce && from + j < TO; ++j) {
        u32 words[kSize];
        UNROLL for (int i = 0; i < kSize; ++i)
          words[i] = kSize == 4 ? numbers[j][i][0] : numbers[j][i * 2][0] | numbers[j][i * 2 + 1][0] << 16;
        act(from + j, words);
      }
    }
  }
  // 16 bits, from where results are put, two eights at once
  template <class Do> DEVICE void each_of_columns(u32 staged, const Do& act) const {
    UNROLL for (int n = 0; n < kN / 8; n += 2) {
      u32 words[4];
      load_matrices<true>(words, place_of_columns(staged, n * 8));
      act(n, {words[0], words[1]});
      act(n + 1, {words[2], words[3]});
    }
  }
  // That of a share of a group's mixtures, or of its next units', for a buffer
  DEVICE void ask_for_bias(i64 unit, int share, int group, int part, int buffer) const {
    const i64 later = unit + share / kShare * (i64(gridDim.x) * (kMixes ? 1 : Pass::GROUPS));
    if (later < units) copy_bias(later, mixed(group, share % kShare), part, staged(buffer));
    commit_copies();
  }
  // A warp's columns of a state's bias, of 16 bits. Each four rows that are next to each other here meet in no bank.
  DEVICE void copy_bias(i64 unit, int mixture, int part, u32 to) const {
    const Element* bias = static_cast<const Element*>(params.bias) +
                          (unit % Pass::UNITS_PER_SAMPLE * Q + (kMixes ? mixture : 0)) * (Q0 * Q1) + part * 64;
    const int piece = thread / 32 * 2 + lane.index % 2, behind = lane.index / 2 % 4 * 2 + lane.index / 8 % 2 + lane.index / 16 * 8;
    UNROLL for (int n = 0; n < kN; n += 16) {
      const int row = n + behind;
      const bool present = (kN == Q0 || row < Q0) && (Q1 % 64 == 0 || part * 64 + piece * 8 < Q1);
      copy_async<16>(to + swizzled(row, piece), at_or_begin(bias, row * Q1 + piece * 8, present), present);
    }
  }
  // A thread's bias, for all units
  DEVICE void keep_bias(Bias& bias, int first) const {
    each_of_bias<0, kBiasHeld>(0, first, [&](int n, const u32 (&words)[kSize]) {
      UNROLL for (int i = 0; i < kSize; ++i) bias[n][i] = words[i];
    });
    if constexpr (kBiasShared > 0)
      each_of_bias<kBiasHeld, kBiasHeld + kBiasShared>(
          0, first, [&](int n, const u32 (&words)[4]) { store_u32x4(kept_bias(n), words); });
  }
  DEVICE u32 kept_bias(int n) const {
    return behind + Pass::STAGES * kStageBytes + (n - kBiasHeld) * (kConsumers * 2048) + threadIdx.x * 16;
  }
  // 32 bits: eight lanes write a sector.
  DEVICE void store(const float (&y)[kN / 2], i64 state, int first) const {
    float* to = static_cast<float*>(params.y) + state * (Q0 * Q1) + first + lane.g;
    UNROLL for (int j = 0; j < kN / 2; ++j) {
      const int q0 = j / 4 * 8 + lane.t * 2 + j % 2, behind = j / 2 % 2 * 8;
      if ((kN == Q0 || q0 < Q0) && (Q1 % 64 == 0 || first + lane.g + behind < Q1))
        store_global(to + (q0 * Q1 + behind), y[j]);
    }
  }
  // 16 bits: a part's columns lie as rows of 128 bytes in shared memory first, in one or several buffers in turn.
  DEVICE u32 staged(int buffer) const {
    return behind + Pass::STAGES * kStageBytes + (warpgroup * Pass::RESULTS + buffer) * (kN * 128);
  }
  DEVICE u32 place_of_columns(u32 staged, int first) const {
    const u32 piece = thread / 32 * 2 + (lane.index >> 3 & 1), row = lane.index % 8 + lane.index / 16 * 8;
    return staged + swizzled(first + row, piece);
  }
  // `next` is told a buffer whose results have left. Nothing leaves of what is there `again`.
  template <class Next>
  DEVICE void store_staged(const float (&y)[kN / 2], i64 state, int part, int& buffer, bool again, const Next& next) const {
    const u32 staged = this->staged(buffer);
    [[maybe_unused]] const int last = buffer ? buffer - 1 : Pass::RESULTS - 1;
    if constexpr (Pass::RESULTS > 2)
      buffer = buffer + 1 < Pass::RESULTS ? buffer + 1 : 0;
    else if constexpr (Pass::RESULTS > 1)
      buffer ^= 1;  // who stores the last state's part has stored that of the one before, which lay here
    else if constexpr (!kCopiesBias)
      sync_warpgroup(warpgroup);  // the last state has left
    UNROLL for (int n = 0; n < kN / 8; n += 2) {
      u32 word[4];
      UNROLL for (int i = 0; i < 4; ++i) word[i] = Pair<Element>(y[n * 4 + i * 2], y[n * 4 + i * 2 + 1]).bits;
      store_matrices_transposed(place_of_columns(staged, n * 8), word);
    }
    sync_warpgroup(warpgroup);
    if constexpr (kCopiesBias && Pass::RESULTS > 1) next(last);
    Element* to = static_cast<Element*>(params.y) + state * (Q0 * Q1) + part * 64;
    UNROLL for (int k = 0; k < kN / 16; ++k) {
      const int row = k * 16 + thread / 8, piece = thread % 8;
      if ((kN == Q0 || row < Q0) && (Q1 % 64 == 0 || part * 64 + piece * 8 < Q1) && !(kCopiesBias && again))
        store_words<16>(to + row * Q1 + piece * 8, load_words<16>(staged + swizzled(row, piece)));
    }
    if constexpr (kCopiesBias && Pass::RESULTS == 1) {
      sync_warpgroup(warpgroup);
      next(0);
    }
  }
};
