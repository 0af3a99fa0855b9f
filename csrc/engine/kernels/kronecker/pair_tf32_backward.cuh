// The backward pass of two large tied contractions in tf32, of the last two modes, on sm_90a: as pair16_large_backward.cuh, for each
// unit, of X [p0, p1] and G [q0, q1],
//
//     dT = A' G,  T = X B',  dA' += T G',  dB += dT' X,  dX = dT B
//
// by products of f16, which has the 11 bits of tf32, half its bytes, and may lie either way. Of its range nothing is lost that
// counts, since powers of two bring the largest of a weight, of a unit's X and G, of 64 rows of dT, and of each row of T below
// 2^15: what is 2^-29 of it has all bits, and 2^-40 is the least. What products make is scaled back where it is summed. What is
// not finite stays so, and scales are those of the rest.
//
// Two warpgroups multiply, each with 64 rows of p0, or of q1 for dB. Of a third one each warp asks for a fourth of a unit's rows
// ahead, finds the largest with the others, and rounds its rows once nobody reads the unit before any more: G while X is still
// read, X while dX is made.
//
// Pass: P0, P1, Q0, Q1, UNITS_PER_SAMPLE; weight_a(), weight_b(); GRAD (the parameter that G is)
#pragma once
#include "types/halves.cuh"
#include "multiply/slabs.cuh"
#include "finish/sums.cuh"
#include "move/ring.cuh"

