// One contraction of a block of samples, and its two gradients, as batches of small matrix products.
//
// A block's state lies in one of two layouts:
//     plain        [samples, features]   vectors run along the modes after the contracted one, or along
//                                        the outputs or the sums of the last mode
//     interleaved  [features, samples]   vectors run along the samples: full vectors for any sizes, at the price of a
//                                        transpose at either end
// In both, a tied contraction is y[o, :, i] = W x[o, :, i] over `slabs` values of o and `width` values of i. What each way
// of doing it costs is counted in cycles, by which the layouts are chosen (phase.h), too.

inline int64_t in_of(const Contraction& c) { return c.outer * c.p * c.inner; }
inline int64_t out_of(const Contraction& c) { return c.outer * c.q * c.inner; }

struct Block {
  int64_t samples;
  bool interleaved;
  int64_t valid;  // samples that are there; an interleaved block is padded up to `samples`
  int64_t slabs(const Contraction& c) const { return interleaved ? c.outer : c.outer * samples; }
  int64_t width(const Contraction& c) const { return interleaved ? c.inner * samples : c.inner; }
};

// Cycles: for each dot product behind its multiply-adds, for each vector of a product's result, and for each call of
// multiply().
constexpr double kDotCost = 6, kResultCost = 3, kCallCost = 12;
// For each vector that a transpose moves; for a multiply-add of a vector, two in a cycle, but of 64 bytes on the first processors of
// AMD that have these; and for one of a dot product, whose rows begin anywhere in a line.
#if defined(ISA_AVX512)
constexpr double kTransposeCost = 7;
inline const double kMultiplyCost = (__builtin_cpu_init(), __builtin_cpu_is("amdfam19h")) ? 1 : 0.5;
inline const double kDottedCost = kMultiplyCost;
#else
constexpr double kTransposeCost = 4, kMultiplyCost = 0.5, kDottedCost = 0.8;
#endif

template <class T> int64_t whole_vectors(int64_t elements) { return (elements + kLanes<T> - 1) / kLanes<T> * kLanes<T>; }
template <class T> double vectors(int64_t elements) { return double(whole_vectors<T>(elements) / kLanes<T>); }
template <class T> double transpose_cost(int64_t rows, int64_t cols) {
  return kTransposeCost * vectors<T>(rows) * vectors<T>(cols) * kLanes<T>;
}
template <class T> double dots_cost(int64_t m, int64_t n, int64_t k) {
  const int64_t piece = dotted_piece<T>(m + n);
  return double(m * n) * (vectors<T>(k) * kDottedCost + kDotCost * double((k + piece - 1) / piece));
}
template <class T> double multiply_cost(int64_t m, int64_t n, int64_t k) {
  return double(m) * (double(k) * kMultiplyCost + kResultCost) * vectors<T>(n);
}

// The weights of one contraction in the arithmetic's type; `transposed` is [p, q], made where vectors run
// along q, null where they do not.
template <class T> struct Weights {
  const T* data;
  const T* transposed;
};

// Whether dot products along p take less time than vectors along q, for which the weight has to be transposed: where there
// are few rows, or few outputs. Of a contraction with nothing behind its mode, in the plain layout.
template <class T> bool takes_dots(const Contraction& c, int64_t rows) {
  return dots_cost<T>(rows, c.q, c.p) < multiply_cost<T>(rows, c.q, c.p) + transpose_cost<T>(c.q, c.p);
}
template <class T> bool needs_transposed_weight(const Contraction& c, bool interleaved, int64_t samples) {
  return c.tied && c.inner == 1 && !interleaved && !takes_dots<T>(c, c.outer * samples);
}

