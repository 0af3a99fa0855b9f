// Element types and the arithmetic made of them. Self-contained: NVRTC comes without CUDA's headers.
//
// An Element is what memory holds; sums are kept in Sum<Element>: float, or double for double.
#pragma once
#include "ptx/instructions.cuh"

template <class Element> struct SumOf { using type = float; };
template <> struct SumOf<double> { using type = double; };
template <class Element> using Sum = typename SumOf<Element>::type;

DEVICE float widen(bf16 x) { return __uint_as_float(u32(x.bits) << 16); }
DEVICE float widen(f16 x) { return float_of(x); }
DEVICE float widen(float x) { return x; }
DEVICE double widen(double x) { return x; }

constexpr float kLargestFloat = 3.402823466e38f;
DEVICE bool is_finite(float x) { return fabsf(x) <= kLargestFloat; }
// What low parts of operands add to sums of high ones: of what is not finite they say nothing.
DEVICE float or_zero(float low) { return is_finite(low) ? low : 0.f; }

// What an Element is in registers before it is an operand
template <class Element> struct WordOf { using type = u32; };
template <> struct WordOf<double> { using type = double; };

// Two neighbours, rounded, as they lie in memory.
template <class Element> struct Pair;
template <> struct Pair<bf16> {
  u32 bits;
  DEVICE Pair(float x, float y) : bits(bf16x2_of(x, y)) {}
};
template <> struct Pair<f16> {
  u32 bits;
  DEVICE Pair(float x, float y) : bits(f16x2_of(x, y)) {}
};
template <> struct __align__(8) Pair<float> {
  float x, y;
  DEVICE Pair(float x, float y) : x(x), y(y) {}
};
template <> struct __align__(16) Pair<double> {
  double x, y;
  DEVICE Pair(double x, double y) : x(x), y(y) {}
};

// What another lane has, whose number differs in the bits of `by`
DEVICE u32 of_lane(u32 x, int by) { return __shfl_xor_sync(0xffffffff, x, by); }
DEVICE float of_lane(float x, int by) { return __uint_as_float(of_lane(__float_as_uint(x), by)); }
DEVICE double of_lane(double x, int by) {
  const u64 bits = *reinterpret_cast<const u64*>(&x);
  return double_of(of_lane(u32(bits), by), of_lane(u32(bits >> 32), by));
}

// Of LANES neighbouring lanes that have EACH words for each other, lane t of them gets what is its own, in the lanes' order.
template <int LANES, int EACH = 1> DEVICE void exchange_words(u32 (&words)[LANES * EACH]) {
  const int t = threadIdx.x % LANES;
  UNROLL for (int bit = 1; bit < LANES; bit *= 2)
    UNROLL for (int i = 0; i < LANES * EACH; ++i) {
      if (i / EACH & bit) continue;
      u32 &near = words[i], &next = words[i + bit * EACH];
      const u32 given = __shfl_xor_sync(0xffffffff, t & bit ? near : next, bit);
      near = t & bit ? given : near;
      next = t & bit ? next : given;
    }
}

// Adds elements to others, as words.
template <class Element, int N> DEVICE void add_words(u32 (&words)[N], const u32 (&there)[N]) {
  UNROLL for (int i = 0; i < N; ++i) {
    if constexpr (sizeof(Element) == 2) {
      const auto half = [](u32 word, int k) { return widen(Element{u16(word >> 16 * k)}); };
      words[i] = Pair<Element>(half(words[i], 0) + half(there[i], 0), half(words[i], 1) + half(there[i], 1)).bits;
    } else {
      words[i] = __float_as_uint(__uint_as_float(words[i]) + __uint_as_float(there[i]));
    }
  }
}

// Two neighbours as the words of their pieces, of 16 bits each, whose sums they are: of bf16, three hold all bits.
template <class Part, int PIECES> DEVICE void split(float x, float y, u32 (&word)[PIECES]) {
  UNROLL for (int i = 0; i < PIECES; ++i) {
    word[i] = Pair<Part>(x, y).bits;
    if (i < PIECES - 1) x -= widen(Part{u16(word[i])}), y -= widen(Part{u16(word[i] >> 16)});
  }
}

template <class Element> DEVICE Element narrow(Sum<Element> x);
template <> DEVICE bf16 narrow<bf16>(float x) { return {u16(Pair<bf16>(x, 0.f).bits)}; }
template <> DEVICE f16 narrow<f16>(float x) { return {u16(Pair<f16>(x, 0.f).bits)}; }
template <> DEVICE float narrow<float>(float x) { return x; }
template <> DEVICE double narrow<double>(double x) { return x; }

// The i-th of the numbers that words have side by side
template <class Element> DEVICE Sum<Element> number_of(const u32* words, int i) {
  if constexpr (sizeof(Element) == 8)
    return double_of(words[2 * i], words[2 * i + 1]);
  else if constexpr (sizeof(Element) == 4)
    return __uint_as_float(words[i]);
  else
    return widen(Element{u16(words[i / 2] >> i % 2 * 16)});
}

// Words that have number(0), number(1), ... side by side, rounded, of up to 32 bits each
template <class Element, int WORDS, class Number> DEVICE void words_of(u32 (&words)[WORDS], const Number& number) {
  UNROLL for (int i = 0; i < WORDS; ++i) {
    if constexpr (sizeof(Element) == 2)
      words[i] = Pair<Element>(number(2 * i), number(2 * i + 1)).bits;
    else
      words[i] = __float_as_uint(number(i));
  }
}

// Powers of two that bring the largest of the numbers of each weight to [1, 2), multiplied, by each warp together. Products of
// half-precision weights would underflow without. What is loaded is on its way before lanes exchange anything.
DEVICE float normals() { return 1; }
template <class Element, class... More> DEVICE float normals(const Element* weight, int count, More... more) {
  float most = 0;
  UNROLL_BY(8) for (int i = threadIdx.x % 32; i < count; i += 32) most = fmaxf(most, fabsf(widen(weight[i])));
  const float others = normals(more...);
  UNROLL for (int by = 16; by > 0; by /= 2)
    most = fmaxf(most, of_lane(most, by));
  const u32 exponent = __float_as_uint(most) >> 23;
  return others * (exponent > 0 && exponent < 254 ? __uint_as_float((254 - exponent) << 23) : 1.f);
}

// Products whose largest is about 2^-6 to 2^6 need none: what underflows then is 2^-18 of it.
DEVICE float if_needed(float scale) { return scale >= 1 / 64.f && scale <= 64 ? 1.f : scale; }
// Without asking whether there is anything to do: with a branch here, ptxas 13.0 let other numbers into registers that hold
// an operand of wgmma from unit to unit.
template <int N> DEVICE void scale_sums(float (&sums)[N], float by) {
  UNROLL for (float& sum : sums) sum *= by;
}

constexpr int ceil_div(int x, int y) { return (x + y - 1) / y; }
constexpr int round_up(int x, int y) { return ceil_div(x, y) * y; }
template <class T> constexpr bool is_void = false;
template <> constexpr bool is_void<void> = true;
template <class T> constexpr bool is_pointer = false;
template <class T> constexpr bool is_pointer<T*> = true;
template <class T, class U> constexpr bool is_same = false;
template <class T> constexpr bool is_same<T, T> = true;
