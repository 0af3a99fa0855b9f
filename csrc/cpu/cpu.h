// The fused CPU kernels: a block of samples goes through all layers, each of which is contractions, bias and activation,
// while it sits in cache. No torch in here; ops/on_cpu.cpp calls it.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "../chain.h"
#include "../decoder.h"
#include "../dtype.h"

namespace factorlayer::cpu {

// Runs tasks 0 .. count-1, in parallel where it can.
using Parallel = std::function<void(int64_t count, const std::function<void(int64_t)>& task)>;

// A stack of layers, each with the next one's inputs for outputs. Tensors are contiguous and of one dtype.
struct Problem {
  std::vector<const Chain*> layers;
  DType dtype;
  int64_t batch;
  std::vector<const void*> tensors;  // x [batch, in], then each layer's weights as in chain.h, and its bias if it has one
  std::vector<const void*> inputs;   // in place of x, if it is several: as the first layer says
};

void forward(const Problem& problem, void* y, int threads, const Parallel& parallel);

// `gradients`: one for each of the problem's tensors, and behind them of its inputs, null where it is not wanted. Sums over samples are partial sums per
// thread, added in their order.
void backward(const Problem& problem, const void* grad_y, const std::vector<void*>& gradients, int threads,
              const Parallel& parallel);

// The sequences of a recurrence, and their tensors. Step t of sequence i has row first[i] + offsets[t] of all tensors that have
// rows; where these are null they are multiples of a number, and without lengths all sequences have all steps.
struct Recurrent {
  const Recurrence* recurrence;
  DType dtype;
  int64_t rows, sequences, steps, of_sequence, of_step;
  const int64_t *first, *lengths, *offsets;
  std::vector<const void*> gates;    // three [rows, hidden], or one [rows, 3 hidden]
  const void* initial;               // [sequences, hidden]
  std::vector<const void*> weights;  // of a gate behind those of the one before
  const void* bias;                  // null without one
  const bool* starts;                // null, or rows before which a sequence begins again from its initial state

  int64_t row(int64_t sequence, int64_t step) const {
    return (first ? first[sequence] : sequence * of_sequence) + (offsets ? offsets[step] : step * of_step);
  }
  int64_t length(int64_t sequence) const { return lengths ? lengths[sequence] : steps; }
};

// The states behind all steps, in the rows of `output` that a sequence has.
void recurrence(const Recurrent& problem, void* output, int threads, const Parallel& parallel);

struct RecurrentGradients {
  const void *grad_output, *output;
  std::vector<void*> gates;  // as many as the problem has
  void *beside, *initial;    // [rows, hidden]: of the candidate's product, or what is multiplied in it; [sequences, hidden]
};
void recurrence_backward(const Recurrent& problem, const RecurrentGradients& gradients, int threads,
                         const Parallel& parallel);

// A step of a decoder, and its tensors; `layers` has each one's weights of inputs and states, and biases, null without.
struct Decode {
  const Decoder* decoder;
  DType dtype;
  int64_t batch;
  const int64_t* tokens;
  const void *embedding, *context, *state, *head, *bias;  // context [batch, features], state [layers, batch, hidden]
  const void* const* layers;
  uint64_t seed, step;
  double temperature;
};
// What it makes, of which some is null: scores in what sums are kept in, [batch, vocabulary].
struct Decoded {
  void* state;
  int64_t* tokens;
  void* scores;
};
void decode(const Decode& problem, const Decoded& made, int threads, const Parallel& parallel);

// Scores [samples, count], of all tokens or of those at `places`, which may be null, and noise beside them.
struct Draw {
  DType dtype;
  int64_t samples, count;
  const void* scores;
  const int64_t* places;
  uint64_t seed, step;
  double temperature;
};
void draw(const Draw& problem, int64_t* tokens, const Parallel& parallel);

bool has_activation(const std::string& name);

// Asks for 2 MB pages under a large new output: its first touch costs a page fault for every 4 KB otherwise,
// which takes longer than the work (32 MB: 5 ms of faults, 1 ms to write).
void prefer_huge_pages(void* memory, int64_t bytes);

// avx512, avx2 or generic: the best of this machine, or what FACTORLAYER_CPU names.
const char* instruction_set();

}  // namespace factorlayer::cpu
