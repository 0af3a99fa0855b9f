// Where the rows of sequences lie, step after step, as recurrent kernels read it.
#pragma once
#include "types/params.cuh"

constexpr int kGates = 3;  // reset, update, candidate

// Tensors and numbers in the places behind the weights
template <class T> DEVICE T* tensor_at(const Params& params, int place) {
  return static_cast<T*>(const_cast<void*>(params.weights[place]));
}
DEVICE i64 number_at(const Params& params, int place) { return reinterpret_cast<i64>(params.weights[place]); }
// What is read at every step, from the feature `part` on: x, and the tensors from the place `second` on
template <class Element, int COUNT> struct Streams {
  const Element* of[COUNT];
  DEVICE Streams(const Params& params, int second, i64 part = 0) : of{static_cast<const Element*>(params.x) + part} {
    UNROLL for (int i = 1; i < COUNT; ++i) of[i] = tensor_at<Element>(params, second + i - 1) + part;
  }
  DEVICE const Element* operator[](int i) const { return of[i]; }
};

// maths/steps.py's Walk, and whether a sequence begins again at a row: what lies in eight places from a first one on. What these say
// of rows that tensors have not is left out.
struct Walk {
  const unsigned char* starts;
  const i64 *first, *lengths, *offsets;
  i64 steps, of_sequence, of_step, rows;
  DEVICE Walk(const Params& params, int at)
      : starts(tensor_at<unsigned char>(params, at)), first(tensor_at<i64>(params, at + 1)),
        lengths(tensor_at<i64>(params, at + 2)), offsets(tensor_at<i64>(params, at + 3)), steps(number_at(params, at + 4)),
        of_sequence(number_at(params, at + 5)), of_step(number_at(params, at + 6)), rows(number_at(params, at + 7)) {}
  DEVICE i64 length(i64 sequence) const { return lengths && lengths[sequence] < steps ? lengths[sequence] : steps; }
  DEVICE i64 offset(i64 step) const { return offsets ? offsets[step] : step * of_step; }
  // Steps of the longest of `count` sequences from `begin` on, of those that there are
  DEVICE u32 longest(i64 begin, int count, i64 sequences) const {
    i64 most = 0;
    for (i64 i = begin; i < begin + count && i < sequences; ++i)
      if (length(i) > most) most = length(i);
    return u32(most);
  }
};

// What a step is to a sequence: its code is 0 where there is none, or twice the row, and 2, with one more where it begins again.
struct Row {
  i64 code;
  DEVICE bool there() const { return code != 0; }
  DEVICE bool starts() const { return code & 1; }
  DEVICE i64 at(i64 row) const { return (code / 2 - 1) * row; }
};

// The rows of one sequence, which a thread reads ahead: an offset, what begins at its row, and the code of both, step after step.
// DOWN: from the sequence's last step to its first one.
template <bool DOWN> struct Ahead {
  const Walk& walk;
  i64 length, first, offset, code = 0;
  unsigned char starts = 0;
  DEVICE Ahead(const Walk& walk, i64 sequence, bool there)
      : walk(walk), length(there ? walk.length(sequence) : 0),
        first(there && walk.first ? walk.first[sequence] : sequence * walk.of_sequence), offset(offset_of(0)) {}
  DEVICE i64 offset_of(i64 step) const { return step < length ? walk.offset(DOWN ? length - 1 - step : step) : 0; }
  // What is known of the step before `step` is handed on, and what is to be known of `step` asked for.
  DEVICE Row advance(i64 step) {
    const i64 known = code + (starts != 0), row = first + offset;
    const bool there = step < length && row >= 0 && row < walk.rows;
    code = there ? 2 * row + 2 : 0;
    starts = there && walk.starts ? walk.starts[row] : 0;
    offset = offset_of(step + 1);
    return {known};
  }
};

// Rows of UNITS sequences in shared memory, of STEPS steps, a power of two, in turn
template <int UNITS, int STEPS> struct Rows {
  static_assert((STEPS & (STEPS - 1)) == 0);
  const u32 at;
  DEVICE u32 address(u32 step, int unit) const { return at + (step % STEPS * UNITS + unit) * 8; }
  DEVICE void publish(u32 step, int unit, Row row) const {
    UNROLL for (int i = 0; i < 2; ++i) store_shared(address(step, unit) + i * 4, u32(row.code >> i * 32));
  }
  DEVICE Row of(u32 step, int unit) const {
    u32 words[2];
    load_u32x2(address(step, unit), words);
    return {i64(u64(words[1]) << 32 | words[0])};
  }
};
