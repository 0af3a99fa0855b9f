// How many samples go through a chain together, in which layout, and the memory their states live in.

constexpr int64_t kPlainBytes = 64 << 10;       // what the states of a block may take in the plain layout,
constexpr int64_t kInterleavedBytes = 2 << 20;  // and interleaved, where more samples reuse each weight
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

// Which layout, and how many samples a block has. `states`: how many states are alive at a time.
template <class T> Block choose_block(const Chain& chain, int64_t batch, int64_t states) {
  constexpr int64_t L = kLanes<T>;
  const int64_t state_bytes = largest_state(chain) * states * int64_t(sizeof(T));
  double plain = 0, interleaved = kTransposeCost * double(chain.in_features() + chain.out_features());
  const int64_t first_slabs = chain.contractions.front().outer;
  bool untied = false;
  for (const Contraction& c : chain.contractions) {
    const int64_t along = c.inner == 1 ? c.q : c.inner, across = c.inner == 1 ? c.outer : c.outer * c.q;
    plain += double(across * ((along + L - 1) / L * L) * c.p);
    interleaved += double(c.outer * c.q * c.inner * c.p) * double(std::max(batch, L)) / double(batch);
    untied |= !c.tied;
  }
  if (state_bytes * L > kInterleavedBytes / 2) interleaved *= 4;  // such a state would leave the cache
  if (untied || interleaved < plain) {
    const int64_t fitting = kInterleavedBytes / state_bytes / L * L;
    const int64_t samples = std::clamp<int64_t>(fitting, L, 4 * L);
    return {std::min(samples, (batch + L - 1) / L * L), true, 0};
  }
  const int64_t rows = (2 * kTileRows[1] + first_slabs - 1) / first_slabs;  // enough to fill register tiles
  return {std::clamp<int64_t>(std::max(kPlainBytes / state_bytes, rows), 1, batch), false, 0};
}
