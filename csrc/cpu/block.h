// How many samples go through the layers together, in which layout, and the memory their states live in.

constexpr int64_t kPlainBytes = 64 << 10;       // what the states of a block may take in the plain layout,
constexpr int64_t kInterleavedBytes = 2 << 20;  // and interleaved, where more samples reuse each weight,
constexpr int64_t kWideBytes = 16 << 20;        // and where weights leave the first-level cache
constexpr double kTransposeCost = 16;           // multiply-adds that take as long as moving one element

// Memory that a thread keeps from call to call, one piece for each purpose. Fresh memory would cost a page fault for
// every 4 KB; and large buffers that come and go between aligned outputs make glibc's heap grow without end.
enum class Purpose { block, weights, sums, totals, expression, count };

template <class T> class Arena {
 public:
  Arena(Purpose purpose, int64_t elements) : memory_(hold(purpose, elements)) {}
  T* take(int64_t elements) {
    T* at = memory_ + used_;
    used_ += padded(elements);
    return at;
  }
  // Rounded up to whole cache lines, plus one line so that equal buffers do not share cache sets.
  static int64_t padded(int64_t elements) { return (elements * sizeof(T) + 127) / 64 * 64 / sizeof(T); }

 private:
  static T* hold(Purpose purpose, int64_t elements) {
    struct Piece {
      std::unique_ptr<char[]> memory;
      size_t size = 0;
    };
    thread_local Piece pieces[int(Purpose::count)];
    Piece& piece = pieces[int(purpose)];
    const size_t bytes = elements * sizeof(T) + 64;
    if (piece.size < bytes) piece.memory.reset(), piece.memory.reset(new char[bytes]), piece.size = bytes;
    return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(piece.memory.get()) + 63) / 64 * 64);
  }
  T* memory_;
  int64_t used_ = 0;
};

inline int64_t largest_state(const Chain& chain) {
  int64_t size = chain.in_features();
  for (const Contraction& c : chain.contractions) size = std::max(size, c.outer * c.q * c.inner);
  return size;
}

// Which layout a layer has. `bytes`: what the states of a sample take, all that are alive at a time.
template <class T> bool is_interleaved(const Chain& chain, int64_t batch, int64_t bytes) {
  constexpr int64_t L = kLanes<T>;
  double plain = 0, interleaved = kTransposeCost * double(chain.in_features() + chain.out_features());
  for (const Contraction& c : chain.contractions) {
    if (!c.tied) return true;
    const int64_t along = c.inner == 1 ? c.q : c.inner, across = c.inner == 1 ? c.outer : c.outer * c.q;
    plain += double(across * ((along + L - 1) / L * L) * c.p);
    interleaved += double(c.outer * c.q * c.inner * c.p) * double(std::max(batch, L)) / double(batch);
  }
  if (bytes * L > kInterleavedBytes / 2) interleaved *= 4;  // such a state would leave the cache
  return interleaved < plain;
}

template <class T> int64_t interleaved_samples(int64_t batch, int64_t bytes) {
  constexpr int64_t L = kLanes<T>;
  const int64_t fitting = kInterleavedBytes / bytes / L * L;
  return std::min(std::clamp<int64_t>(fitting, L, 4 * L), (batch + L - 1) / L * L);
}

// Samples enough to fill register tiles in the plain layout, and to pay for a way through weights that come from afar.
template <class T> int64_t plain_samples(const Chain& chain, int64_t bytes) {
  const Contraction& c = chain.contractions.front();
  const int64_t fewest = 2 * kTileRows[1];
  const bool wide = c.weight_size() * int64_t(sizeof(T)) > 64 << 10;
  const int64_t rows = wide ? std::clamp<int64_t>(kWideBytes / bytes * c.outer, fewest, 256) : fewest;
  return (rows + c.outer - 1) / c.outer;
}
