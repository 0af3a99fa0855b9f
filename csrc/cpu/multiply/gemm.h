// Two small matrix products and one transpose: all the CPU kernels are made of these.
//
// multiply: C[m, n] (+)= the sum over terms of A[m, k] B[k, n], for a batch of equally shaped problems. A may
// have any strides (its elements are broadcast); B and C are contiguous along n, where the vectors run. A column
// panel of 1 to 4 vectors is kept in registers for as many rows as fit.
// multiply_dots: C[m, n] (+)= A[m, k] B[n, k]', where the vectors run along k. Called by contract.h.

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
constexpr int kTileRows[kMaxVecs + 1] = {0, 16, 12, 8, 6};  // 32 registers: at most 24 accumulators
constexpr bool kMasks = true;                               // a vector of fewer lanes takes no longer than a whole one
#else
constexpr int kTileRows[kMaxVecs + 1] = {0, 8, 6, 4, 3};    // 16 registers: at most 12
constexpr bool kMasks = false;
#endif

// ROWS x VECS vectors of C. The sum starts at zero and is added to C at the end, so that a long reduction
// done in parts (a weight gradient) is a sum of partial sums. TAIL: the last vector has `last` lanes of its own; it has some of
// the one before it, and the same results for these, where there is one and masks take long.
template <class T, int ROWS, int VECS, bool TAIL>
FL_INLINE void multiply_tile(const Size& size, Operand<T> a, Operand<T> b, T* c, int64_t c_row, bool add, int last) {
  constexpr int L = kLanes<T>;
  constexpr bool MASKED = TAIL && (kMasks || VECS == 1), SHARED = TAIL && !MASKED;
  const int64_t end = SHARED ? (VECS - 2) * L + last : (VECS - 1) * L;  // where the last vector begins
  const auto place = [end](int v) __attribute__((always_inline)) { return v == VECS - 1 ? end : int64_t(v) * L; };
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
        bs[v] = MASKED && v == VECS - 1 ? load_first(bt + v * L, last) : load(bt + place(v));
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < VECS; ++v) sum[r][v] += splat(at[r * a.row]) * bs[v];
    }
  }
  const auto all = [&](auto&& f) __attribute__((always_inline)) {  // f(sum, where it belongs, whether it is masked)
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < VECS; ++v) f(sum[r][v], c + r * c_row + place(v), MASKED && v == VECS - 1);
  };
  // All are read before one is written: a load beside a store that is under way waits for it, and lanes may be shared.
  if (add) all([&](Vec<T>& s, const T* from, bool masked) { s += masked ? load_first(from, last) : load(from); });
  all([&](const Vec<T>& s, T* to, bool masked) { masked ? store_first(to, s, last) : store(to, s); });
}

// A column panel of C in every problem of the batch: its last vector has `last` lanes.
template <class T> struct Panel {
  Size size;
  Operand<T> a, b, c;
  bool add;
  int last;
};

// Tiles of ROWS rows, one below another, in every problem of the batch.
template <class T, int ROWS, int VECS, bool TAIL>
__attribute__((noinline)) void multiply_tiles(const Panel<T>& panel, int64_t first, int64_t tiles) {
  const Size size = panel.size;
  const bool add = panel.add;
  const int last = panel.last;
  const int64_t c_row = panel.c.row;
  Operand<T> a = panel.a, b = panel.b;
  a.data += first * a.row;
  T* c = const_cast<T*>(panel.c.data) + first * c_row;
  for (int64_t i = size.count;;) {
    Operand<T> at = a;
    T* to = c;
    for (int64_t tile = tiles;;) {
      multiply_tile<T, ROWS, VECS, TAIL>(size, at, b, to, c_row, add, last);
      if (!--tile) break;
      at.data += ROWS * a.row, to += ROWS * c_row;
    }
    if (!--i) break;
    a.data += a.next, b.data += b.next, c += panel.c.next;
  }
}

template <class T> using Tiles = void (*)(const Panel<T>&, int64_t first, int64_t tiles);
template <class T, int VECS, bool TAIL, int... ROWS>
FL_INLINE Tiles<T> tiles_of(int64_t rows, std::integer_sequence<int, ROWS...>) {
  static constexpr Tiles<T> all[] = {multiply_tiles<T, ROWS + 1, VECS, TAIL>...};
  return all[rows - 1];
}