// What lies behind an untied contraction's mode changes places with it, so that a position's numbers lie together:
// [slabs, features, inner] to [slabs, inner, features], of the positions first .. first + count - 1; and back.
template <class T>
void by_position(int64_t slabs, int64_t features, int64_t inner, int64_t first, int64_t count, const T* from, T* to) {
  from += first, to += first * features;
  for (int64_t slab = 0; slab < slabs; ++slab, from += features * inner, to += features * inner)
    transpose<T>(features, count, from, inner, to, features);
}
template <class T>
void from_position(int64_t slabs, int64_t features, int64_t inner, int64_t first, int64_t count, const T* from, T* to) {
  from += first * features, to += first;
  for (int64_t slab = 0; slab < slabs; ++slab, from += features * inner, to += features * inner)
    transpose<T>(count, features, from, features, to, inner);
}

// Some positions of a contraction: all, or one worker's share of an untied one's, which lie along its outer mode or along its
// inner one.
struct Positions {
  int64_t outer, outer_end, inner, inner_end;
  static Positions all(const Contraction& c) { return {0, c.outer, 0, c.inner}; }
  // Positions first .. end - 1
  static Positions of(const Contraction& c, int64_t first, int64_t end) {
    return c.outer > 1 ? Positions{first, end, 0, c.inner} : Positions{0, c.outer, first, end};
  }
  int64_t inners() const { return inner_end - inner; }
};
inline bool has_parts(const Contraction& c) { return !c.tied && (c.outer == 1 || c.inner == 1); }

// How much of a reduction is transposed at a time: [piece, p] or [piece, q] has to stay in cache.
constexpr int64_t kTransposedPiece = 128;
// Elements that a contraction needs beside its states.
inline int64_t contract_scratch(const Contraction& c, Block block) {
  if (!c.tied && !block.interleaved) return c.inner > 1 ? c.outer * c.inner * block.samples * (c.p + c.q) : 0;
  return kTransposedPiece * std::max(c.p, c.q);
}

// Whether a weight of so many numbers may come column by column from wherever it is.
template <class T> bool stays_near(int64_t numbers) { return numbers * int64_t(sizeof(T)) <= 32 << 10; }

// y[o, :, i] (+)= A x[o, :, i], where A is [m, k] with any strides; `b` is its transpose [k, m], without gaps, for
// where vectors run along m.
template <class T>
void apply_matrix(const Contraction& c, Block block, Positions part, int64_t m, int64_t k, Operand<T> a, const T* b, const T* x,
                  T* y, bool add, T* packed) {
  const int64_t slabs = block.slabs(c), width = block.width(c), s = block.samples;
  const T* const weight = a.data;
  const auto begin = [&](int64_t o) {  // of o's first position
    a.data = weight + (o * c.inner + part.inner) * c.q * c.p;
    return std::pair(x + o * k * width + part.inner * s, y + o * m * width + part.inner * s);
  };
  if (!c.tied && a.row == 1 && !stays_near<T>(m * k)) {  // tiles would read a few numbers of each row from afar
    for (int64_t o = part.outer; o < part.outer_end; ++o) {
      auto [from, to] = begin(o);
      for (int64_t i = part.inner; i < part.inner_end; ++i, a.data += c.q * c.p, from += s, to += s)
        for (int64_t at = 0; at < k; at += kLongestSum) {
          const int64_t size = std::min(kLongestSum, k - at);
          const T* rows = a.data + at * m;
          touch(size * m, rows);
          multiply<T>({m, s, size}, {rows, 1, m}, {from + at * width, width, 1}, {to, width, 1}, add || at > 0, packed);
        }
    }
  } else if (!c.tied) {
    a.next = c.q * c.p;
    for (int64_t o = part.outer; o < part.outer_end; ++o) {
      const auto [from, to] = begin(o);
      multiply<T>({m, s, k, part.inners()}, a, {from, width, 1, s}, {to, width, 1, s}, add, packed);
    }
  } else if (width == 1) {
    multiply<T>({slabs, m, k}, {x, k, 1}, {b, m, 1}, {y, m, 1}, add, packed);
  } else {
    multiply<T>({m, width, k, slabs}, a, {x, width, 1, k * width}, {y, width, 1, m * width}, add, packed);
  }
}

