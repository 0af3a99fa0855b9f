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

// Pieces of memory, one behind another: take(elements). Without memory they are null, and only counted.
template <class T> class Pieces {
 public:
  explicit Pieces(T* memory) : memory_(memory) {}
  T* operator()(int64_t elements) {
    T* at = memory_ ? memory_ + size_ : nullptr;
    size_ += Arena<T>::padded(elements);
    return at;
  }
  int64_t size() const { return size_; }

 private:
  T* memory_;
  int64_t size_ = 0;
};

// The same of memory that is there, without gaps.
template <class T> struct Packed {
  T* at;
  T* operator()(int64_t elements) { return at += elements, at - elements; }
};

// A piece of memory for all that make(take) takes, which is done twice: to count, and with the memory.
template <class T, class Make> void in_memory(Purpose purpose, Make&& make) {
  T* memory = nullptr;
  for (bool counts : {true, false}) {
    Pieces<T> take(memory);
    make(take);
    if (counts) memory = Arena<T>(purpose, take.size()).take(0);
  }
}
