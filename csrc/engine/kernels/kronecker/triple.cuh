// A pass of three tied contractions of large modes on sm_90a, whose state no block has room for: a cluster of blocks holds
// it together. Y[qo, q0, q1] = O[qo, po] A[q0, p0] X[po, p0, p1] B[q1, p1]' for each sample.
//
// The blocks share po: of each of its X's a block makes T = A X B' as a pair does (pair.cuh), and sends its rows to the
// blocks that share q0. So each of these has some columns of all T's, of which it makes Y' = T' O'. Who sends waits
// until there is room for a sample, and a barrier of the block that bytes come to counts them: nobody waits for what
// others store to memory. One warpgroup loads; of the others some make T's and some Y, or all both in turn.
//
// Which column is which row of the matrix unit's sums is free: of 32 bits a thread's two rows are neighbours.
//
// Pass: what pair.cuh has of one piece and without a mode that is mixed; PO, QO; SAMPLES (of one of the batch);
//       CLUSTER; BUFFERS for T; LAST warpgroups for Y (0: all), LAST_REGISTERS of their threads; SENT rows at once, or 0;
//       weight_o(params, q, p) and FACTOR_O; DEPTH, 0, or slots of who takes T otherwise (triple_backward.cuh), and SHARES of a
//       sample in a buffer that make room for the next one by themselves
#pragma once
#include "kernels/kronecker/pair.cuh"