// An untied contraction in the plain layout, for fewer samples than fill vectors: f(weight, from, to) for each position of a
// part, whose rows of k numbers are made to rows of m.
template <class T, class F>
void for_positions(const Contraction& c, int64_t samples, Positions part, int64_t m, int64_t k, const T* weight, const T* x, T* y,
                   T* scratch, F&& f) {
  const int64_t positions = c.outer * c.inner, slabs = samples * c.outer;
  const T* from = x;
  T* to = y;
  if (c.inner > 1) {
    by_position(slabs, k, c.inner, part.inner, part.inners(), x, scratch);
    from = scratch, to = scratch + samples * positions * k;
  }
  for (int64_t o = part.outer; o < part.outer_end; ++o)
    for (int64_t i = o * c.inner + part.inner; i < o * c.inner + part.inner_end; ++i)
      f(weight + i * c.q * c.p, Operand<T>{from + i * k, positions * k, 1}, Operand<T>{to + i * m, positions * m, 1});
  if (c.inner > 1) from_position(slabs, m, c.inner, part.inner, part.inners(), to, y);
}

// y (+)= W x
template <class T>
void contract(const Contraction& c, Block block, Positions part, Weights<T> w, const T* x, T* y, bool add, T* scratch, T* packed) {
  if (!c.tied && !block.interleaved)
    for_positions(c, block.samples, part, c.q, c.p, w.data, x, y, scratch, [&](const T* weight, Operand<T> from, Operand<T> to) {
      multiply_dots<T>({block.samples, c.q, c.p}, from, {weight, c.p, 1}, to, false);
    });
  else if (c.tied && block.width(c) == 1 && !w.transposed)
    multiply_dots<T>({block.slabs(c), c.q, c.p}, {x, c.p, 1}, {w.data, c.p, 1}, {y, c.q, 1}, add);
  else
    apply_matrix<T>(c, block, part, c.q, c.p, {w.data, c.p, 1}, w.transposed, x, y, add, packed);
}

// grad_x (+)= W' grad_y
template <class T>
void contract_grad_x(const Contraction& c, Block block, Positions part, Weights<T> w, const T* grad_y, T* grad_x, bool add,
                     T* scratch, T* packed) {
  if (!c.tied && !block.interleaved)
    for_positions(c, block.samples, part, c.p, c.q, w.data, grad_y, grad_x, scratch,
                  [&](const T* weight, Operand<T> from, Operand<T> to) {
                    multiply<T>({block.samples, c.p, c.q}, from, {weight, c.p, 1}, to, false, packed);
                  });
  else
    apply_matrix<T>(c, block, part, c.p, c.q, {w.data, 1, c.p}, w.data, grad_y, grad_x, add, packed);
}

// Slabs of one kind: rows of `length` elements, `row` apart, in `count` slabs.
struct Slabs {
  int64_t count, length, row;
};

// Slabs that every tile of sums goes through before the next ones: they stay in cache, and make no longer sums than multiply()
// does.
template <class T> int64_t dotted_together(const Contraction& c, int64_t length) {
  const int64_t near = kDottedBytes / int64_t(sizeof(T)) / ((c.p + c.q) * length);
  return std::clamp<int64_t>(kLongestSum / int64_t(vectors<T>(length)), 1, std::max<int64_t>(1, near));
}
template <class T> double dotted_cost(const Contraction& c, int64_t count, int64_t length) {
  const int64_t together = dotted_together<T>(c, length), piece = dotted_piece<T>(c.p + c.q);
  const int64_t sums = (count + together - 1) / together * ((length + piece - 1) / piece);
  return double(c.q * c.p) * (double(count) * vectors<T>(length) * kDottedCost + kDotCost * double(sums));
}
template <class T> double turned_cost(const Contraction& c, int64_t count, int64_t length) {
  return double(count) * (transpose_cost<T>(c.p, length) + multiply_cost<T>(c.q, c.p, length));
}

