// Operands of the matrix unit that lanes ask memory for themselves, of a weight and of states as they lie: which element is which
// k is free, if both are read alike. A lane's piece of 16 bytes has the k's that are its own in two steps (of doubles: in one).
#pragma once
#include "multiply/mma.cuh"

// Operands made of words, and their products
template <class Math> struct FewMath {
  using Element = typename Math::Element;
  using Word = typename WordOf<Element>::type;
  using Total = Sum<Element>;
  static constexpr int kSize = sizeof(Element), kPiece = 16 / kSize, kChunk = 4 * kPiece;  // elements: of a lane, of four
  static constexpr int kWords = 16 / int(sizeof(Word)), kSteps = kWords / 2;               // of a piece
  using A = typename Math::A;
  using B = typename Math::B;
  struct Sums { Total sum[4] = {}, low[4] = {}; };
  static DEVICE A left(Word x0, Word x1, Word x2, Word x3) { return operand<A>({x0, x1, x2, x3}); }
  static DEVICE B right(Word x0, Word x1) { return operand<B>({x0, x1}); }
  template <class Operand, int N> static DEVICE Operand operand(const Word (&x)[N]) {
    Operand made;
    UNROLL for (int i = 0; i < N; ++i) Math::template put<true>(made, i, x[i]);
    return made;
  }
  // float: the products of high parts of two steps start from zero; the others, which infinities make NaN, do not count then.
  template <int STEPS> static DEVICE void multiply(Sums& y, const A (&a)[STEPS], const B (&b)[STEPS]) {
    if constexpr (Math::kRepairs) {
      float high[4] = {};
      UNROLL for (int s = 0; s < STEPS; ++s) Math::multiply_apart(high, y.low, a[s], b[s]);
      add_sums(y.sum, high);
    } else {
      UNROLL for (int s = 0; s < STEPS; ++s) Math::template multiply<Math::kStep>(y.sum, a[s], b[s]);
    }
  }
  static DEVICE Total total(const Sums& y, int i) {
    if constexpr (Math::kRepairs) return y.sum[i] + or_zero(y.low[i]);
    return y.sum[i];
  }
};

// What a lane has asked memory for of a row, BYTES by accesses of LOAD. Elements of 2 bytes that come one by one have a register
// each until they are used.
template <class Math, int LOAD, int BYTES = 16> struct FewPiece {
  using Base = FewMath<Math>;
  using Element = typename Base::Element;
  static constexpr int kEach = LOAD / Base::kSize, kAccesses = BYTES / LOAD, kOfOne = LOAD < 4 ? 1 : LOAD / 4;  // registers
  u32 of[kAccesses][kOfOne];
  // `left` elements are there from `from` on, none if that is not positive. MADE by a kernel that had not ended when this one
  // started.
  template <bool MADE> DEVICE void ask(const Element* from, int left) {
    UNROLL for (int i = 0; i < kAccesses; ++i) {
      if constexpr (MADE)
        load_made<LOAD>(from + i * kEach, of[i], i * kEach < left);
      else
        load_global<LOAD>(from + i * kEach, of[i], i * kEach < left);
    }
  }
  // The same where zeros are not needed for what is not there
  template <bool MADE> DEVICE void ask_some(const Element* from, int left) {
    UNROLL for (int i = 0; i < kAccesses; ++i) load_some<LOAD, MADE>(from + i * kEach, of[i], i * kEach < left);
  }
  DEVICE typename Base::Word word(int i) const {
    const u32* all = &of[0][0];
    if constexpr (Base::kSize == 8)
      return double_of(all[i * 2], all[i * 2 + 1]);
    else if constexpr (LOAD < 4)
      return all[i * 2] | all[i * 2 + 1] << 16;
    else
      return all[i];
  }
};