template <class Pass> struct Triple {
  using Two = TwoFactors<Pass>;
  using Element = typename Pass::Element;
  using Part = typename Pass::Part;
  using Math = typename Pass::Math;
  static constexpr int PO = Pass::PO, QO = Pass::QO, Q0 = Pass::Q0, Q1 = Pass::Q1, BUFFERS = Pass::BUFFERS;
  static constexpr int CLUSTER = Pass::CLUSTER, GROUPS = Pass::GROUPS, PARTS = Pass::PARTS, LAST = Pass::LAST;
  static constexpr int TILERS = LAST ? LAST : GROUPS * PARTS;  // warpgroups that make Y
  static constexpr int kSize = sizeof(Element), kStep = 32 / kSize, kEach = 16 / kSize;
  static constexpr int kN = Two::kN, kNO = round_up(QO, 16);
  static constexpr int kShare = ceil_div(PO, CLUSTER), kRows = ceil_div(Q0, CLUSTER), kTiles = ceil_div(kRows * Q1, 64);
  static_assert((CLUSTER - 1) * kShare < PO && (CLUSTER - 1) * kRows < Q0, "each block has a part");
  static constexpr int kSteps = ceil_div(PO, kStep), kDepth = kSteps * kStep, kPitch = kTiles * 64 * kSize + 16;
  static constexpr bool kSlabs = Pass::DEPTH > 0;  // 128 bytes of T's rows each, as the matrix unit reads them
  static constexpr int kMiddleBytes = kSlabs ? kTiles * kSize * 4096 : round_up(kDepth * kPitch, 128);
  static constexpr int kRestBytes = (kDepth - PO) * kPitch;
  // Of 32 bits the matrix unit turns nothing: then it is O' that goes back through O.
  static constexpr bool kTurned = Pass::DEPTH > 0 && kSize == 4;
  static constexpr int kSlabO = (kTurned ? PO : kNO) * 128, kBytesO = ceil_div((kTurned ? QO : PO) * kSize, 128) * kSlabO;
  static constexpr int kRound = Pass::SENT, kRow = 64 * kSize, kStagedBytes = kRound * kRow;  // rows sent together
  static constexpr bool kAsTheyAre = kRound == 0;  // two sums of a thread at once, of 32 bits
  static constexpr int kResultBytes = kTurned ? Pass::DEPTH * 16384 / LAST : kSlabs ? Pass::DEPTH * 8192 : kSize == 2 && LAST ? kNO * 128 : 0;
  static constexpr int kMakers = (Two::kConsumers + LAST) * 128;
  static_assert(LAST || kSize == 4 || kNO * 128 <= kStagedBytes);
  static constexpr int kThreads = kMakers + 128, kBarriers = 768;
  static constexpr int kReaders = kTurned ? 1 : TILERS;  // warpgroups that read T
  static constexpr int SHARES = Pass::SHARES, kRowsOfShare = kRows / SHARES, kSentOfShare = Q0 / SHARES;
  static_assert(SHARES == 1 || kSlabs && kRows % SHARES == 0 && kTiles % SHARES == 0 && kSentOfShare % 16 == 0);

  const Params& params;
  const Two two;
  const Lane lane;
  const int warpgroup, thread, rank;
  const u32 memory, o, staged, results, middle;
  const i64 samples;
  const typename Pass::Activation activation;

  DEVICE Triple(const Params& p)
      : params(p), two(p), warpgroup(two.warpgroup), thread(two.thread), rank(blockIdx.y), memory(two.memory),
        o(two.behind), staged(o + kBytesO), results(staged + Two::kConsumers * kStagedBytes), middle(results + LAST * kResultBytes),
        samples(p.batch * Pass::SAMPLES), activation(p) {}

  DEVICE u32 full(u32 buffer) const { return memory + kBarriers + buffer * 8; }
  DEVICE u32 empty(u32 buffer, int share = 0) const { return memory + kBarriers + (BUFFERS + buffer * SHARES + share) * 8; }
  DEVICE int share() const { return min(kShare, PO - rank * kShare); }          // X's of a sample
  DEVICE int columns() const { return min(kRows, Q0 - rank * kRows) * Q1; }     // of T
  DEVICE u32 bytes() const { return PO * columns() * kSize; }

  DEVICE void run() const {
    run([&](int group) { make_results(group); });
  }
  template <class Last> DEVICE void run(const Last& last) const {
    two.begin(kThreads);
    if (threadIdx.x < BUFFERS) init_barrier(full(threadIdx.x), 1);
    if (threadIdx.x < BUFFERS * SHARES) init_barrier(empty(0, threadIdx.x), CLUSTER * kReaders * 4);
    if constexpr (PO % kStep)  // k's that nobody sends
      for (int at = threadIdx.x * 16; at < BUFFERS * kRestBytes; at += kThreads * 16)
        store_u32x4(middle + at / kRestBytes * kMiddleBytes + PO * kPitch + at % kRestBytes, {});
    fence_copy_engine();
    sync_cluster();
    if (warpgroup == kMakers / 128) {
      give_registers<Pass::COPY_REGISTERS>();
      two.produce(first_unit(), [&](i64 unit) { return next_unit(unit); });
    } else if (LAST && warpgroup >= Two::kConsumers) {
      if constexpr (Pass::LAST_REGISTERS > 65536 / kThreads / 8 * 8)  // than all have at first
        take_registers<Pass::LAST_REGISTERS>();
      else
        give_registers<Pass::LAST_REGISTERS>();
      sync_consumers<kMakers>();
      last(warpgroup - Two::kConsumers);
    } else {
      take_registers<Pass::REGISTERS>();
      two.template load_weight<0, Pass::FACTOR_A, kN, Two::kBytesA, Two::kSlabA, Q0, Pass::P0>(
          two.a, [&](int q, int p, int) { return Pass::weight_a(params, q, p); },
          [](int row) { return in_order(row); });
      if constexpr (kTurned)
        two.template load_weight<0, -1, PO, kBytesO, kSlabO, PO, QO>(
            o, [&](int p, int q, int) { return Pass::weight_o(params, q, p); });
      else
        two.template load_weight<0, Pass::FACTOR_O, kNO, kBytesO, kSlabO, QO, PO>(
            o, [&](int q, int p, int) { return Pass::weight_o(params, q, p); });
      fence_copy_engine();
      sync_consumers<kMakers>();
      make_middles();
    }
    sync_cluster();  // others may still send to this block, or free what they had from it
  }

  // This block's X's, one sample after another
  DEVICE i64 first_unit() const { return i64(blockIdx.x) * PO + rank * kShare; }
  DEVICE i64 next_unit(i64 unit) const {
    const int at = int(unit % PO) + 1;
    return at < rank * kShare + share() ? unit + 1 : unit + 1 - share() + i64(gridDim.x) * PO;
  }

  DEVICE void make_middles() const {
    const int group = warpgroup / PARTS, part = warpgroup % PARTS;
    u32 held[1][Two::kStepsB][4];
    UNROLL for (int s = 0; s < Two::kStepsB; ++s)
      UNROLL for (int i = 0; i < 4; ++i) two.hold(held, s, i, part * 64 + column(i % 2), 1.f);
    u32 position = group * Two::kChunks, turn = 0;
    int slice = group;
    if constexpr (LAST == 0) expect_first(warpgroup);
    ROLL for (i64 sample = blockIdx.x;; slice += GROUPS, position += (GROUPS - 1) * Two::kChunks) {
      for (; slice >= share(); slice -= share(), ++turn, sample += gridDim.x)
        if constexpr (LAST == 0) {
          const i64 done = sample - i64(BUFFERS - 1) * gridDim.x;  // what nobody waits for any more
          if (turn + 1 >= BUFFERS && done < samples) make_result(warpgroup, done, turn - (BUFFERS - 1));
        }
      if (sample >= samples) {
        if (LAST || sample - i64(BUFFERS - 1) * gridDim.x >= samples) break;
        slice += share();
        continue;
      }
      typename Two::template Sums<kN> y;
      ROLL for (int chunk = 0; chunk < Two::kChunks; ++chunk, ++position) {
        const u32 slot = position % Pass::SLOTS;
        two.ring.wait_until_full(position);
        typename Two::template Sums<Pass::CHUNK> t;
        two.multiply_b(t, held, two.ring.at(slot), part);
        wait_for_products<0>();
        t.arrived();
        two.ring.release(slot, lane.index);
        typename Two::Left left;
        Two::pack(left, t.high);
        two.multiply_a(y, left, chunk);
      }
      wait_for_products<0>();
      y.arrived();
      const u32 buffer = turn % BUFFERS, phase = turn / BUFFERS & 1 ^ 1;
      if constexpr (kAsTheyAre)
        send_sums(y.high, buffer, phase, rank * kShare + slice, part);
      else
        send(y.high, buffer, phase, rank * kShare + slice, part);
    }
  }
  // Of the 64 of a warpgroup: sum 4 n + 2 h + i of a thread is that of row 8 n + 2 t + i and column(h).
  DEVICE int column(int h) const { return thread / 32 * 16 + (kSize == 4 ? lane.g * 2 + h : lane.g + h * 8); }

  // Where the first row of a share is sent
  DEVICE void wait_for_room(int row, u32 buffer, u32 phase) const {
    if (row % kSentOfShare == 0 && row < Q0) wait_for_bytes(empty(buffer, row / kSentOfShare), phase);
  }
  // Rows of T, two of 32 bits from a thread's sums, or by pieces of 16 bytes
  DEVICE void send_sums(const float (&y)[kN / 2], u32 buffer, u32 phase, int slice, int part) const {
    const u32 to = middle + buffer * kMiddleBytes;
    UNROLL for (int n = 0; n < kN; n += 8) {
      wait_for_room(n, buffer, phase);
      UNROLL for (int i = 0; i < 2; ++i) {
        const int q0 = in_order(n + lane.t * 2 + i), at = (q0 % kRows * Q1 + part * 64 + column(0)) * kSize;
        if ((Q0 % 16 == 0 || q0 < Q0) && (Q1 % 64 == 0 || part * 64 + column(0) < Q1))
          send_words(in_block(to + place_of_middle(slice, at / 16) + at % 16, q0 / kRows),
                     {tf32_of(__float_as_uint(y[n / 2 + i])), tf32_of(__float_as_uint(y[n / 2 + 2 + i]))},
                     in_block(full(buffer), q0 / kRows));
      }
    }
  }
  DEVICE void send(const float (&y)[kN / 2], u32 buffer, u32 phase, int slice, int part) const {
    constexpr int kPieces = kRow / 16;
    const u32 own = staged + warpgroup * kStagedBytes;
    const u32 to = middle + buffer * kMiddleBytes;
    UNROLL for (int round = 0; round < kN; round += kRound) {
      sync_warpgroup(warpgroup);  // the last rows have left
      UNROLL for (int n = round; n < kN && n < round + kRound; n += kSize == 2 ? 16 : 8) put(y, own, n, n - round);
      sync_warpgroup(warpgroup);
      UNROLL for (int j = 0; j < kRound * kPieces; j += 128) {
        const int row = (j + thread) / kPieces, piece = (j + thread) % kPieces, q0 = in_order(round + row);
        if (round + j / kPieces >= kN) break;
        wait_for_room(round + j / kPieces, buffer, phase);
        if ((Q0 % 16 == 0 || q0 < Q0) && (Q1 % 64 == 0 || part * 64 + piece * kEach < Q1)) {
          u32 words[4];
          load_u32x4(own + place(row, piece), words);
          const u32 at = to + place_of_middle(slice, (q0 % kRows * Q1 + part * 64) * kSize / 16 + piece);
          send_words(in_block(at, q0 / kRows), words, in_block(full(buffer), q0 / kRows));
        }
      }
    }
  }
  // Which of A's rows is where: those of all blocks' first shares come first.
  static DEVICE int in_order(int row) {
    if constexpr (SHARES == 1) return row;
    const int behind = row % kSentOfShare;
    return behind / kRowsOfShare * kRows + row / kSentOfShare * kRowsOfShare + behind % kRowsOfShare;
  }
  static DEVICE u32 place_of_middle(int slice, int piece) {
    return kSlabs ? piece / 8 * 8192 + swizzled(slice, piece % 8) : slice * kPitch + piece * 16;
  }
  static DEVICE u32 place(int row, int piece) {
    return kSize == 2 ? swizzled(row, piece) : row * kRow + (piece ^ (row & 6)) * 16;
  }
  DEVICE void put(const float (&y)[kN / 2], u32 own, int n, int row) const {
    if constexpr (kSize == 2) {
      put_columns(y, own, n, row);
    } else {
      UNROLL for (int i = 0; i < 2; ++i)
        store_f32x2(own + place(row + lane.t * 2 + i, column(0) / 4) + column(0) % 4 * 4, y[n / 2 + i],
                    y[n / 2 + 2 + i]);
    }
  }
  // Sixteen rows of 16 bits, which are columns of the sums
  template <int N> DEVICE void put_columns(const float (&y)[N], u32 own, int n, int row) const {
    u32 word[4];
    UNROLL for (int i = 0; i < 4; ++i) word[i] = Pair<Element>(y[n / 2 + i * 2], y[n / 2 + i * 2 + 1]).bits;
    store_matrices_transposed(place_of_columns(own, row), word);
  }
  DEVICE u32 place_of_columns(u32 own, int row) const {
    row += lane.index % 8 + lane.index / 16 * 8;
    return own + swizzled(row, thread / 32 * 2 + (lane.index >> 3 & 1));
  }

  DEVICE void make_results(int group) const {
    u32 turn = 0;
    expect_first(group);
    ROLL for (i64 sample = blockIdx.x; sample < samples; sample += gridDim.x, ++turn) make_result(group, sample, turn);
  }
  DEVICE void expect_first(int group) const {
    if (group == 0 && thread == 0)
      for (int ahead = 0; ahead < BUFFERS; ++ahead)
        if (blockIdx.x + i64(ahead) * gridDim.x < samples) expect_bytes(full(ahead), bytes());
  }
  DEVICE void make_result(int group, i64 sample, u32 turn) const {
    const int tiles = ceil_div(columns(), 64);
    const u32 buffer = turn % BUFFERS;
    const u32 mine = middle + buffer * kMiddleBytes +
                     (kSize == 4 ? lane.t * 2 * kPitch + column(0) * kSize
                                 : thread / 32 * 16 * kSize + Math::template lane_a_by_m<kPitch / kSize>(lane));
    wait_for_bytes(full(buffer), turn / BUFFERS & 1);
    if (group == 0 && thread == 0 && sample + i64(BUFFERS) * gridDim.x < samples) expect_bytes(full(buffer), bytes());
    if (group >= tiles) release(buffer);
    ROLL for (int tile = group; tile < tiles; tile += TILERS) {
      if constexpr (Pass::BIAS && kSize == 2) copy_bias(sample, tile, group);
      float y[kNO / 2];
      UNROLL for (int first = 0; first < kSteps; first += 4) {
        u32 left[4][4];
        UNROLL for (int s = first; s < kSteps && s < first + 4; ++s)
          load_left(left[s - first], mine + tile * (64 * kSize) + s * kStep * kPitch);
        open_products();
        UNROLL for (int s = first; s < kSteps && s < first + 4; ++s)
          Wgmma<Part, kNO>::multiply(y, left[s - first], operand(o) + (s / 4 * kSlabO >> 4) + s % 4 * 2, s > 0);
        commit_products();
        wait_for_products<0>();
        touch(y);
      }
      if (tile + TILERS >= tiles) release(buffer);
      finish(y, sample, tile, group);
      store(y, sample, tile, group);
    }
  }
  // Rows are columns of T; of 32 bits, a lane's k's are 2t and 2t + 1.
  static DEVICE void load_left(u32 (&a)[4], u32 from) {
    if constexpr (kSize == 2) {
      load_matrices<true>(a, from);
    } else {
      UNROLL for (int k = 0; k < 2; ++k) {
        u32 two[2];
        load_u32x2(from + k * kPitch, two);
        a[2 * k] = tf32_of(two[0]), a[2 * k + 1] = tf32_of(two[1]);
      }
    }
  }
  // Of all blocks: this warp needs a sample no more.
  DEVICE void release(u32 buffer, int share = 0) const {
    __syncwarp();
    if (lane.index < CLUSTER) free_in_other_block(in_block(empty(buffer, share), lane.index));
  }

  // 16 bits of a bias wait where results are put: as they lie in memory first.
  DEVICE u32 results_of(int group) const { return LAST ? results + group * kResultBytes : staged + group * kStagedBytes; }
  DEVICE const Element* bias_of(i64 sample, int tile) const {
    return static_cast<const Element*>(params.bias) + sample % Pass::SAMPLES * (QO * Q0 * Q1) + rank * (kRows * Q1) +
           tile * 64;
  }
  DEVICE void copy_bias(i64 sample, int tile, int group) const {
    const Element* bias = bias_of(sample, tile);
    sync_warpgroup(warpgroup);  // the last results have left
    UNROLL for (int k = 0; k < kNO; k += 16) {
      const int q = k + thread / 8, piece = thread % 8;
      const bool present = (QO % 16 == 0 || q < QO) && tile * 64 + piece * 8 < columns();
      copy_async<16>(results_of(group) + swizzled(q, piece), present ? bias + q * (Q0 * Q1) + piece * 8 : bias, present);
    }
    commit_copies();
  }
  DEVICE void finish(float (&y)[kNO / 2], i64 sample, int tile, int group) const {
    if constexpr (Pass::BIAS && kSize == 2) {
      wait_for_copies<0>();
      sync_warpgroup(warpgroup);
      UNROLL for (int n = 0; n < kNO; n += 16) {
        u32 word[4];
        load_matrices<true>(word, place_of_columns(results_of(group), n));
        UNROLL for (int i = 0; i < 8; ++i) y[n / 2 + i] += widen(Element{u16(word[i / 2] >> i % 2 * 16)});
      }
    } else if constexpr (Pass::BIAS) {
      const float* bias = bias_of(sample, tile) + lane.t * (2 * Q0 * Q1) + column(0);
      const bool present = tile * 64 + column(0) < columns();
      UNROLL for (int j = 0; j < kNO / 4; ++j) {
        const int q = j / 2 * 8 + j % 2;
        u32 two[2];
        load_global<8>(bias + q * (Q0 * Q1), two, present && (QO % 16 == 0 || q + lane.t * 2 < QO));
        UNROLL for (int h = 0; h < 2; ++h) y[j / 2 * 4 + j % 2 + 2 * h] += __uint_as_float(two[h]);
      }
    }
    UNROLL for (float& sum : y) sum = activation.of(sum);
  }
  DEVICE void store(const float (&y)[kNO / 2], i64 sample, int tile, int group) const {
    Element* to = static_cast<Element*>(params.y) + sample * (QO * Q0 * Q1) + rank * (kRows * Q1) + tile * 64;
    if constexpr (kSize == 4) {  // eight lanes write two sectors
      to += lane.t * (2 * Q0 * Q1) + column(0);
      const bool present = Q0 % CLUSTER == 0 && kRows * Q1 % 64 == 0 || tile * 64 + column(0) < columns();
      UNROLL for (int j = 0; j < kNO / 4; ++j) {
        const int q = j / 2 * 8 + j % 2;
        const u32 two[2] = {__float_as_uint(y[j / 2 * 4 + j % 2]), __float_as_uint(y[j / 2 * 4 + j % 2 + 2])};
        if (present && (QO % 16 == 0 || q + lane.t * 2 < QO)) store_global<8>(to + q * (Q0 * Q1), two);
      }
    } else {
      const u32 own = results_of(group);
      sync_warpgroup(warpgroup);
      UNROLL for (int n = 0; n < kNO; n += 16) put_columns(y, own, n, n);
      sync_warpgroup(warpgroup);
      UNROLL for (int k = 0; k < kNO; k += 16) {
        const int q = k + thread / 8, piece = thread % 8;
        if ((QO % 16 == 0 || q < QO) && tile * 64 + piece * 8 < columns())
          store_words<16>(to + q * (Q0 * Q1) + piece * 8, load_words<16>(own + swizzled(q, piece)));
      }
    }
  }
};