// grad_w[q, p] (+)= sum over slabs and i of grad_y[slab, q, i] x[slab, p, i], 0 <= i < length. The slabs lie grad_y_slab and
// x_slab apart. Rows are multiplied as they are, with vectors along i, or those of x transposed, short slabs several at
// a time.
template <class T>
void add_outer_products(const Contraction& c, Slabs slabs, const T* grad_y, int64_t grad_y_slab, const T* x, int64_t x_slab,
                        T* grad_w, bool add, T* scratch) {
  const auto [count, length, row] = slabs;
  if (dotted_cost<T>(c, count, length) <= turned_cost<T>(c, count, length)) {
    const int64_t together = dotted_together<T>(c, length);
    for (int64_t slab = 0; slab < count; slab += together, add = true)
      multiply_dots<T>({c.q, c.p, length, 1, std::min(together, count - slab)},
                       {grad_y + slab * grad_y_slab, row, 1, grad_y_slab}, {x + slab * x_slab, row, 1, x_slab},
                       {grad_w, c.p, 1}, add);
    return;
  }
  const int64_t piece = std::min(length, kTransposedPiece), together = kTransposedPiece / piece;
  for (int64_t slab = 0; slab < count; slab += together) {
    const int64_t some = std::min(together, count - slab);
    for (int64_t at = 0; at < length; at += piece, add = true) {
      const int64_t size = std::min(piece, length - at);
      for (int64_t i = 0; i < some; ++i)
        transpose<T>(c.p, size, x + (slab + i) * x_slab + at, row, scratch + i * size * c.p, c.p);
      multiply<T>({c.q, c.p, size, 1, some}, {grad_y + slab * grad_y_slab + at, row, 1, grad_y_slab},
                  {scratch, c.p, 1, size * c.p}, {grad_w, c.p, 1}, add, nullptr);
    }
  }
}

// The same, where a slab is one number of each row: grad_w[q, p] (+)= sum over n of grad_y[n, q] x[n, p], rows `grad_y_row` and
// `x_row` apart. Vectors run along p or along q.
template <class T>
void add_rows_products(const Contraction& c, int64_t count, const T* grad_y, int64_t grad_y_row, const T* x, int64_t x_row,
                       T* grad_w, bool add, T* scratch, T* packed) {
  const double along_q = multiply_cost<T>(c.p, c.q, count) + transpose_cost<T>(c.p, c.q);
  const bool fits = scratch && std::min(c.p, c.q) <= kTransposedPiece;
  if (fits && along_q < multiply_cost<T>(c.q, c.p, count)) {
    multiply<T>({c.p, c.q, count}, {x, 1, x_row}, {grad_y, grad_y_row, 1}, {scratch, c.q, 1}, false, packed);
    transpose<T>(c.p, c.q, scratch, c.q, grad_w, c.p, add);
  } else if (!scratch || c.q * int64_t(sizeof(T)) < 4096) {
    multiply<T>({c.q, c.p, count}, {grad_y, 1, grad_y_row}, {x, x_row, 1}, {grad_w, c.p, 1}, add, nullptr);
  } else {  // columns of grad_y would have each element in a page of its own
    for (int64_t at = 0; at < count; at += kTransposedPiece, add = true) {
      const int64_t size = std::min(kTransposedPiece, count - at);
      transpose<T>(size, c.q, grad_y + at * grad_y_row, grad_y_row, scratch, size);
      multiply<T>({c.q, c.p, size}, {scratch, size, 1}, {x + at * x_row, x_row, 1}, {grad_w, c.p, 1}, add, packed);
    }
  }
}

