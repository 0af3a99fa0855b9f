// Rows that accesses of 8 bytes do not fit, those of odd numbers of elements above all. Eight of them and more are one run of
// memory, which 16 bytes divide: it comes to shared memory and leaves it 16 bytes at a time, and lies there as in memory.
// Rows are taken out of it, and put into it, by words, wherever they begin.
#pragma once
#include "move/memory.cuh"

// A run of BYTES to shared memory, by THREADS; zeros behind those that are `left` of the tensor.
template <int BYTES, int THREADS> DEVICE void fetch_run(u32 to, const void* from, int left, int thread) {
  static_assert(BYTES % 16 == 0);
  const char* place = static_cast<const char*>(from);
  if (left >= BYTES) {
    UNROLL for (int i = 0; i < ceil_div(BYTES / 16, THREADS); ++i) {
      const int at = (i * THREADS + thread) * 16;
      if (BYTES / 16 % THREADS == 0 || at < BYTES) copy_async<16>(to + at, place + at, true);
    }
  } else {
    const int whole = left > 0 ? left / 16 * 16 : 0;
    ROLL for (int at = thread * 16; at < BYTES; at += THREADS * 16)
      if (at != whole) copy_async<16>(to + at, at < whole ? place + at : from, at < whole);
    if (thread < 8)  // nothing is read behind the tensor, not even of a piece that begins in it
      store_shared(to + whole + thread * 2,
                   whole + thread * 2 < left ? *reinterpret_cast<const u16*>(place + whole + thread * 2) : u16(0));
  }
}
// The other way
template <int BYTES, int THREADS> DEVICE void send_run(void* to, u32 from, int left, int thread) {
  static_assert(BYTES % 16 == 0);
  UNROLL for (int i = 0; i < ceil_div(BYTES / 16, THREADS); ++i) {
    const int at = (i * THREADS + thread) * 16;
    if (at < BYTES && at + 16 <= left) store_words<16>(static_cast<char*>(to) + at, load_words<16>(from + at));
  }
  const int rest = left / 16 * 16 + thread * 2;
  if (rest < left) store_words<2>(static_cast<char*>(to) + rest, load_words<2>(from + rest));
}

// Words from a row's `feature` on, of the row that lies at `row`; zeros behind its FEATURES, unless all are `inside`.
template <class Element, int FEATURES>
DEVICE void take_words(u32 row, int feature, bool inside, int words, u32 (&word)[4]) {
  constexpr int kEach = 4 / sizeof(Element);
  const u32 at = row + feature * int(sizeof(Element));
  if constexpr (FEATURES * sizeof(Element) % 4 == 0) {
    UNROLL for (int i = 0; i < words; ++i)
      if (inside || feature + i * kEach < FEATURES) word[i] = load_u32(at + i * 4);
  } else {
    const u32 shift = at % 4 * 8;
    u32 w[5] = {};  // from the one on in which the first element lies
    UNROLL for (int i = 0; i <= words; ++i)
      if (inside || feature + i * 2 - 1 < FEATURES) w[i] = load_u32(at / 4 * 4 + i * 4);
    UNROLL for (int i = 0; i < words; ++i) {
      word[i] = u32((u64(w[i + 1]) << 32 | w[i]) >> shift);
      if (!inside && feature + i * 2 + 1 >= FEATURES) word[i] &= feature + i * 2 < FEATURES ? 0xffff : 0;
    }
  }
}
// The other way; nothing is written behind the row.
template <class Element, int FEATURES>
DEVICE void put_words(u32 row, int feature, bool inside, int words, const u32 (&word)[4]) {
  constexpr int kEach = 4 / sizeof(Element);
  const u32 at = row + feature * int(sizeof(Element));
  if constexpr (FEATURES * sizeof(Element) % 4 == 0) {
    UNROLL for (int i = 0; i < words; ++i)
      if (inside || feature + i * kEach < FEATURES) store_shared(at + i * 4, word[i]);
  } else if (inside && words == 4) {  // three whole words, and half ones before or behind them
    const bool odd = at % 4;
    UNROLL for (int i = 0; i < 3; ++i)
      store_shared(at + odd * 2 + i * 4, u32((u64(word[i + 1]) << 32 | word[i]) >> odd * 16));
    store_shared(at + (odd ? 0 : 12), u16(odd ? word[0] : word[3]));
    store_shared(at + 14, u16(word[3] >> 16));
  } else {
    UNROLL for (int i = 0; i < words * 2; ++i)
      if (inside || feature + i < FEATURES) store_shared(at + i * 2, u16(word[i / 2] >> i % 2 * 16));
  }
}

// Eight elements of 16 bits that lie anywhere in memory, as words of 4 bytes; `left` of them are there.
struct Eight {
  u32 word[5];
  static DEVICE const char* first_word(const void* from) { return reinterpret_cast<const char*>(u64(from) & ~u64(3)); }

  // The tensor goes on for two elements and more behind them.
  DEVICE void load(const void* from) { load_five(first_word(from), word, true); }
  // Nothing is read of what lies behind `end`, but for what shares a word with an element.
  DEVICE void load(const void* from, const void* end, int left) {
    const char* at = first_word(from);
    const bool whole = at + 20 <= static_cast<const char*>(end);
    load_five(at, word, whole && left > 0);
    if (whole || left <= 0) return;
    ROLL for (int i = 0; i < 10; ++i) {
      if (at + i * 2 >= static_cast<const char*>(end)) return;
      const u32 half = u32(*reinterpret_cast<const u16*>(at + i * 2)) << i % 2 * 16;
      UNROLL for (int j = 0; j < 5; ++j) word[j] |= j == i / 2 ? half : 0;
    }
  }
  // To 16 bytes of shared memory, zeros behind those that are there
  DEVICE void put(u32 to, const void* from, int left) const {
    u32 x[4];
    UNROLL for (int i = 0; i < 4; ++i) {
      x[i] = u32((u64(word[i + 1]) << 32 | word[i]) >> (u64(from) & 2) * 8);
      if (left < i * 2 + 2) x[i] &= left > i * 2 ? 0xffff : 0;
    }
    store_u32x4(to, x);
  }
};
