// One layer's step of a decoder, for a few samples: from the tokens' rows of the embedding, and the context behind them, or from
// the state that the layer before has made.
//     r = sigmoid(W_r x + b_r + U_r h + c_r), z likewise, n = act(W_n x + b_n + r * (U_n h + c_n)), h' = n + z * (h - n)
// A block has OWN features; a team of lanes has a gate of one, its rows of W and U.
//
// Pass: Element, Gate and Candidate, of which Activation is the function; THREADS, TEAM, AT_ONCE, SAMPLES, OWN; EMBEDDING, CONTEXT,
//       INPUTS and HIDDEN features; LAYER; BIASED; LOAD_INPUTS and LOAD_STATES, bytes that rows are read by, LOAD_VECTOR, those of
//       inputs; kStatesAt and kSumsAt in shared memory. Tensors are decode_rows.cuh's, tokens x, and the new state y; params.sums begins with a counter.
#pragma once
#include "finish/pointwise.cuh"
#include "kernels/decode/decode_rows.cuh"

template <class Pass> struct DecodeStep {
  using Element = typename Pass::Element;
  using Real = Sum<Element>;
  using Inputs = TeamRows<Element, Pass::INPUTS, Pass::LOAD_INPUTS, Pass::TEAM, 1, Pass::AT_ONCE>;
  using States = TeamRows<Element, Pass::HIDDEN, Pass::LOAD_STATES, Pass::TEAM, 1, Pass::AT_ONCE>;
  static constexpr int kGates = 3, kSamples = Pass::SAMPLES, kReal = sizeof(Real), kTensors = kLayers + 4 * Pass::LAYER;
  const Params& params;
  const u32 memory = shared_address(shared_memory);
  DEVICE explicit DecodeStep(const Params& p) : params(p) {}

  DEVICE u32 sum_at(int feature, int gate, int part, int sample) const {
    return memory + Pass::kSumsAt + (((feature * kGates + gate) * 2 + part) * kSamples + sample) * kReal;
  }
  DEVICE const Element* of_layer(int i) const { return decoder_tensor<Element>(params, kTensors + i); }

  // Whether the embedding has a sample's token: if not, its state is no number.
  DEVICE bool has_token(int sample) const {
    const i64 token = static_cast<const i64*>(params.x)[sample];
    return token >= 0 && token < reinterpret_cast<i64>(params.weights[kEmbeddingRows]);
  }
  DEVICE void bring_inputs() const {
    const int batch = int(params.batch);
    const Element* const context = decoder_tensor<Element>(params, kContext);
    const Element* const embedding = decoder_tensor<Element>(params, kEmbedding);
    const i64* const tokens = static_cast<const i64*>(params.x);
    bring_vectors<Element, kSamples, Inputs::kVector, Pass::THREADS, Pass::LOAD_VECTOR>(
        memory, [&](int sample, int column) -> const Element* {
          if (sample >= batch || column >= Pass::INPUTS) return nullptr;
          if constexpr (Pass::LAYER > 0) {
            const i64 before = i64(Pass::LAYER - 1) * batch + sample;
            return static_cast<const Element*>(params.y) + before * Pass::HIDDEN + column;
          } else {
            if (column >= Pass::EMBEDDING) return context + i64(sample) * Pass::CONTEXT + column - Pass::EMBEDDING;
            return has_token(sample) ? embedding + tokens[sample] * Pass::EMBEDDING + column : nullptr;
          }
        });
  }

  DEVICE void run() const {
    const int team = threadIdx.x / Pass::TEAM, lane = threadIdx.x % Pass::TEAM, batch = int(params.batch);
    const int first = blockIdx.y * Pass::OWN, own = team / kGates, gate = team % kGates;
    const bool there = own < Pass::OWN && first + own < Pass::HIDDEN;
    const i64 row = i64(gate) * Pass::HIDDEN + first + own;
    const Element* const row_of_inputs = there ? of_layer(0) + row * Pass::INPUTS : nullptr;
    const Element* const row_of_states = there ? of_layer(1) + row * Pass::HIDDEN : nullptr;
    Inputs inputs(lane);
    States states(lane);
    const auto rows_of_inputs = [&](int) { return row_of_inputs; };
    const auto rows_of_states = [&](int) { return row_of_states; };
    inputs.fetch(rows_of_inputs), states.fetch(rows_of_states);
    // Of the feature and the sample that this thread finishes
    const int feature = threadIdx.x % Pass::OWN, sample = threadIdx.x / Pass::OWN, at = first + feature;
    const bool finishes = sample < kSamples && sample < batch && at < Pass::HIDDEN;
    Real bias[2][kGates] = {};
    if constexpr (Pass::BIASED)
      UNROLL for (int part = 0; part < 2; ++part)
        UNROLL for (int g = 0; g < kGates; ++g)
          if (finishes) bias[part][g] = widen(of_layer(2 + part)[g * Pass::HIDDEN + at]);
    if (Pass::LAYER == 0 && blockIdx.y == 0 && threadIdx.x == 0) store_global(static_cast<u32*>(params.sums), u32(0));

    const Element* const state = decoder_tensor<Element>(params, kState) + i64(Pass::LAYER) * batch * Pass::HIDDEN;
    bring_inputs();
    bring_vectors<Element, kSamples, States::kVector, Pass::THREADS, Pass::LOAD_STATES>(
        memory + Pass::kStatesAt, [&](int s, int column) -> const Element* {
          return s < batch && column < Pass::HIDDEN ? state + i64(s) * Pass::HIDDEN + column : nullptr;
        });
    const bool is_number = Pass::LAYER > 0 || !finishes || has_token(sample);
    __syncthreads();
    Real of_inputs[1][kSamples] = {}, of_states[1][kSamples] = {};
    inputs.template multiply<false>(rows_of_inputs, rows_of_inputs, memory, of_inputs);
    states.template multiply<false>(rows_of_states, rows_of_states, memory + Pass::kStatesAt, of_states);
    using Team = TeamSums<Pass::TEAM, kSamples>;
    Team::add_up(lane, of_inputs[0]), Team::add_up(lane, of_states[0]);
    UNROLL for (int i = 0; i < Team::kOwn; ++i)
      if (own < Pass::OWN && Team::owns(lane)) {
        store_shared(sum_at(own, gate, 0, Team::sample(lane, i)), of_inputs[0][i]);
        store_shared(sum_at(own, gate, 1, Team::sample(lane, i)), of_states[0][i]);
      }
    __syncthreads();
    if (!finishes) return;
    Real sums[2][kGates];
    UNROLL for (int part = 0; part < 2; ++part)
      UNROLL for (int g = 0; g < kGates; ++g) sums[part][g] = load_sum(sum_at(feature, g, part, sample), Real()) + bias[part][g];
    const typename Pass::Gate::Activation sigmoid(params);
    const typename Pass::Candidate::Activation candidate(params);
    const Real r = sigmoid.of(sums[0][0] + sums[1][0]), z = sigmoid.of(sums[0][1] + sums[1][1]);
    const Real n = is_number ? candidate.of(sums[0][2] + r * sums[1][2]) : Real(__uint_as_float(0x7fffffff));
    const Real h = widen(load_element<Element>(memory + Pass::kStatesAt + (sample * States::kVector + at) * int(sizeof(Element))));
    Element* const to = static_cast<Element*>(params.y) + (i64(Pass::LAYER) * batch + sample) * Pass::HIDDEN + at;
    store_global(to, narrow<Element>(n + z * (h - n)));
  }
};
