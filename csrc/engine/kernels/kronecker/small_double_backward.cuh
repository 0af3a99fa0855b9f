// All gradients of three or four small tied factors in double, of any sizes up to 16, in one pass. A group of warps takes a
// unit after the other: forward by columns once more, with every state kept, then back. By columns is by FMA, since the
// matrix unit would pad 9 to 16: a thread has all p of some columns in registers, and makes all q of each, so that the new
// state may lie where the old one was; weights are read from shared memory by all lanes at once, 16 bytes for all columns
// of a thread. States lie such that few lanes meet in a bank (kernels/bank_layouts.py). The copy engine brings units, whole
// pieces of 16 bytes: where these do not divide a sample, with up to 8 bytes of the samples around it. A weight's gradient is the
// matrix unit's, 16 q's and 8 p's, from the states before and behind it: its k's are the columns, many, so that little is
// padded. What goes back through a contraction goes by columns again, and lies where the state before it was. The first
// contraction is that of the first mode: neighbouring lanes store neighbours of dX.
//
// Pass: WARPS (of a group), GROUPS, SLOTS, UNITS_PER_SAMPLE; kSlot, kGroup, kWeights (bytes); load_weights(kernel); X and G,
//       their Strides in slots; kGrad (bytes before G's); forward(kernel) and back(kernel, sums), which take the Steps in their
//       order; kFours (tiles of sums), place(kernel, n, ...) of one; kSums (elements of all weights); GRAD (the parameter
//       that G is)
#pragma once
#include "move/memory.cuh"
#include "types/params.cuh"
#include "multiply/mma.cuh"
#include "finish/sums.cuh"

// Where a state's elements lie: [N0, N1, N2, N3] (1: there is no such mode), S0 to S3 apart.
template <int N0, int N1, int N2, int N3, int S0, int S1, int S2, int S3> struct Strides {
  static constexpr int kSize = N0 * N1 * N2 * N3;
  // Of the first mode that there is, what lies side by side, and how far apart these are
  static constexpr int kFirst = N0 > 1 ? N0 : N1 > 1 ? N1 : N2, kApart = N0 > 1 ? S0 : N1 > 1 ? S1 : S2;
  static constexpr int kRuns = kApart * kFirst == kSize ? 1 : kFirst;
  static constexpr DEVICE int size(int mode) { return mode == 0 ? N0 : mode == 1 ? N1 : mode == 2 ? N2 : N3; }
  static constexpr DEVICE int step(int mode) { return mode == 0 ? S0 : mode == 1 ? S1 : mode == 2 ? S2 : S3; }

  // Whether all modes from the Nth on but M are as one.
  template <int M, bool REVERSED, int N> static constexpr DEVICE bool is_run() {
    int apart = step(REVERSED ? N : 3 - N);
    for (int n = N; n < 4; ++n) {
      const int k = REVERSED ? n : 3 - n;
      if (k == M || size(k) == 1) continue;
      if (step(k) != apart) return false;
      apart *= size(k);
    }
    return true;
  }
  // Where the first element of a column lies: c is an index of all modes but M, the last one's side by side, or the
  // first one's.
  template <int M, bool REVERSED, int N = 0> static constexpr DEVICE int column(int c) {
    constexpr int K = REVERSED ? N : 3 - N;
    if constexpr (N == 4)
      return 0;
    else if constexpr (K == M || size(K) == 1)
      return column<M, REVERSED, N + 1>(c);
    else if constexpr (is_run<M, REVERSED, N>())
      return c * step(K);
    else
      return c % size(K) * step(K) + column<M, REVERSED, N + 1>(c / size(K));
  }
};

// Of columns, for threads and for products; whether lanes of a product take columns far apart
template <bool REVERSED_, bool PRODUCT_REVERSED_, bool SPREAD_> struct Order {
  static constexpr bool REVERSED = REVERSED_, PRODUCT_REVERSED = PRODUCT_REVERSED_, SPREAD = SPREAD_;
};

// A contraction. In and Out: Strides of the states before and behind it, which begin IN and OUT bytes behind the group's
// memory (-1: in a slot). The weight, and on the way back the turned one, begin WEIGHT and TURNED bytes behind the block's.
template <int MODE_, class In_, class Out_, class Order, int IN_, int OUT_, int WEIGHT_, int TURNED_>
struct Step : Order {
  using In = In_;
  using Out = Out_;
  static constexpr int MODE = MODE_, IN = IN_, OUT = OUT_, WEIGHT = WEIGHT_, TURNED = TURNED_;
  static constexpr int P = In::size(MODE), Q = Out::size(MODE), COLUMNS = In::kSize / P;
};

