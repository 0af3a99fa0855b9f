// All bits of the rows that sequences have, set: what spread.cuh's blocks hand on in these rows is there when it is something else.
//
// Pass: Element; THREADS, HIDDEN, DOWN false; kWalk (recurrent_rows.cuh), behind which is what lies between rows of gates; kOutputs, and
//       BACKWARD: whether it is y's rows, and, RESET_BEFORE the product, the first output's, or, backward, those of gradients of reset and
//       update (y and the first output) and of the candidate's product (the third), or, RESET_BEFORE, of the candidate (the second)
#pragma once
#include "kernels/recurrent/recurrent_rows.cuh"
#include "move/memory.cuh"

template <class Pass> struct RecurrentFill {
  using Element = typename Pass::Element;
  const Params& params;
  DEVICE explicit RecurrentFill(const Params& p) : params(p) {}

  static constexpr int kRow = Pass::HIDDEN * sizeof(Element), kWord = kRow % 16 == 0 ? 16 : kRow % 4 == 0 ? 4 : 2;
  static constexpr int kRows = Pass::THREADS / 32;  // a warp takes one

  DEVICE void fill(void* tensor, i64 first) const {
    char* const to = static_cast<char*>(tensor) + first * i64(sizeof(Element));
    const u64 set[2] = {~u64(0), ~u64(0)};
    for (int at = threadIdx.x % 32 * kWord; at < kRow; at += 32 * kWord)
      store_words<kWord>(to + at, reinterpret_cast<const Words<kWord>&>(set));
  }
  DEVICE void run() const {
    const Walk walk(params, Pass::kWalk);
    const i64 sequence = blockIdx.x, gate_row = number_at(params, Pass::kWalk + 8), length = walk.length(sequence);
    const i64 first = walk.first ? walk.first[sequence] : sequence * walk.of_sequence;
    for (i64 step = i64(blockIdx.y) * kRows + threadIdx.x / 32; step < length; step += i64(gridDim.y) * kRows) {
      const i64 row = first + walk.offset(step);
      if (row < 0 || row >= walk.rows) continue;
      if constexpr (Pass::BACKWARD) {
        fill(params.y, row * gate_row);
        fill(tensor_at<void>(params, Pass::kOutputs), row * gate_row);
        fill(tensor_at<void>(params, Pass::kOutputs + (Pass::RESET_BEFORE ? 1 : 2)),
             row * (Pass::RESET_BEFORE ? gate_row : i64(Pass::HIDDEN)));
      } else {
        fill(params.y, row * Pass::HIDDEN);
        if constexpr (Pass::RESET_BEFORE) fill(tensor_at<void>(params, Pass::kOutputs), row * Pass::HIDDEN);
      }
    }
  }
};
