// One contraction of a block of samples, and its two gradients, as batches of small matrix products.
//
// A block's state lies in one of two layouts:
//     plain        [samples, features]   vectors run along the modes after the contracted one, or along
//                                        the outputs of the last mode
//     interleaved  [features, samples]   vectors run along the samples: full vectors for any sizes, and the
//                                        only layout for untied weights; costs a transpose at either end
// In both, a tied contraction is y[o, :, i] = W x[o, :, i] over `slabs` values of o and `width` values of i.

struct Block {
  int64_t samples;
  bool interleaved;
  int64_t valid;  // samples that are there; an interleaved block is padded up to `samples`
  int64_t slabs(const Contraction& c) const { return interleaved ? c.outer : c.outer * samples; }
  int64_t width(const Contraction& c) const { return interleaved ? c.inner * samples : c.inner; }
};

// The weights of one contraction in the arithmetic's type; `transposed` is [p, q], made where vectors run
// along q, null where they do not.
template <class T> struct Weights {
  const T* data;
  const T* transposed;
};

// Where the transpose takes less time than it saves: for few rows, dot products along p are faster.
inline bool needs_transposed_weight(const Contraction& c, bool interleaved, int64_t batch) {
  return c.tied && c.inner == 1 && !interleaved && c.outer * batch > c.p / 8;
}

// y[o, :, i] (+)= A x[o, :, i], where A is [m, k] with any strides; `b` is its transpose [k, m], without gaps, for
// where vectors run along m.
template <class T>
void apply_matrix(const Contraction& c, Block block, int64_t m, int64_t k, Operand<T> a, const T* b, const T* x, T* y,
                  bool add, T* packed) {
  const int64_t slabs = block.slabs(c), width = block.width(c), s = block.samples;
  if (!c.tied) {
    a.next = c.q * c.p;
    for (int64_t o = 0; o < c.outer; ++o, a.data += c.inner * c.q * c.p, x += k * width, y += m * width)
      multiply<T>({m, s, k, c.inner}, a, {x, width, 1, s}, {y, width, 1, s}, add, packed);
  } else if (width == 1) {
    multiply<T>({slabs, m, k}, {x, k, 1}, {b, m, 1}, {y, m, 1}, add, packed);
  } else {
    multiply<T>({m, width, k, slabs}, a, {x, width, 1, k * width}, {y, width, 1, m * width}, add, packed);
  }
}

// y (+)= W x
template <class T>
void contract(const Contraction& c, Block block, Weights<T> w, const T* x, T* y, bool add, T* packed) {
  const int64_t slabs = block.slabs(c);
  if (c.tied && block.width(c) == 1 && !w.transposed)
    multiply_dots<T>({slabs, c.q, c.p}, {x, c.p, 1}, {w.data, c.p, 1}, {y, c.q, 1}, add);
  else
    apply_matrix<T>(c, block, c.q, c.p, {w.data, c.p, 1}, w.transposed, x, y, add, packed);
}

// grad_x (+)= W' grad_y
template <class T>
void contract_grad_x(const Contraction& c, Block block, Weights<T> w, const T* grad_y, T* grad_x, bool add, T* packed) {
  apply_matrix<T>(c, block, c.p, c.q, {w.data, 1, c.p}, w.data, grad_y, grad_x, add, packed);
}

// How much of a reduction is transposed at a time: [piece, p] or [piece, q] has to stay in cache.
constexpr int64_t kTransposedPiece = 128;
inline int64_t grad_weight_scratch(const Contraction& c) { return kTransposedPiece * std::max(c.p, c.q); }

// grad_w[q, p] += sum over slabs and i of grad_y[slab, q, i] x[slab, p, i], 0 <= i < length. Rows are `row` apart,
// slabs grad_y_slab and x_slab. Short slabs are taken several at a time.
template <class T>
void add_outer_products(const Contraction& c, int64_t slabs, int64_t length, int64_t row, const T* grad_y,
                        int64_t grad_y_slab, const T* x, int64_t x_slab, T* grad_w, T* scratch) {
  const int64_t piece = std::min(length, kTransposedPiece), together = kTransposedPiece / piece;
  for (int64_t slab = 0; slab < slabs; slab += together) {
    const int64_t count = std::min(together, slabs - slab);
    for (int64_t at = 0; at < length; at += piece) {
      const int64_t size = std::min(piece, length - at);
      for (int64_t i = 0; i < count; ++i)
        transpose<T>(c.p, size, x + (slab + i) * x_slab + at, row, scratch + i * size * c.p, c.p);
      multiply<T>({c.q, c.p, size, 1, count}, {grad_y + slab * grad_y_slab + at, row, 1, grad_y_slab},
                  {scratch, c.p, 1, size * c.p}, {grad_w, c.p, 1}, true, nullptr);
    }
  }
}

// grad_w += grad_y x'. Padding is left out: times an infinite weight, its zeros have become NaN.
template <class T>
void contract_grad_w(const Contraction& c, Block block, const T* grad_y, const T* x, T* grad_w, T* scratch, T* packed) {
  const int64_t slabs = block.slabs(c), width = block.width(c), p = c.p, q = c.q, s = block.samples;
  if (block.interleaved) {
    for (int64_t o = 0; o < c.outer; ++o, grad_y += q * width, x += p * width)
      if (c.tied)
        add_outer_products(c, c.inner, block.valid, width, grad_y, s, x, s, grad_w, scratch);
      else
        for (int64_t i = 0; i < c.inner; ++i, grad_w += q * p)
          add_outer_products(c, 1, block.valid, width, grad_y + i * s, 0, x + i * s, 0, grad_w, scratch);
  } else if (width == 1 && q * int64_t(sizeof(T)) < 4096) {
    multiply<T>({q, p, slabs}, {grad_y, 1, q}, {x, p, 1}, {grad_w, p, 1}, true, nullptr);
  } else if (width == 1) {  // columns of grad_y would have each element in a page of its own
    for (int64_t at = 0; at < slabs; at += kTransposedPiece) {
      const int64_t size = std::min(kTransposedPiece, slabs - at);
      transpose<T>(size, q, grad_y + at * q, q, scratch, size);
      multiply<T>({q, p, size}, {scratch, size, 1}, {x + at * p, p, 1}, {grad_w, p, 1}, true, packed);
    }
  } else {
    add_outer_products(c, slabs, width, width, grad_y, q * width, x, p * width, grad_w, scratch);
  }
}