// In as few tiles as can be, of two heights that differ by one.
template <class T, int VECS, bool TAIL> FL_INLINE void multiply_rows(const Panel<T>& panel) {
  constexpr std::make_integer_sequence<int, kTileRows[VECS]> heights;
  const int64_t m = panel.size.m;
  if (m <= kTileRows[VECS]) return tiles_of<T, VECS, TAIL>(m, heights)(panel, 0, 1);
  const int64_t tiles = (m + kTileRows[VECS] - 1) / kTileRows[VECS], height = (m + tiles - 1) / tiles;
  const int64_t lower = tiles * height - m, upper = tiles - lower;  // those of one row less, and the others
  tiles_of<T, VECS, TAIL>(height, heights)(panel, 0, upper);
  if (lower) tiles_of<T, VECS, TAIL>(height - 1, heights)(panel, upper * height, lower);
}

// A panel that many rows will reuse and whose rows lie far apart is copied together first: large strides fall on few sets of
// the first-level cache.
template <class T, int VECS, bool TAIL> void multiply_panel(const Panel<T>& panel, T* packed) {
  constexpr int L = kLanes<T>, W = VECS * L;
  const Size& size = panel.size;
  if (!packed || size.m < 4 * kTileRows[VECS] || panel.b.row * int64_t(sizeof(T)) < 512)
    return multiply_rows<T, VECS, TAIL>(panel);
  Panel<T> one = panel;
  one.size.count = 1, one.b = {packed, W, 1};
  for (int64_t i = 0; i < size.count; ++i, one.a.data += one.a.next, one.c.data += one.c.next) {
    const T* from = panel.b.data + i * panel.b.next;
    for (int64_t j = 0; j < size.k; ++j)
      for (int v = 0; v < VECS; ++v) {
        const T* row = from + j * panel.b.row + v * L;
        store(packed + j * W + v * L, TAIL && v == VECS - 1 ? load_first(row, panel.last) : load(row));
      }
    multiply_rows<T, VECS, TAIL>(one);
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
  Panel<T> panel{size, a, b, c, add, L};
  for (int64_t pieces = (size.k + kLongestSum - 1) / kLongestSum, left = size.k; pieces; --pieces) {
    panel.size.k = (left + pieces - 1) / pieces;
    panel.b.data = b.data, panel.c.data = c.data;
    int64_t n = size.n, vecs = (n + L - 1) / L;
    for (int64_t panels = (vecs + kMaxVecs - 1) / kMaxVecs; panels; --panels) {
      const int64_t width = (vecs + panels - 1) / panels;  // panels of nearly equal width: 5 is 3 + 2
      const bool tail = n < width * L;
      panel.last = tail ? int(n - (width - 1) * L) : L;
#define FL_PANEL(VECS)                                                                                  \
  case VECS:                                                                                            \
    tail ? multiply_panel<T, VECS, true>(panel, packed) : multiply_panel<T, VECS, false>(panel, packed); \
    break;
      switch (width) { FL_PANEL(1) FL_PANEL(2) FL_PANEL(3) FL_PANEL(4) }
#undef FL_PANEL
      panel.b.data += width * L, panel.c.data += width * L, n -= width * L, vecs -= width;
    }
    panel.a.data += panel.size.k * a.col, b.data += panel.size.k * b.row;
    left -= panel.size.k;
    panel.add = true;
  }
}

// Reads numbers from end to end, one of each line: in this order memory is several times as fast as by columns.
template <class T> void touch(int64_t size, const T* numbers) {
  for (int64_t i = 0; i < size; i += 64 / int64_t(sizeof(T))) (void)*reinterpret_cast<const volatile char*>(numbers + i);
}

// Half of the lanes of x and half of y: of neighbours that lie `H` lanes apart, the first ones or the second ones. Within
// 16 bytes they come in turn, one of x and one of y; whole pieces of 16 bytes come from x first. Each is one instruction.
template <class T, int H, bool SECOND> FL_INLINE Vec<T> halves(Vec<T> x, Vec<T> y) {
  constexpr int L = kLanes<T>, PIECE = 16 / int(sizeof(T));
  Mask<T> from;
  for (int i = 0; i < L; ++i) {
    const int piece = i / PIECE, at = i % PIECE;
    if constexpr (H >= PIECE) {
      constexpr int PIECES = L / PIECE;
      const int of_x = 2 * piece < PIECES, taken = 2 * (of_x ? piece : piece - PIECES / 2) + SECOND;
      from[i] = (of_x ? 0 : L) + taken * PIECE + at;
    } else {  // in pieces of H elements
      constexpr int RUN = PIECE / 2 / (PIECE / 2 / H);
      const int run = at / RUN, taken = run / 2 * RUN + at % RUN + SECOND * (PIECE / 2);
      from[i] = (run % 2 ? L : 0) + piece * PIECE + taken;
    }
  }
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
      rows[i] = halves<T, H, false>(x, y);
      rows[i + H] = halves<T, H, true>(x, y);
    }
  if constexpr (2 * H < L) transpose_step<T, 2 * H>(rows);
}

