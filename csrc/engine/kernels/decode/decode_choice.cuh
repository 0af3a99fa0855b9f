// Scores of all tokens for a few samples, or the token of the best one, with noise or without. A block has ROWS rows of the head, a
// team of lanes has some of these, and asks for the first before it waits for the state. Blocks leave their best tokens in
// params.sums, behind a counter, and the last one to do so has the best of all.
//
// Pass: Element; THREADS, TEAM, AT_ONCE, SAMPLES, HIDDEN, VOCABULARY, LAYERS, ROWS, BLOCKS; OF_TEAM, rows of a team at
//       once; BIASED; CHOOSES, DRAWS; LOAD, bytes that
//       rows are read by; kBestAt in shared memory. Tensors are decode_rows.cuh's, the state y; kOutputs, behind all: tokens or scores,
//       and the seed and the number of the step, which goes one on.
#pragma once
#include "kernels/decode/decode_best.cuh"
#include "kernels/decode/decode_rows.cuh"

DEVICE u32 word_like(float) { return 0; }
DEVICE u64 word_like(double) { return 0; }

template <class Pass> struct DecodeChoice {
  using Element = typename Pass::Element;
  using Real = Sum<Element>;
  static constexpr int kOfTeam = Pass::OF_TEAM;
  using Rows = TeamRows<Element, Pass::HIDDEN, Pass::LOAD, Pass::TEAM, kOfTeam, Pass::AT_ONCE / kOfTeam>;
  static constexpr int kSamples = Pass::SAMPLES, kTeams = Pass::THREADS / Pass::TEAM, kWarps = Pass::THREADS / 32;
  static constexpr int kReal = sizeof(Real), kBest = 2 * kReal, kCounterBytes = 16;
  using Team = TeamSums<Pass::TEAM, kSamples>;
  static constexpr int kOwn = Team::kOwn;
  static constexpr int kRounds = ceil_div(Pass::ROWS, kTeams * kOfTeam);
  const Params& params;
  const u32 memory = shared_address(shared_memory);
  DEVICE explicit DecodeChoice(const Params& p) : params(p) {}

  // One of a team's rows in a round, -1 behind the block's last one.
  DEVICE int row_of(int team, int round, int r) const {
    const int own = (round * kOfTeam + r) * kTeams + team, row = blockIdx.y * Pass::ROWS + own;
    return round < kRounds && own < Pass::ROWS && row < Pass::VOCABULARY ? row : -1;
  }
  DEVICE const Element* at(int row) const {
    return row < 0 ? nullptr : decoder_tensor<Element>(params, kHead) + i64(row) * Pass::HIDDEN;
  }
  DEVICE Real bias_of(int row) const {
    if constexpr (Pass::BIASED) return row < 0 ? Real(0) : widen(decoder_tensor<Element>(params, kHeadBias)[row]);
    return 0;
  }
  template <class T> DEVICE T* output(int i) const { return static_cast<T*>(const_cast<void*>(params.weights[Pass::kOutputs + i])); }

  DEVICE void run() const {
    const int team = threadIdx.x / Pass::TEAM, lane = threadIdx.x % Pass::TEAM, batch = int(params.batch);
    Rows weights(lane);
    weights.fetch([&](int r) { return at(row_of(team, 0, r)); });
    Real bias[kOfTeam];
    UNROLL for (int r = 0; r < kOfTeam; ++r) bias[r] = bias_of(row_of(team, 0, r));
    wait_for_kernel_before();
    start_next_kernel();
    const Element* const state = static_cast<const Element*>(params.y) + i64(Pass::LAYERS - 1) * batch * Pass::HIDDEN;
    bring_vectors<Element, kSamples, Rows::kVector, Pass::THREADS, Pass::LOAD>(memory, [&](int s, int column) -> const Element* {
      return s < batch && column < Pass::HIDDEN ? state + i64(s) * Pass::HIDDEN + column : nullptr;
    });
    u64 seed = 0, step = 0;
    Real temperature = 1;
    if constexpr (Pass::DRAWS) {
      const u64* const numbers = output<u64>(1);
      seed = numbers[0], step = numbers[1];
      const u64 bits = reinterpret_cast<u64>(params.weights[kTemperature]);
      temperature = Real(double_of(u32(bits), u32(bits >> 32)));
    }
    __syncthreads();
    Best<Real> best[kOwn];
    ROLL for (int round = 0; round < kRounds; ++round) {
      Real sums[kOfTeam][kSamples] = {};
      const auto rows = [&](int r) { return at(row_of(team, round, r)); };
      const auto next = [&](int r) { return at(row_of(team, round + 1, r)); };
      weights.template multiply<(kRounds > 1)>(rows, next, memory, sums);
      UNROLL for (int r = 0; r < kOfTeam; ++r) {
        const int row = row_of(team, round, r);
        Team::add_up(lane, sums[r]);
        UNROLL for (int i = 0; i < kOwn; ++i) {
          const int sample = Team::sample(lane, i);
          Real score = sums[r][i];
          if (row < 0 || sample >= batch || !Team::owns(lane)) continue;
          score += bias[r];
          if constexpr (!Pass::CHOOSES) store_global(output<Real>(0) + i64(sample) * Pass::VOCABULARY + row, score);
          if constexpr (Pass::DRAWS) score = score / temperature + gumbel<Real>(seed, step, sample, row);
          best[i].take(score, row);
        }
        if constexpr (kRounds > 1) bias[r] = bias_of(row_of(team, round + 1, r));
      }
    }
    if constexpr (Pass::CHOOSES) {
      leave_best(best);
      __syncthreads();
      if (!__syncthreads_or(threadIdx.x == 0 && count_up(static_cast<u32*>(params.sums)) == u32(Pass::BLOCKS - 1))) return;
      choose();
      if (Pass::DRAWS && threadIdx.x == 0) store_global(output<u64>(1) + 1, step + 1);
    }
  }

  DEVICE char* left(int block, int sample) const {
    return static_cast<char*>(params.sums) + kCounterBytes + (i64(block) * kSamples + sample) * kBest;
  }
  DEVICE void leave_best(const Best<Real> (&best)[kOwn]) const {
    const int team = threadIdx.x / Pass::TEAM, lane = threadIdx.x % Pass::TEAM;
    const auto place = [&](int team, int sample) { return memory + Pass::kBestAt + (team * kSamples + sample) * kBest; };
    UNROLL for (int i = 0; i < kOwn; ++i) {
      const int sample = Team::sample(lane, i);
      if (!Team::owns(lane)) continue;
      store_shared(place(team, sample), best[i].score);
      store_shared(place(team, sample) + kReal, best[i].token);
    }
    __syncthreads();
    ROLL for (int sample = threadIdx.x / 32; sample < kSamples; sample += kWarps) {
      const Best<Real> own = best_of_warp<Real>(kTeams, [&](int team) {
        return Best<Real>{load_sum(place(team, sample), Real()), load_u32(place(team, sample) + kReal)};
      });
      if (threadIdx.x % 32) continue;
      char* const to = left(blockIdx.y, sample);
      store_global(reinterpret_cast<Real*>(to), own.score);
      using Word = decltype(word_like(Real()));  // all of what is read
      store_global(reinterpret_cast<Word*>(to + kReal), Word(own.token));
    }
  }
  DEVICE void choose() const {
    ROLL for (int sample = threadIdx.x / 32; sample < kSamples; sample += kWarps) {
      const Best<Real> all = best_of_warp<Real>(Pass::BLOCKS, [&](int block) {
        u32 words[kBest / 4];
        load_now<kBest>(left(block, sample), words);
        if constexpr (kReal == 8)
          return Best<Real>{double_of(words[0], words[1]), words[2]};
        else
          return Best<Real>{__uint_as_float(words[0]), words[1]};
      });
      if (threadIdx.x % 32 == 0 && sample < params.batch) store_global(output<i64>(0) + sample, i64(all.token));
    }
  }
};
