// The memory that a task's states live in.

// Memory that a thread keeps from call to call, one piece for each purpose. Fresh memory would cost a page fault for
// every 4 KB; and large buffers that come and go between aligned outputs make glibc's heap grow without end.
enum class Purpose { block, weights, sums, totals, states, expression, count };

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
    if (piece.size < bytes) {
      piece.memory.reset();
      piece.memory.reset(new char[bytes]);
      piece.size = bytes;
      prefer_huge_pages(piece.memory.get(), int64_t(bytes));
    }
    return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(piece.memory.get()) + 63) / 64 * 64);
  }
  T* memory_;
  int64_t used_ = 0;
};

// A piece of memory for all that make(take) takes, which is done twice: to count, and with the memory.
template <class T, class Make> void in_memory(Purpose purpose, Make&& make) {
  int64_t size = 0;
  make([&](int64_t elements) { return size += Arena<T>::padded(elements), static_cast<T*>(nullptr); });
  Arena<T> arena(purpose, size);
  make([&](int64_t elements) { return arena.take(elements); });
}