template <class T> FL_INLINE void transpose_registers(Vec<T>* rows) {
  transpose_step<T, 1>(rows);
  if constexpr (sizeof(T) == 4)  // of four floats, the second and the third have changed places
#pragma GCC unroll 4
    for (int i = 0; i < kLanes<T>; i += 4) std::swap(rows[i + 1], rows[i + 2]);
}

// The sum over the lanes of each of as many vectors as one has lanes.
template <class T, int H = 1> FL_INLINE Vec<T> add_lanes(Vec<T>* rows) {
  constexpr int L = kLanes<T>;
#pragma GCC unroll 16
  for (int i = 0; i < L; i += 2 * H)
    rows[i] = halves<T, H, false>(rows[i], rows[i + H]) + halves<T, H, true>(rows[i], rows[i + H]);
  if constexpr (2 * H < L) return add_lanes<T, 2 * H>(rows);
  else return rows[0];
}

// to[c, r] (+)= from[r, c]
template <class T>
void transpose(int64_t rows, int64_t cols, const T* from, int64_t from_row, T* to, int64_t to_row, bool add = false) {
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
        transpose_registers<T>(block);
#pragma GCC unroll 16
        for (int i = 0; i < L; ++i) store(out + i * to_row, add ? load(out + i * to_row) + block[i] : block[i]);
      } else {
#pragma GCC unroll 16
        for (int i = 0; i < L; ++i) block[i] = i < height ? load_first(in + i * from_row, width) : Vec<T>{};
        transpose_registers<T>(block);
#pragma GCC unroll 16
        for (int i = 0; i < L; ++i) {
          T* row = out + i * to_row;
          if (i < width) store_first(row, add ? load_first(row, height) + block[i] : block[i], height);
        }
      }
    }
}

// The dot products of ROWS rows with COLS rows, added up over the terms of a sum. Each sum keeps its lanes to the end,
// where they are added up, those of as many sums together as a vector has lanes.
#if defined(ISA_AVX512)
constexpr int kDots = 16;  // sums that are kept in registers
#else
constexpr int kDots = 8;
#endif

template <class T, int ROWS, int COLS>
FL_INLINE void dot_tile(const Size& size, const int64_t* a_rows, const int64_t* b_rows, Operand<T> a, Operand<T> b,
                        T* sums) {
  constexpr int L = kLanes<T>;
  static_assert(ROWS * COLS % L == 0, "the lanes of some whole vectors of sums");
  Vec<T> sum[ROWS * COLS] = {};
  for (int64_t term = 0; term < size.terms; ++term, a.data += a.next, b.data += b.next) {
    auto step = [&](auto&& read) __attribute__((always_inline)) {
      if constexpr (ROWS <= COLS) {
        Vec<T> as[ROWS];
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) as[r] = read(a.data + a_rows[r]);
#pragma GCC unroll 16
        for (int c = 0; c < COLS; ++c) {
          const Vec<T> bs = read(b.data + b_rows[c]);
#pragma GCC unroll 4
          for (int r = 0; r < ROWS; ++r) sum[r * COLS + c] += as[r] * bs;
        }
      } else {
        Vec<T> bs[COLS];
#pragma GCC unroll 4
        for (int c = 0; c < COLS; ++c) bs[c] = read(b.data + b_rows[c]);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
          const Vec<T> as = read(a.data + a_rows[r]);
#pragma GCC unroll 4
          for (int c = 0; c < COLS; ++c) sum[r * COLS + c] += as * bs[c];
        }
      }
    };
    int64_t at = 0;
