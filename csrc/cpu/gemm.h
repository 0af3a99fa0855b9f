// Two small matrix products and one transpose: all the CPU kernels are made of these.
//
// multiply: C[m, n] (+)= the sum over terms of A[m, k] B[k, n], for a batch of equally shaped problems. A may
// have any strides (its elements are broadcast); B and C are contiguous along n, where the vectors run. A column
// panel of 1 to 4 vectors is kept in registers for as many rows as fit. Called by contract.h.

template <class T> struct Operand {
  const T* data;
  int64_t row, col;   // strides in elements; B and C ignore col, which is 1
  int64_t next = 0;   // from one problem of the batch, or one term of its sum, to the next
};

struct Size {
  int64_t m, n, k;
  int64_t count = 1, terms = 1;  // one of them is 1
};

constexpr int kMaxVecs = 4;
#if defined(ISA_AVX512)
constexpr int kTileRows[kMaxVecs + 1] = {0, 16, 8, 8, 4};  // 32 registers: at most 24 accumulators
#else
constexpr int kTileRows[kMaxVecs + 1] = {0, 8, 4, 4, 2};   // 16 registers: at most 12
#endif

// ROWS x VECS vectors of C. The sum starts at zero and is added to C at the end, so that a long reduction
// done in parts (a weight gradient) is a sum of partial sums. TAIL: the last vector has `last` lanes.
template <class T, int ROWS, int VECS, bool TAIL>
FL_INLINE void multiply_tile(Size size, Operand<T> a, Operand<T> b, T* c, int64_t c_row, bool add, int last) {
  constexpr int L = kLanes<T>;
  Vec<T> sum[ROWS][VECS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < VECS; ++v) sum[r][v] = Vec<T>{};
  for (int64_t term = 0; term < size.terms; ++term, a.data += a.next, b.data += b.next) {
    const T *at = a.data, *bt = b.data;
#pragma GCC unroll 1
    for (int64_t i = 0; i < size.k; ++i, at += a.col, bt += b.row) {
      Vec<T> bs[VECS];
#pragma GCC unroll 4
      for (int v = 0; v < VECS; ++v)
        bs[v] = TAIL && v == VECS - 1 ? load_first(bt + v * L, last) : load(bt + v * L);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < VECS; ++v) sum[r][v] += splat(at[r * a.row]) * bs[v];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < VECS; ++v) {
      T* to = c + r * c_row + v * L;
      if (TAIL && v == VECS - 1)
        store_first(to, add ? load_first(to, last) + sum[r][v] : sum[r][v], last);
      else
        store(to, add ? load(to) + sum[r][v] : sum[r][v]);
    }
}

template <class T, int ROWS, int VECS, bool TAIL>
FL_INLINE void multiply_rows(Size size, Operand<T> a, Operand<T> b, T* c, int64_t c_row, bool add, int last) {
  for (; size.m >= ROWS; size.m -= ROWS, a.data += ROWS * a.row, c += ROWS * c_row)
    multiply_tile<T, ROWS, VECS, TAIL>(size, a, b, c, c_row, add, last);
  if constexpr (ROWS > 1)
    if (size.m) multiply_rows<T, ROWS / 2, VECS, TAIL>(size, a, b, c, c_row, add, last);
}

// One column panel of every problem of the batch. A panel that many rows will reuse and whose rows lie far
// apart is copied together first: large strides fall on few sets of the first-level cache.
template <class T, int VECS, bool TAIL>
__attribute__((noinline)) void multiply_panel(Size size, Operand<T> a, Operand<T> b, Operand<T> c, bool add, int last,
                                              T* packed) {
  constexpr int L = kLanes<T>, W = VECS * L;
  const bool pack = packed && size.m >= 4 * kTileRows[VECS] && b.row * int64_t(sizeof(T)) >= 512;
  for (int64_t i = 0; i < size.count; ++i, a.data += a.next, b.data += b.next, c.data += c.next) {
    Operand<T> panel = b;
    if (pack) {
      for (int64_t j = 0; j < size.k; ++j)
        for (int v = 0; v < VECS; ++v) {
          const T* from = b.data + j * b.row + v * L;
          store(packed + j * W + v * L, TAIL && v == VECS - 1 ? load_first(from, last) : load(from));
        }
      panel = {packed, W, 1};
    }
    multiply_rows<T, kTileRows[VECS], VECS, TAIL>(size, a, panel, const_cast<T*>(c.data), c.row, add, last);
  }
}

// Longer sums are made of pieces: one long chain of additions loses more to rounding, and its panel of B leaves the
// first-level cache.
constexpr int64_t kLongestSum = 192;
template <class T> constexpr int64_t kPackedSize = kLongestSum * kMaxVecs * kLanes<T>;

// `packed`: scratch of kPackedSize elements, or null.
template <class T> void multiply(Size size, Operand<T> a, Operand<T> b, Operand<T> c, bool add, T* packed) {
  constexpr int L = kLanes<T>;
  if (size.terms > 1) packed = nullptr;
  for (int64_t pieces = (size.k + kLongestSum - 1) / kLongestSum, left = size.k; pieces; --pieces) {
    size.k = (left + pieces - 1) / pieces;
    Operand<T> panel_b = b, panel_c = c;
    int64_t n = size.n, vecs = (n + L - 1) / L;
    for (int64_t panels = (vecs + kMaxVecs - 1) / kMaxVecs; panels; --panels) {
      const int64_t width = (vecs + panels - 1) / panels;  // panels of nearly equal width: 5 is 3 + 2
      const bool tail = n < width * L;
      const int last = tail ? int(n - (width - 1) * L) : L;
#define FL_PANEL(VECS)                                                                     \
  case VECS:                                                                               \
    tail ? multiply_panel<T, VECS, true>(size, a, panel_b, panel_c, add, last, packed)     \
         : multiply_panel<T, VECS, false>(size, a, panel_b, panel_c, add, last, packed);   \
    break;
      switch (width) { FL_PANEL(1) FL_PANEL(2) FL_PANEL(3) FL_PANEL(4) }
#undef FL_PANEL
      panel_b.data += width * L, panel_c.data += width * L, n -= width * L, vecs -= width;
    }
    a.data += size.k * a.col, b.data += size.k * b.row;
    left -= size.k;
    add = true;
  }
}

