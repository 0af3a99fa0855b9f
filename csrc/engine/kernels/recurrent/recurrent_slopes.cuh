// What a gated recurrent unit's way back multiplies gradients by, of all steps at once: from the inputs of its gates, their
// products with the states before each step, and those states (h):
//     s_z = (h - n) z (1 - z),  s_n = (1 - z) act'
//     s_r = s_n u r (1 - r), u the product U_n h and its bias;  RESET_BEFORE: h r (1 - r)
// and r and 1 - z. Over many steps a gradient is multiplied by each z, most of which lie near 1: what is left to that is what has to
// be exact.
//
// Pass: Element, Gate and Candidate, of which Activation is the function, Slope the candidate's; THREADS, HIDDEN, RESET_BEFORE,
//       HAS_BIAS; the tensors behind the weights (kInputs) are inputs of the second and third gate, products of all three, the states,
//       the numbers between rows of inputs and of products, and, as outputs behind y, s_z, s_n, r, 1 - z.
#pragma once
#include "finish/pointwise.cuh"
#include "move/memory.cuh"

template <class Pass> struct RecurrentSlopes {
  using Element = typename Pass::Element;
  using Real = Sum<Element>;
  const Params& params;
  DEVICE RecurrentSlopes(const Params& p) : params(p) {}
  DEVICE i64 number(int i) const { return reinterpret_cast<i64>(params.weights[Pass::kInputs + i]); }
  template <class T> DEVICE T* tensor(int i) const { return static_cast<T*>(const_cast<void*>(params.weights[Pass::kInputs + i])); }

  DEVICE void run() const {
    const i64 input_row = number(6), product_row = number(7);
    const Element *inputs[] = {static_cast<const Element*>(params.x), tensor<Element>(0), tensor<Element>(1)};
    const Element *products[] = {tensor<Element>(2), tensor<Element>(3), tensor<Element>(4)}, *states = tensor<Element>(5);
    const Element* const bias = static_cast<const Element*>(params.bias);
    Element* const outputs[] = {static_cast<Element*>(params.y), tensor<Element>(8), tensor<Element>(9), tensor<Element>(10),
                                tensor<Element>(11)};
    const typename Pass::Gate::Activation gate(params);
    const typename Pass::Candidate::Activation candidate(params);
    const typename Pass::Slope slope(params);
    const i64 count = params.batch * Pass::HIDDEN;
    for (i64 i = i64(blockIdx.x) * Pass::THREADS + threadIdx.x; i < count; i += i64(gridDim.x) * Pass::THREADS) {
      const i64 row = i / Pass::HIDDEN, feature = i % Pass::HIDDEN;
      Real x[3], product[3];
      UNROLL for (int g = 0; g < 3; ++g)
        x[g] = widen(inputs[g][row * input_row + feature]), product[g] = widen(products[g][row * product_row + feature]);
      const Real h = widen(states[i]), r = gate.of(x[0] + product[0]), of_z = x[1] + product[1];
      const Real z = gate.of(of_z), left = gate.of(-of_z);
      if constexpr (Pass::HAS_BIAS) product[2] += widen(bias[feature]);
      const Real sum = x[2] + (Pass::RESET_BEFORE ? product[2] : r * product[2]), n = candidate.of(sum);
      const Real of_candidate = left * slope.of(sum), of_r = r * (1 - r);
      store_global(outputs[0] + i, narrow<Element>(of_r * (Pass::RESET_BEFORE ? h : of_candidate * product[2])));
      store_global(outputs[1] + i, narrow<Element>((h - n) * z * left));
      store_global(outputs[2] + i, narrow<Element>(of_candidate));
      store_global(outputs[3] + i, narrow<Element>(r));
      store_global(outputs[4] + i, narrow<Element>(left));
    }
  }
};