template <class Pass> struct SmallDoubleBase {
  static constexpr int WARPS = Pass::WARPS, GROUPS = Pass::GROUPS, kThreads = WARPS * 32, kBlock = kThreads * GROUPS;
  template <class S> static constexpr int kEach = ceil_div(S::COLUMNS, kThreads);  // columns of a thread

  const Params& params;
  const int group;
  int thread;
  const u32 weights, memory, barriers;  // shared addresses: of weights, of the group's memory and of its barriers
  const i64 units;

  DEVICE SmallDoubleBase(const Params& given)
      : params(given), group(threadIdx.x / kThreads), thread(threadIdx.x % kThreads),
        weights(shared_address(shared_memory)), memory(weights + Pass::kWeights + group * Pass::kGroup),
        barriers(weights + Pass::kWeights + GROUPS * Pass::kGroup + group * 32),
        units(given.batch * Pass::UNITS_PER_SAMPLE) {}

  DEVICE void sync() const { sync_group<WARPS, GROUPS>(group + 1); }  // the block's own barrier is for the end

  // A weight [Q, P] in rows of whole pieces of 16 bytes, or turned.
  template <int Q, int P, bool TURNED> DEVICE void load_weight(int parameter, u32 to) const {
    const double* from = static_cast<const double*>(params.weights[parameter]);
    ROLL for (int j = threadIdx.x; j < Q * P; j += kBlock) {
      const int row = TURNED ? j % P : j / P, column = TURNED ? j / P : j % P;
      store_shared(weights + to + (row * round_up(TURNED ? Q : P, 2) + column) * 8, from[j]);
    }
  }

  // A unit to a slot, by one warp, where it lies as the State, in runs if these are not side by side; where it begins.
  template <class State> static DEVICE u32 begin(i64 unit) { return State::kSize % 2 ? u32(unit % 2) * 8 : 0; }
  template <class State> DEVICE void ask_for(const void* tensor, i64 unit, u32 slot, u32 barrier) const {
    constexpr int kRuns = State::kRuns, kRun = State::kSize / kRuns * 8, kApart = kRuns == 1 ? 0 : State::kApart * 8;
    if (thread >= 32 || unit >= units) return;
    const char* from = static_cast<const char*>(tensor) + unit * State::kSize * 8 - begin<State>(unit);
    u32 bytes = round_up(kRun, 16);
    if constexpr (State::kSize % 2) {
      if (unit % 2 == 0 && unit + 1 == units) {  // nothing is read behind the tensor
        bytes -= 16;
        if (thread == 0) store_shared(slot + bytes, *reinterpret_cast<const double*>(from + bytes));
      }
    }
    fence_copy_engine();
    if (thread == 0) expect_bytes(barrier, kRuns * bytes);
    __syncwarp();
    if (thread < kRuns) load_run(slot + thread * kApart, from + thread * kRun, bytes, barrier);
  }

  // All p of the thread's columns. Those behind the last one are it again, for nothing.
  template <class S, class State, int EACH>
  DEVICE void load_columns(double (&x)[EACH][State::size(S::MODE)], u32 from) const {
    UNROLL for (int c = 0; c < EACH; ++c) {
      const u32 at = from + State::template column<S::MODE, S::REVERSED>(min(thread + c * kThreads, S::COLUMNS - 1)) * 8;
      UNROLL for (int p = 0; p < State::size(S::MODE); ++p) x[c][p] = load_f64(at + p * State::step(S::MODE) * 8);
    }
  }

  // put(c, q, y) of all sums of the thread's columns, some q's at once: as many sums as hide an FMA's latency. TIMES: how
  // many times that is written out.
  template <int Q, int TIMES = Q, int P, int EACH, class Put>
  DEVICE void multiply(const double (&x)[EACH][P], u32 weight, const Put& put) const {
    constexpr int kAtOnce = EACH < 6 ? 6 / EACH : 1;
    UNROLL_BY(TIMES) for (int first = 0; first < Q; first += kAtOnce) {
      double y[kAtOnce][EACH];
      UNROLL for (int p = 0; p < P; p += 2)
        UNROLL for (int i = 0; i < kAtOnce; ++i) {
          if (Q % kAtOnce && first + i >= Q) continue;
          double w[2];
          load_f64x2(weight + ((first + i) * round_up(P, 2) + p) * 8, w[0], w[1]);
          UNROLL for (int c = 0; c < EACH; ++c) {
            y[i][c] = p ? y[i][c] + w[0] * x[c][p] : w[0] * x[c][0];
            if (p + 1 < P) y[i][c] += w[1] * x[c][p + 1];
          }
        }
      UNROLL for (int i = 0; i < kAtOnce; ++i)
        UNROLL for (int c = 0; c < EACH; ++c)
          if (Q % kAtOnce == 0 || first + i < Q) put(c, first + i, y[i][c]);
    }
  }
  // The same to shared memory
  template <class S, class State, int P, int EACH>
  DEVICE void put_columns(const double (&x)[EACH][P], u32 weight, u32 to) const {
    u32 at[EACH];
    UNROLL for (int c = 0; c < EACH; ++c)
      at[c] = to + State::template column<S::MODE, S::REVERSED>(thread + c * kThreads) * 8;
    multiply<State::size(S::MODE)>(x, weight, [&](int c, int q, double y) {
      const bool there = (c + 1) * kThreads <= S::COLUMNS || thread + c * kThreads < S::COLUMNS;
      store_shared(at[c] + q * State::step(S::MODE) * 8, y, there);
    });
  }
};