template <class Pass> struct PairTf32Backward : Slabs<f16, 128> {
  using Base = Slabs<f16, 128>;
  static constexpr int P0 = Pass::P0, P1 = Pass::P1, Q0 = Pass::Q0, Q1 = Pass::Q1;
  static constexpr int kP0 = round_up(P0, 16), kP1 = round_up(P1, 16), kQ0 = round_up(Q0, 16), kQ1 = round_up(Q1, 16);
  static constexpr int kState = 2 * kSlab, kLanding = 16 << 10;  // of every matrix; of a warp's rows on their way
  static constexpr int kBarrierBytes = 1024, kThreads = 384, kConsumers = 256;
  static constexpr int kCopyRegisters = 40, kRegisters = 232;
  static constexpr int kParts = ceil_div(kQ0, 64);  // of dA, each summed by itself
  static constexpr int kLoaders = 4, kTogether = 8, kTimes = 4;  // warps, rows that come together, times for a state
  static constexpr bool kPads = P0 % 64 || P1 % 64 || Q0 % 64 || Q1 % 64;
  static constexpr int X = 0, G = 1;
  static_assert(P0 <= 128 && P1 <= 128 && Q0 <= 128 && Q1 <= 128 && P1 % 4 == 0 && Q1 % 4 == 0);

  const Params& params;
  Lane lane;
  const int warpgroup, warp;  // of who multiplies, and of who loads
  int first;  // the warp's first row
  const u32 memory, a, b, d_t;
  const Ring<2, kState> ring;  // X and G
  const u32 landing;
  const i64 units;

  DEVICE PairTf32Backward(const Params& given)
      : params(given), warpgroup(uniform(threadIdx.x / 128)), warp(uniform(threadIdx.x / 32 % kLoaders)), first(threadIdx.x / 32 * 16),
        memory(shared_address(shared_memory)), a(memory + kBarrierBytes), b(a + kState), d_t(b + kState), ring(d_t + kState, memory),
        landing(ring.at(2) + warp * kLanding), units(given.batch * Pass::UNITS_PER_SAMPLE) {}

  // A warpgroup's rows of dT are there; all of dT has been read.
  DEVICE u32 rows_full(int group) const { return memory + 32 + group * 8; }
  DEVICE u32 rows_empty() const { return memory + 48; }
  DEVICE u32 arrived(int time) const { return memory + 512 + (warp * kTimes + time) * 8; }
  // What takes a unit's scale back, or that of a warpgroup's rows of dT; the largest that each of some warps has.
  DEVICE u32 back_of(int which) const { return memory + 128 + which * 4; }
  DEVICE u32 back_of_rows(int group) const { return memory + 144 + group * 4; }
  DEVICE u32 most_at(int which) const { return memory + 256 + which * 32; }

  DEVICE void run() {
    ring.init(kLoaders * 32, 8);
    if (threadIdx.x < 2) init_barrier(rows_full(threadIdx.x), 128);
    if (threadIdx.x == 0) init_barrier(rows_empty(), 8);
    if (threadIdx.x < kLoaders * kTimes) init_arrivals(memory + 512 + threadIdx.x * 8);
    if constexpr (kPads)
      for (u32 at = a + threadIdx.x * 16; at < ring.at(2); at += kThreads * 16) store_u32x4(at, {});
    fence_copy_engine();
    __syncthreads();
    part_ways<2, kRegisters, kCopyRegisters>(warpgroup, [&] { consume(); }, [&] { produce(); });
  }

  static DEVICE float size_of(float x) { return fabsf(x) <= kLargestFloat ? fabsf(x) : 0.f; }
  // The largest number of WARPS, of which each has the `which`th place for its own. They meet by sync().
  template <int WARPS, class Sync> DEVICE float most_of_warps(float most, int which, const Sync& sync) const {
    float mosts[1] = {most};
    most_of<32>(mosts);
    if (lane.index == 0) store_shared(most_at(which) + threadIdx.x / 32 % WARPS * 4, mosts[0]);
    sync();
    UNROLL for (int i = 0; i < WARPS; i += 4) {
      u32 x[4];
      load_u32x4(most_at(which) + i * 4, x);
      mosts[0] = larger_of(mosts[0], x);
    }
    return mosts[0];
  }

  // All of a weight on its way at once. Returns what takes its scale back.
  template <int Q, int P, class At> DEVICE float load_scaled(u32 to, int which, const At& at) const {
    constexpr int kRow = ceil_div(P, 2), kEach = ceil_div(Q * kRow, kConsumers);
    float w[kEach][2], most = 0;
    UNROLL for (int i = 0; i < kEach; ++i) {
      const int q = (i * kConsumers + threadIdx.x) / kRow, p = (i * kConsumers + threadIdx.x) % kRow * 2;
      w[i][0] = q < Q ? at(q, p) : 0.f;
      w[i][1] = q < Q && (P % 2 == 0 || p + 1 < P) ? at(q, p + 1) : 0.f;
    }
    UNROLL for (int i = 0; i < kEach; ++i) most = fmaxf(most, fmaxf(size_of(w[i][0]), size_of(w[i][1])));
    const Scale scale(most_of_warps<8>(most, which, [] { sync_consumers<kConsumers>(); }));
    UNROLL for (int i = 0; i < kEach; ++i) {
      const int q = (i * kConsumers + threadIdx.x) / kRow, p = (i * kConsumers + threadIdx.x) % kRow * 2;
      if (q < Q) store_shared(to + place(q, p), Pair<f16>(w[i][0] * scale.there, w[i][1] * scale.there));
    }
    return scale.back;
  }

  // Who loads. A warp has a fourth of a state's rows, some of which come together, each time to the same place.
  template <int ROWS> static constexpr int kRows = ceil_div(ROWS, kLoaders);
  template <int ROWS> DEVICE int rows_at(int time) const {
    const int own = ROWS % kLoaders == 0 ? kRows<ROWS> : min(kRows<ROWS>, ROWS - warp * kRows<ROWS>);
    return min(kTogether, own - time * kTogether);
  }
  DEVICE u32 landing_at(int time) const { return landing + time * (kLanding / kTimes); }

  template <int ROWS, int COLUMNS> DEVICE void ask(const void* state, i64 unit, int time) const {
    if (lane.index != 0 || unit >= units) return;
    const int row = warp * kRows<ROWS> + time * kTogether, rows = rows_at<ROWS>(time);
    const float* from = static_cast<const float*>(state) + unit * (ROWS * COLUMNS) + row * COLUMNS;
    expect_bytes(arrived(time), rows > 0 ? rows * (COLUMNS * 4) : 0);
    if (rows > 0) load_run(landing_at(time), from, rows * (COLUMNS * 4), arrived(time));
  }
  // Fours that came at a time, each a lane's, with where it is among these: several loads on their way at once
  template <int ROWS, int COLUMNS, class Do> DEVICE void each_four(int time, const Do& act) const {
    constexpr int kAll = kTogether * COLUMNS / 4, kAtOnce = 4;
    constexpr bool kWhole = ROWS == kLoaders * kTogether * kTimes && kAll % (32 * kAtOnce) == 0;
    const int count = rows_at<ROWS>(time) * (COLUMNS / 4);
    UNROLL for (int turn = 0; turn < ceil_div(kAll, 32 * kAtOnce); ++turn) {
      const int from = turn * 32 * kAtOnce + lane.index;
      u32 x[kAtOnce][4];
      UNROLL for (int i = 0; i < kAtOnce; ++i)
        if (kWhole || from + i * 32 < count) load_u32x4(landing_at(time) + (from + i * 32) * 16, x[i]);
      UNROLL for (int i = 0; i < kAtOnce; ++i)
        if (kWhole || from + i * 32 < count) act(from + i * 32, x[i]);
    }
  }
  // The largest that is finite, once it has arrived
  template <int WHICH, int ROWS, int COLUMNS> DEVICE float most_of_rows() const {
    float most = 0;
    UNROLL for (int time = 0; time < kTimes; ++time) {
      wait_for_bytes(arrived(time), WHICH == X);  // G's is the first of two
      each_four<ROWS, COLUMNS>(time, [&](int, const u32(&x)[4]) { most = fmaxf(most, larger_of(0.f, x)); });
    }
    if (most <= kLargestFloat) return most;
    most = 0;
    ROLL for (int time = 0; time < kTimes; ++time)
      ROLL for (int j = lane.index; j < rows_at<ROWS>(time) * COLUMNS; j += 32)
        most = fmaxf(most, size_of(__uint_as_float(load_u32(landing_at(time) + j * 4))));
    return most;
  }
  // A state to its slot, and the next one on its way to where it was.
  template <int WHICH, int ROWS, int COLUMNS, int NEXT_ROWS, int NEXT_COLUMNS>
  DEVICE void bring(u32 phase, const void* next, i64 next_unit) const {
    constexpr int kRow = COLUMNS / 4;
    const Scale scale(most_of_warps<kLoaders>(
        most_of_rows<WHICH, ROWS, COLUMNS>(), 2 + WHICH, [] { sync_warpgroup(kConsumers / 128); }));
    ring.wait_until_empty({WHICH, phase});
    if (threadIdx.x == kConsumers) store_shared(back_of(WHICH), scale.back);
    UNROLL for (int time = 0; time < kTimes; ++time) {
      each_four<ROWS, COLUMNS>(time, [&](int j, const u32(&x)[4]) {
        const auto two = [&](int i) {
          return Pair<f16>(__uint_as_float(x[i]) * scale.there, __uint_as_float(x[i + 1]) * scale.there).bits;
        };
        const int row = warp * kRows<ROWS> + time * kTogether + j / kRow;
        store_f32x2(ring.at(WHICH) + place(row, j % kRow * 4), __uint_as_float(two(0)), __uint_as_float(two(2)));
      });
      fence_copy_engine();
      __syncwarp();
      ask<NEXT_ROWS, NEXT_COLUMNS>(next, next_unit, time);
    }
    arrive(ring.full(WHICH));
  }
  DEVICE void produce() const {
    const void* grad = params.weights[Pass::GRAD];
    u32 phase = 1;
    UNROLL for (int time = 0; time < kTimes; ++time) ask<Q0, Q1>(grad, blockIdx.x, time);
    ROLL for (i64 unit = blockIdx.x; unit < units; unit += gridDim.x, phase ^= 1) {
      bring<G, Q0, Q1, P0, P1>(phase, params.x, unit);
      bring<X, P0, P1, Q0, Q1>(phase, grad, unit + gridDim.x);
    }
  }

  // Who multiplies.
  DEVICE void consume() {
    const float back_a = load_scaled<Q0, P0>(a, 0, [&](int q, int p) { return Pass::weight_a(params, q, p); });
    const float back_b = load_scaled<Q1, P1>(b, 1, [&](int q, int p) { return Pass::weight_b(params, q, p); });
    fence_copy_engine();
    sync_consumers<kConsumers>();
    float d_a[kParts * 32] = {}, d_b[kP1 / 2] = {};
    u32 phase = 0;
    ROLL for (i64 unit = blockIdx.x; unit < units; unit += gridDim.x, phase ^= 1) {
      stay_here(lane.index, first);  // or all places are kept from unit to unit, and spilled
      lane = Lane(lane.index);
      const u32 x = ring.at(X), g = ring.at(G);
      ring.wait_until_full({G, phase});
      const float back_g = load_sum(back_of(G), 0.f);
      put_back_state(g, back_a * back_g, phase ^ 1);
      ring.wait_until_full({X, phase});
      const float back_x = load_sum(back_of(X), 0.f);
      u32 t[kQ1 / 16][4];
      float scale[2] = {back_x * back_b, back_x * back_b};
      make_state(t, scale, x);
      UNROLL for (int part = 0; part < kParts; ++part) {
        float sums[32];
        make_products<kQ1 / 16>(
            sums, [&](int s) { Wgmma<f16, 64>::multiply(sums, t[s], by_k(g, part * 64, s), s > 0); });
        UNROLL for (int j = 0; j < 32; ++j) d_a[part * 32 + j] += sums[j] * (scale[j / 2 % 2] * back_g);
      }
      __syncwarp();
      ring.release(G, lane.index);
      ROLL for (int half = 0; half < ceil_div(kP0, 64); ++half) {
        float sums[kP1 / 2];
        const int rows = kP0 > 64 ? half ^ warpgroup : 0, from = rows * 64 * 128;  // its own ones first
        wait_for_bytes(rows_full(rows), phase);
        ask_for_products<4>([&](int s) {
          Wgmma<f16, kP1>::multiply_turned(sums, by_column(d_t + from, warpgroup, s), by_column(x + from, 0, s), s > 0);
        });
        const float back = load_sum(back_of_rows(rows), 0.f) * back_x;
        wait_for_products<0>();
        touch(sums);
        UNROLL for (int j = 0; j < kP1 / 2; ++j) d_b[j] += sums[j] * back;
      }
      __syncwarp();
      if (lane.index == 0) arrive(ring.empty(X)), arrive(rows_empty());
      float sums[kP1 / 2];
      ask_for_products<kQ1 / 16>([&](int s) {
        Wgmma<f16, kP1>::multiply_right_turned(sums, by_k(d_t, warpgroup * 64, s), by_column(b, 0, s), s > 0);
      });
      const float back = load_sum(back_of_rows(warpgroup), 0.f) * back_b;
      wait_for_products<0>();
      touch(sums);
      store(sums, back, static_cast<float*>(params.y) + unit * (P0 * P1));
    }
    using Places = PlacesOfSums<Pass>;
    store_rows<Pass>({static_cast<float*>(params.sums) + i64(blockIdx.x) * Places::kAll, 0}, first, lane, d_a, d_b);
  }
  // This warpgroup's rows of dT to shared memory
  DEVICE void put_back_state(u32 g, float back, u32 phase) const {
    float sums[kQ1 / 2];
    make_products<kQ0 / 16>(sums, [&](int s) {
      Wgmma<f16, kQ1>::multiply_turned(sums, by_column(a, warpgroup, s), by_column(g, 0, s), s > 0);
    });
    float mosts[4] = {};
    UNROLL for (int j = 0; j < kQ1 / 2; ++j) mosts[j % 4] = fmaxf(mosts[j % 4], fabsf(sums[j]));
    float most = fmaxf(fmaxf(mosts[0], mosts[1]), fmaxf(mosts[2], mosts[3]));
    if (most > kLargestFloat) {
      most = 0;
      UNROLL for (float sum : sums) most = fmaxf(most, size_of(sum));
    }
    const Scale scale(most_of_warps<4>(most, 4 + warpgroup, [&] { sync_warpgroup(warpgroup); }));
    wait_for_bytes(rows_empty(), phase);
    if (threadIdx.x % 128 == 0) store_shared(back_of_rows(warpgroup), scale.back * back);
    put<P0, Q1>(d_t, sums, first, lane, scale.there);
    fence_copy_engine();
    arrive(rows_full(warpgroup));
  }
  // This warpgroup's rows of T, of which the thread has parts of two
  DEVICE void make_state(u32 (&t)[kQ1 / 16][4], float (&back)[2], u32 x) const {
    float sums[kQ1 / 2], most[2] = {};
    make_products<kP1 / 16>(
        sums, [&](int s) { Wgmma<f16, kQ1>::multiply(sums, by_k(x, warpgroup * 64, s), by_k(b, 0, s), s > 0); });
    UNROLL for (int j = 0; j < kQ1 / 2; ++j) most[j / 2 % 2] = fmaxf(most[j / 2 % 2], fabsf(sums[j]));
    most_of<4>(most);
    const Scale scales[2] = {Scale(most[0]), Scale(most[1])};
    UNROLL for (int i = 0; i < 2; ++i) back[i] *= scales[i].back;
    as_left<Q1>(t, sums, lane, {scales[0].there, scales[1].there});
  }

  DEVICE void store(float (&d_x)[kP1 / 2], float scale, float* to) const {
    UNROLL for (float& x : d_x) x *= scale;
    UNROLL for (int j = 0; j < kP1 / 2; j += 8)
      UNROLL for (int i = 0; i < 2; ++i) {
        const int row = first + lane.g + i * 8, column = j * 2 + lane.t % 2 * 8 + lane.t / 2 * 4;
        u32 word[4];
        four_columns(d_x + j + i * 2, word);
        if ((P0 == 128 || row < P0) && (kP1 == P1 || column < P1)) store_global<16>(to + row * P1 + column, word);
      }
  }
};