template <class T, int H, bool HIGH> FL_INLINE Vec<T> exchange(Vec<T> x, Vec<T> y) {
  constexpr int L = kLanes<T>;
  Mask<T> from;  // lanes with bit H clear come from x, the others from y, moved by H towards each other
  for (int i = 0; i < L; ++i) from[i] = HIGH ? (i & H ? L + i : i + H) : (i & H ? L + i - H : i);
#if defined(__clang__)
  Vec<T> out;
  for (int i = 0; i < L; ++i) out[i] = from[i] < L ? x[from[i]] : y[from[i] - L];
  return out;
#else
  return __builtin_shuffle(x, y, from);
#endif
}

template <class T, int H> FL_INLINE void transpose_step(Vec<T>* rows) {
  constexpr int L = kLanes<T>;
#pragma GCC unroll 16
  for (int i = 0; i < L; ++i)
    if (!(i & H)) {
      const Vec<T> x = rows[i], y = rows[i + H];
      rows[i] = exchange<T, H, false>(x, y);
      rows[i + H] = exchange<T, H, true>(x, y);
    }
  if constexpr (2 * H < L) transpose_step<T, 2 * H>(rows);
}

// to[c, r] = from[r, c]
template <class T>
void transpose(int64_t rows, int64_t cols, const T* from, int64_t from_row, T* to, int64_t to_row) {
  constexpr int L = kLanes<T>;
  for (int64_t r = 0; r < rows; r += L)
    for (int64_t c = 0; c < cols; c += L) {
      const int height = int(rows - r < L ? rows - r : L), width = int(cols - c < L ? cols - c : L);
      Vec<T> block[L];
      const T* in = from + r * from_row + c;
      T* out = to + c * to_row + r;
      if (height == L && width == L) {
#pragma GCC unroll 16
        for (int i = 0; i < L; ++i) block[i] = load(in + i * from_row);
        transpose_step<T, 1>(block);
#pragma GCC unroll 16
        for (int i = 0; i < L; ++i) store(out + i * to_row, block[i]);
      } else {
        for (int i = 0; i < L; ++i) block[i] = i < height ? load_first(in + i * from_row, width) : Vec<T>{};
        transpose_step<T, 1>(block);
        for (int i = 0; i < width; ++i) store_first(out + i * to_row, block[i], height);
      }
    }
}

// The dot products of ROWS rows with COLS rows, from `from` to `to`: as many as a vector has lanes, so that one transpose
// adds up the lanes of all.
template <class T, int ROWS, int COLS>
FL_INLINE Vec<T> dot_tile(const T* const* a, const T* const* b, int64_t from, int64_t to) {
  constexpr int L = kLanes<T>;
  static_assert(ROWS * COLS == L, "one sum for each lane");
  Vec<T> sums[L] = {};
  auto step = [&](auto&& read) __attribute__((always_inline)) {
    Vec<T> as[ROWS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) as[r] = read(a[r]);
#pragma GCC unroll 4
    for (int c = 0; c < COLS; ++c) {
      const Vec<T> bs = read(b[c]);
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r) sums[r * COLS + c] += as[r] * bs;
    }
  };
  for (; from + L <= to; from += L) step([&](const T* row) { return load(row + from); });
  if (from < to) step([&](const T* row) { return load_first(row + from, int(to - from)); });
  transpose_step<T, 1>(sums);
  for (int i = 1; i < L; ++i) sums[0] += sums[i];
  return sums[0];
}

// C[m, n] (+)= A[m, k] B[n, k]', where vectors run along k: for few rows of A, as a load serves few products.
template <class T> void multiply_dots(Size size, Operand<T> a, Operand<T> b, Operand<T> c, bool add) {
  constexpr int COLS = kLanes<T> < 4 ? kLanes<T> : 4, ROWS = kLanes<T> / COLS;
  constexpr int64_t kPiece = 1024;  // of a sum: COLS rows of B stay in the first-level cache for all rows of A
  for (int64_t from = 0; from < size.k; from += kPiece, add = true)
    for (int64_t n = 0; n < size.n; n += COLS)
      for (int64_t m = 0; m < size.m; m += ROWS) {
        const int rows = int(std::min<int64_t>(ROWS, size.m - m)), cols = int(std::min<int64_t>(COLS, size.n - n));
        const T *as[ROWS], *bs[COLS];  // the last ones stand in for those beyond them
        for (int i = 0; i < ROWS; ++i) as[i] = a.data + (m + std::min(i, rows - 1)) * a.row;
        for (int j = 0; j < COLS; ++j) bs[j] = b.data + (n + std::min(j, cols - 1)) * b.row;
        const Vec<T> sums = dot_tile<T, ROWS, COLS>(as, bs, from, std::min(size.k, from + kPiece));
        for (int i = 0; i < rows; ++i) {
          T* to = const_cast<T*>(c.data) + (m + i) * c.row + n;
          for (int j = 0; j < cols; ++j) to[j] = sums[i * COLS + j] + (add ? to[j] : T(0));
        }
      }
}