// FOURS: the first of its weight's tiles of sums; TO: where that weight's sums begin.
template <class Step_, int FOURS_, int TO_> struct BackStep : Step_ {
  static constexpr int FOURS = FOURS_, TO = TO_, TILES = ceil_div(Step_::P, 8);
};

template <class Pass> struct SmallDoubleBackward : SmallDoubleBase<Pass> {
  using Base = SmallDoubleBase<Pass>;
  using Base::params, Base::group, Base::thread, Base::weights, Base::memory, Base::barriers, Base::units, Base::sync;
  using Base::WARPS, Base::kThreads;
  static constexpr int SLOTS = Pass::SLOTS;
  using Sums = double[Pass::kFours][4];

  Lane lane;
  i64 unit, step;
  int slot;
  u32 phase_x, phase_g;
  DEVICE SmallDoubleBackward(const Params& given) : Base(given), slot(0), phase_x(0), phase_g(0) {
    step = i64(gridDim.x) * Base::GROUPS;
    unit = i64(group) * gridDim.x + blockIdx.x;
  }

  // x, in its slots at the beginning of the group's memory, and G
  DEVICE u32 x() const { return memory + slot * Pass::kSlot + Base::template begin<typename Pass::X>(unit); }
  DEVICE u32 g() const { return memory + Pass::kGrad + Base::template begin<typename Pass::G>(unit); }
  DEVICE void ask_for_x(i64 of, int to) const {
    Base::template ask_for<typename Pass::X>(params.x, of, memory + to * Pass::kSlot, barriers + to * 8);
  }
  DEVICE void ask_for_g(i64 of) const {
    Base::template ask_for<typename Pass::G>(params.weights[Pass::GRAD], of, memory + Pass::kGrad, barriers + 16);
  }

  DEVICE void run() {
    if (thread == 0) {
      for (int to = 0; to < SLOTS; ++to) init_arrivals(barriers + to * 8);
      init_arrivals(barriers + 16);
    }
    __syncwarp();  // a barrier is made for the warp as a whole
    for (int to = 0; to < SLOTS; ++to) ask_for_x(unit + to * step, to);
    ask_for_g(unit);
    Pass::load_weights(*this);
    __syncthreads();
    Sums sums = {};
    ROLL for (; unit < units; unit += step) {
      if constexpr (WARPS > 1) {  // or the places of many columns are kept from unit to unit, and spilled
        stay_here(thread, lane.index);
        lane = Lane(lane.index);
      }
      wait_for_bytes(barriers + slot * 8, phase_x);
      Pass::forward(*this);
      wait_for_bytes(barriers + 16, phase_g);
      Pass::back(*this, sums);
      slot = slot + 1 == SLOTS ? 0 : slot + 1;
      if (slot == 0) phase_x ^= 1;
      phase_g ^= 1;
    }
    if constexpr (WARPS > 1)
      meet_as_others<Base::GROUPS>(unit - i64(group) * gridDim.x, units, Pass::MEETINGS, [&] { sync(); });
    store(sums);
  }

  template <class S> DEVICE u32 before() const { return S::IN < 0 ? x() : memory + S::IN; }
  template <class S> DEVICE u32 behind() const { return S::OUT < 0 ? g() : memory + S::OUT; }

  template <class S> DEVICE void forward() const {
    double x[Base::template kEach<S>][S::P];
    Base::template load_columns<S, typename S::In>(x, before<S>());
    Base::template put_columns<S, typename S::Out>(x, weights + S::WEIGHT, behind<S>());
    sync();
  }

  // The gradient of its weight, and that of the state before it, from the one behind it.
  template <class S> DEVICE void back(Sums& sums) const {
    add_products<S>(sums);
    double h[Base::template kEach<S>][S::Q];
    Base::template load_columns<S, typename S::Out>(h, behind<S>());
    sync();
    if constexpr (S::OUT < 0) ask_for_g(unit + step);
    if constexpr (S::IN < 0) {
      ask_for_x(unit + SLOTS * step, slot);
      double* to = static_cast<double*>(params.y) + unit * Pass::X::kSize;
      Base::template multiply<S::P>(h, weights + S::TURNED, [&](int c, int p, double y) {
        const int column = thread + c * kThreads;
        store_global(to + p * S::COLUMNS + column, y, (c + 1) * kThreads <= S::COLUMNS || column < S::COLUMNS);
      });
    } else {
      Base::template put_columns<S, typename S::In>(h, weights + S::TURNED, memory + S::IN);
      sync();
    }
  }

  // Of the warp's columns, eight at a time
  template <class S> DEVICE void add_products(Sums& sums) const {
    using In = typename S::In;
    using Out = typename S::Out;
    constexpr int kEights = ceil_div(S::COLUMNS, 8);
    constexpr bool kWhole = S::COLUMNS % 8 == 0;
    const u32 left = behind<S>() + lane.g * Out::step(S::MODE) * 8, right = before<S>() + lane.g * In::step(S::MODE) * 8;
    constexpr int kTurns = ceil_div(kEights, WARPS);
    UNROLL_BY(kTurns <= 16 ? kTurns : 4) for (int turn = 0; turn < kTurns; ++turn) {
      const int eight = WARPS == 1 ? turn : turn * WARPS + thread / 32;
      if (kEights % WARPS && eight >= kEights) break;
      double a[4] = {}, b[S::TILES][2];
      UNROLL for (int i = 0; i < 2; ++i) {
        const int column = S::SPREAD ? lane.t * (2 * kEights) + eight * 2 + i : eight * 8 + i * 4 + lane.t;
        const bool there = kWhole || column < S::COLUMNS;
        const u32 from = left + Out::template column<S::MODE, S::PRODUCT_REVERSED>(column) * 8;
        a[i * 2] = load_f64(from, there && (S::Q >= 8 || lane.g < S::Q));
        if constexpr (S::Q > 8)
          a[i * 2 + 1] = load_f64(from + 8 * Out::step(S::MODE) * 8, there && (S::Q == 16 || lane.g + 8 < S::Q));
        UNROLL for (int n = 0; n < S::TILES; ++n)
          b[n][i] = load_f64(right + (In::template column<S::MODE, S::PRODUCT_REVERSED>(column) + n * 8 * In::step(S::MODE)) * 8,
                             there && (n * 8 + 8 <= S::P || lane.g + n * 8 < S::P));
      }
      UNROLL for (int n = 0; n < S::TILES; ++n) multiply_f64(sums[S::FOURS + n], a, b[n]);
    }
  }

  // All warps' sums, to where this block's belong.
  DEVICE void store(const Sums& sums) const {
    double* to = static_cast<double*>(params.sums) + i64(blockIdx.x) * Pass::kSums;
    add_up<Pass::kFours, Base::kBlock, 32, Pass::kWeights + Base::GROUPS * Pass::kGroup, double>(
        weights, [&](int n) -> const double(&)[4] { return sums[n]; },
        [&](int n, int index, const double(&sum)[4]) { Pass::place(*this, n, Lane(index), sum, to); });
  }
  // Tile n of all, if it is of this step's
  template <class S> DEVICE void place(int n, Lane at, const double (&sum)[4], double* to) const {
    if (n < S::FOURS || n >= S::FOURS + S::TILES) return;
    UNROLL for (int i = 0; i < 4; ++i) {
      const int q = at.g + i / 2 * 8, p = (n - S::FOURS) * 8 + at.t * 2 + i % 2;
      if (q < S::Q && p < S::P) store_global(to + S::TO + q * S::P + p, sum[i]);
    }
  }
};
