// Threads that go through phases of work together: a phase begins when the one before it is done.
//
// A phase has a chunk for each member, who takes its own first and then those that nobody has taken. So no one waits for a
// thread that has not come, and whoever comes late finds what is left. Included before an instruction set is selected.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace factorlayer::cpu {

class Team {
 public:
  explicit Team(int64_t members) : members_(members), taken_(new Taken[size_t(members)]) {}

  // f(phase, chunk) for the chunks of all phases that this member takes. Returns when all phases are done.
  template <class F> void run(int64_t member, int64_t phases, F&& f) {
    for (int waited = 0;;) {
      const int64_t phase = done_.load(std::memory_order_acquire) / members_;
      if (phase >= phases) return;
      int64_t chunk = member;
      bool mine = take(chunk, phase);
      if (!mine && waited >= kPatience)
        for (chunk = 0; chunk < members_ && !(mine = take(chunk, phase));) ++chunk;
      if (mine) {
        f(phase, chunk);
        done_.fetch_add(1, std::memory_order_acq_rel);
        waited = 0;
      } else if (++waited < kPatience) {
        pause();
      } else {
        std::this_thread::yield();
      }
    }
  }

 private:
  static constexpr int kPatience = 256;  // looks at what the others do, some microseconds

  struct alignas(64) Taken {
    std::atomic<int64_t> phases{0};
  };

  bool take(int64_t chunk, int64_t phase) {
    std::atomic<int64_t>& phases = taken_[size_t(chunk)].phases;
    return phases.load(std::memory_order_relaxed) == phase &&
           phases.compare_exchange_strong(phase, phase + 1, std::memory_order_acq_rel);
  }

  static void pause() {
#if defined(__x86_64__)
    _mm_pause();
#endif
  }

  const int64_t members_;
  std::unique_ptr<Taken[]> taken_;
  alignas(64) std::atomic<int64_t> done_{0};  // chunks of all phases
};

}  // namespace factorlayer::cpu