#pragma GCC unroll 1
    for (; at + L <= size.k; at += L) step([&](const T* row) { return load(row + at); });
    if (at < size.k) step([&](const T* row) { return load_first(row + at, int(size.k - at)); });
  }
#pragma GCC unroll 2
  for (int first = 0; first < ROWS * COLS; first += L) store(sums + first, add_lanes<T>(sum + first));
}

template <class T, int ROWS, int COLS>
__attribute__((noinline)) void multiply_dots_by(const Size& size, Operand<T> a, Operand<T> b, Operand<T> c, bool add) {
  for (int64_t n = 0; n < size.n; n += COLS)
    for (int64_t m = 0; m < size.m; m += ROWS) {
      const int rows = int(std::min<int64_t>(ROWS, size.m - m)), cols = int(std::min<int64_t>(COLS, size.n - n));
      int64_t a_rows[ROWS], b_rows[COLS];  // the last ones stand in for those beyond them
      for (int i = 0; i < ROWS; ++i) a_rows[i] = (m + std::min(i, rows - 1)) * a.row;
      for (int j = 0; j < COLS; ++j) b_rows[j] = (n + std::min(j, cols - 1)) * b.row;
      T sums[ROWS * COLS];
      dot_tile<T, ROWS, COLS>(size, a_rows, b_rows, a, b, sums);
      T* to = const_cast<T*>(c.data) + m * c.row + n;
      auto put = [add](T* row, const T* sum, auto length) __attribute__((always_inline)) {
        for (int j = 0; j < int(length); ++j) row[j] = sum[j] + (add ? row[j] : T(0));
      };
      using Whole = std::integral_constant<int, ROWS * COLS>;
      using Row = std::integral_constant<int, COLS>;
      if (rows == ROWS && cols == COLS && c.row == COLS) put(to, sums, Whole());
      else if (cols == COLS)
        for (int i = 0; i < rows; ++i) put(to + i * c.row, sums + i * COLS, Row());
      else
        for (int i = 0; i < rows; ++i) put(to + i * c.row, sums + i * COLS, cols);
    }
}

// How much of a sum is done at a time: the pieces of so many rows, which all tiles go through, stay in the second-level cache,
// wherever their pages lie.
#if defined(ISA_AVX512)
constexpr int64_t kDottedBytes = 256 << 10;  // of 1 MB or more
#else
constexpr int64_t kDottedBytes = 64 << 10;
#endif
template <class T> int64_t dotted_piece(int64_t rows) {
  constexpr int64_t L = kLanes<T>;
  return std::clamp<int64_t>(kDottedBytes / int64_t(sizeof(T)) / rows, 16 * L, 1024) / L * L;
}

// C[m, n] (+)= the sum over terms of A[m, k] B[n, k]', where vectors run along k: where few rows of A or B leave the vectors
// of multiply() empty, or B would have to be transposed for it. `piece`: terms done at a time, which decide a sum's last bits.
template <class T> void multiply_dots(Size size, Operand<T> a, Operand<T> b, Operand<T> c, bool add, int64_t piece) {
  for (int64_t left = size.k; left > 0; left -= piece, a.data += piece, b.data += piece, add = true) {
    size.k = std::min(left, piece);
    if (size.n == 1) multiply_dots_by<T, kDots, 1>(size, a, b, c, add);
    else if (size.n == 2) multiply_dots_by<T, kDots / 2, 2>(size, a, b, c, add);
    else if (size.m == 1) multiply_dots_by<T, 1, kDots>(size, a, b, c, add);
    else if (size.m == 2) multiply_dots_by<T, 2, kDots / 2>(size, a, b, c, add);
    else multiply_dots_by<T, kDots / 4, 4>(size, a, b, c, add);
  }
}
template <class T> void multiply_dots(Size size, Operand<T> a, Operand<T> b, Operand<T> c, bool add) {
  multiply_dots<T>(size, a, b, c, add, dotted_piece<T>(size.m + size.n));
}
