// Chooses among the builds of the CPU kernels, once per process.
#include "cpu.h"

#include <cstdlib>
#include <stdexcept>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace factorlayer::cpu {

#define FL_DECLARE(ISA)                                                                        \
  namespace ISA {                                                                              \
  void forward(const Problem&, void*, int, const Parallel&);                                   \
  void backward(const Problem&, const void*, const std::vector<void*>&, int, const Parallel&); \
  void recurrence(const Recurrent&, void*, int, const Parallel&);                              \
  void recurrence_backward(const Recurrent&, const RecurrentGradients&, int, const Parallel&); \
  void decode(const Decode&, const Decoded&, int, const Parallel&);                            \
  void draw(const Draw&, int64_t*, const Parallel&);                                           \
  bool has_activation(const std::string&);                                                     \
  }
FL_DECLARE(generic)
#if defined(__x86_64__)
FL_DECLARE(avx2)
FL_DECLARE(avx512)
#endif
#undef FL_DECLARE

namespace {

struct Build {
  const char* name;
  bool runs_here;
  void (*forward)(const Problem&, void*, int, const Parallel&);
  void (*backward)(const Problem&, const void*, const std::vector<void*>&, int, const Parallel&);
  void (*recurrence)(const Recurrent&, void*, int, const Parallel&);
  void (*recurrence_backward)(const Recurrent&, const RecurrentGradients&, int, const Parallel&);
  void (*decode)(const Decode&, const Decoded&, int, const Parallel&);
  void (*draw)(const Draw&, int64_t*, const Parallel&);
};

#define FL_BUILD(ISA, RUNS_HERE) \
  {#ISA, RUNS_HERE, ISA::forward, ISA::backward, ISA::recurrence, ISA::recurrence_backward, ISA::decode, ISA::draw}

Build choose_build() {
#if defined(__x86_64__)
  const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
  const Build builds[] = {  // best first
#if defined(__x86_64__)
      FL_BUILD(avx512, has_avx512),
      FL_BUILD(avx2, has_avx2),
#endif
      FL_BUILD(generic, true),
  };
#undef FL_BUILD
  const char* wanted = std::getenv("FACTORLAYER_CPU");
  for (const Build& build : builds)
    if (build.runs_here && (!wanted || wanted == std::string(build.name))) return build;
  throw std::runtime_error("FACTORLAYER_CPU is \"" + std::string(wanted) +
                           "\", which this processor cannot run; leave it unset, or use one of avx512, avx2, generic");
}

const Build& build() {
  static const Build chosen = choose_build();
  return chosen;
}

}  // namespace

void forward(const Problem& problem, void* y, int threads, const Parallel& parallel) {
  build().forward(problem, y, threads, parallel);
}

void backward(const Problem& problem, const void* grad_y, const std::vector<void*>& gradients, int threads,
              const Parallel& parallel) {
  build().backward(problem, grad_y, gradients, threads, parallel);
}

void recurrence(const Recurrent& problem, void* output, int threads, const Parallel& parallel) {
  build().recurrence(problem, output, threads, parallel);
}

void recurrence_backward(const Recurrent& problem, const RecurrentGradients& gradients, int threads,
                         const Parallel& parallel) {
  build().recurrence_backward(problem, gradients, threads, parallel);
}

void decode(const Decode& problem, const Decoded& made, int threads, const Parallel& parallel) {
  build().decode(problem, made, threads, parallel);
}

void draw(const Draw& problem, int64_t* tokens, const Parallel& parallel) { build().draw(problem, tokens, parallel); }

bool has_activation(const std::string& name) { return generic::has_activation(name); }

void prefer_huge_pages([[maybe_unused]] void* memory, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = 2 << 20;
  const uintptr_t first = (reinterpret_cast<uintptr_t>(memory) + kPage - 1) / kPage * kPage;
  const uintptr_t last = (reinterpret_cast<uintptr_t>(memory) + uintptr_t(bytes)) / kPage * kPage;
  // A hint: where it is refused, nothing is lost.
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

const char* instruction_set() { return build().name; }

}  // namespace factorlayer::cpu