// grad_w (+)= grad_y x'. Padding is left out: times an infinite weight, its zeros have become NaN.
template <class T>
void contract_grad_w(const Contraction& c, Block block, Positions part, const T* grad_y, const T* x, T* grad_w, bool add,
                     T* scratch, T* packed) {
  const bool at_once = !c.tied || (!block.interleaved && c.inner == 1);  // rather than in several sums
  if (!add && !at_once) std::fill(grad_w, grad_w + c.weight_size(), T(0));
  const int64_t width = block.width(c), p = c.p, q = c.q, s = block.samples, positions = c.outer * c.inner;
  if (!c.tied && block.interleaved) {
    for (int64_t o = part.outer; o < part.outer_end; ++o)
      for (int64_t i = part.inner; i < part.inner_end; ++i)
        add_outer_products(c, {1, block.valid, width}, grad_y + o * q * width + i * s, 0, x + o * p * width + i * s, 0,
                           grad_w + (o * c.inner + i) * q * p, add, scratch);
  } else if (!c.tied) {
    if (c.inner > 1) {
      T* at = scratch;
      by_position(s * c.outer, p, c.inner, part.inner, part.inners(), x, at);
      x = at, at += s * positions * p;
      by_position(s * c.outer, q, c.inner, part.inner, part.inners(), grad_y, at);
      grad_y = at;
    }
    for (int64_t o = part.outer; o < part.outer_end; ++o)
      for (int64_t i = o * c.inner + part.inner; i < o * c.inner + part.inner_end; ++i)
        add_rows_products<T>(c, s, grad_y + i * q, positions * q, x + i * p, positions * p, grad_w + i * q * p, add, nullptr,
                             packed);
  } else if (block.interleaved && block.valid == s) {
    add_outer_products(c, {c.outer, width, width}, grad_y, q * width, x, p * width, grad_w, true, scratch);
  } else if (block.interleaved) {
    for (int64_t o = 0; o < c.outer; ++o, grad_y += q * width, x += p * width)
      add_outer_products(c, {c.inner, block.valid, width}, grad_y, s, x, s, grad_w, true, scratch);
  } else if (width == 1) {
    add_rows_products<T>(c, block.slabs(c), grad_y, q, x, p, grad_w, add, scratch, packed);
  } else {
    add_outer_products(c, {block.slabs(c), width, width}, grad_y, q * width, x, p * width, grad_w, true, scratch);
  }
}

// Moving an untied contraction's numbers, of so many features, by position.
template <class T> double moving_cost(const Contraction& c, int64_t samples, int64_t features) {
  return c.inner > 1 ? double(samples * c.outer) * transpose_cost<T>(features, c.inner) : 0;
}

// What contract() costs of so many samples; `dotted`: in the plain layout, with nothing behind the mode, by dot products.
template <class T> double contract_cost(const Contraction& c, int64_t samples, bool interleaved, bool dotted) {
  const int64_t p = c.p, q = c.q, positions = c.outer * c.inner, slabs = c.outer * samples;
  if (interleaved) return double(positions) * multiply_cost<T>(q, samples, p) + kCallCost * double(c.outer);
  if (!c.tied)
    return double(positions) * (dots_cost<T>(samples, q, p) + kCallCost) + moving_cost<T>(c, samples, p) +
           moving_cost<T>(c, samples, q);
  if (c.inner == 1) return dotted ? dots_cost<T>(slabs, q, p) : multiply_cost<T>(slabs, q, p);
  return double(slabs) * multiply_cost<T>(q, c.inner, p);
}

// What its two gradients cost.
template <class T> double gradients_cost(const Contraction& c, int64_t samples, bool interleaved) {
  const int64_t p = c.p, q = c.q, positions = c.outer * c.inner, slabs = c.outer * samples;
  const auto products = [&](int64_t count, int64_t length) {
    return kCallCost + std::min(dotted_cost<T>(c, count, length), turned_cost<T>(c, count, length));
  };
  if (interleaved)
    return double(positions) * multiply_cost<T>(p, samples, q) + kCallCost * double(c.outer) +
           (c.tied ? products(c.outer, c.inner * samples) : double(positions) * products(1, samples));
  if (!c.tied)
    return double(positions) * (multiply_cost<T>(samples, p, q) + multiply_cost<T>(q, p, samples) + 2 * kCallCost) +
           2 * (moving_cost<T>(c, samples, p) + moving_cost<T>(c, samples, q));
  if (c.inner == 1)
    return multiply_cost<T>(slabs, p, q) + std::min(multiply_cost<T>(q, p, slabs), multiply_cost<T>(p, q, slabs));
  return double(slabs) * multiply_cost<T>(p, c.inner, q) + products(slabs, c.inner);
}
