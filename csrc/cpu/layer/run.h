// What forward and backward share: the layers, their weights prepared, and the way over the batch.
//
// The batch is cut into blocks, and the blocks into as many tasks as there are threads. Where a layer has few samples, threads may
// go through its blocks together: each has some chunks of every phase, or some positions of every untied contraction. Called by
// forward.h and backward.h.

// Samples whose gradients of large weights are summed in one place: so many, and no fewer if there are
constexpr int64_t kSummedTogether = 256, kFewestTogether = 16;
constexpr int64_t kLargeBytes = 1 << 20;  // of weights
constexpr int64_t kFewSamples = 2;        // of a thread, of which some have one less than others, or none
// Cycles for a byte of weights whose gradients are summed in a place for each thread, cleared, added up and copied: beyond the
// second-level cache, and in it.
constexpr double kFarSumsCost = 0.4, kNearSumsCost = 0.15;

// Everything the blocks of one call share.
template <class T> struct Run {
  const Problem& problem;
  const Held<T> held;
  std::vector<Layer<T>> layers;
  int64_t in, out, batch;
  int64_t widest = 0;   // features between two layers, or at an end
  int64_t scratch_size = 0;
  int64_t samples;      // of a block
  int64_t blocks, tasks;
  int64_t workers = 1;  // of a task
  int64_t places = 1;   // of a task's chunks and sums: one for each worker who has chunks of his own

  // `backward`: whether it is for gradients, which keep each layer's states until a block is done.
  Run(const Problem& problem_, Held<T> held_, bool backward, int threads)
      : problem(problem_), held(held_), batch(problem_.batch) {
    const void* const* tensors = problem.tensors.data() + 1;
    const bool large = backward && weight_bytes() > kLargeBytes;
    int64_t share = (batch + threads - 1) / threads;  // at least one block for each thread
    if (large) share = std::min(batch, std::max(share, kFewestTogether));
    int64_t bytes = 0;
    layers.reserve(problem.layers.size());
    for (const Chain* chain : problem.layers) {
      Layer<T>& layer = layers.emplace_back(*chain, held, tensors, share, share, backward);
      if (problem.layers.size() == 1 && threads > 1 && go_together(layer, share, backward, threads)) {
        share = batch;
        layer.cut_again(batch, backward, places);
        layer.apart = places < workers;
      }
      tensors += chain->weights() + chain->bias;
      widest = std::max({widest, layer.in, layer.out});
      scratch_size = std::max(scratch_size, layer.scratch_size());
      bytes += (layer.in + layer.out) * int64_t(sizeof(T)) * (backward ? 2 : 1);
    }
    in = layers.front().in, out = layers.back().out;
    samples = 1;
    for (const Layer<T>& layer : layers)
      for (const Phase& phase : layer.cut->phases) samples = std::max(samples, (phase.units + phase.slabs - 1) / phase.slabs);
    const int64_t most = large ? kSummedTogether : kPlainBytes / bytes;
    samples = std::min(samples * std::max<int64_t>(1, most / samples), share);  // in whole chunks
    if (workers > 1) samples = batch;
    blocks = (batch + samples - 1) / samples;
    tasks = std::min<int64_t>(threads, blocks);

    int64_t size = 0;
    for (const Layer<T>& layer : layers) size += layer.prepared_size();
    Packed<T> take{Arena<T>(Purpose::weights, size).take(size)};
    for (Layer<T>& layer : layers) layer.prepare(take);
  }

  // Whether threads go through a layer's samples together, rather than with a share of them each.
  bool go_together(const Layer<T>& layer, int64_t share, bool backward, int threads) {
    const Chain& chain = layer.chain;
    const bool forks = share < batch;  // anyway
    double least = layer.cut->cost - (forks ? 0 : kForkCost);
    if (forks && backward) least += sums_cost();
    if (batch % threads && batch < kFewSamples * threads) {
      const double cost = Phases<T>::of(chain, batch, batch, backward, threads)->cost;
      if (cost < least) least = cost, workers = places = threads;
    }
    if (batch <= kSummedTogether && by_positions_cost(chain, backward, threads) < least) workers = threads, places = 1;
    return workers > 1;
  }
  double sums_cost() const {
    const int64_t bytes = weight_bytes();
    return double(bytes) * (bytes > kNearBytes ? kFarSumsCost : kNearSumsCost);
  }
  // Of the thread that has most positions.
  double by_positions_cost(const Chain& chain, bool backward, int threads) const {
    double most = 0;  // of the positions of a contraction
    for (const Contraction& c : chain.contractions) {
      if (!has_parts(c)) return kNever;
      const int64_t positions = c.outer * c.inner;
      most = std::max(most, double((positions + threads - 1) / threads) / double(positions));
    }
    const auto cut = Phases<T>::of(chain, batch, batch, backward, 1);
    double meetings = 0;
    for (const Phase& phase : cut->phases)
      meetings += double(phase.chunks(batch)) * double(backward ? 2 * phase.size() + 2 : phase.size() + 2 * !phase.in_place());
    return cut->cost * most + kMeetCost * meetings;
  }

  // Of weights that a sample takes once: what is summed of few samples is little beside these.
  int64_t weight_bytes() const {
    int64_t size = 0;
    for (const Chain* chain : problem.layers)
      for (const Contraction& c : chain->contractions)
        if (!c.tied || c.outer * c.inner == 1) size += c.weight_size();
    return size * int64_t(sizeof(T));
  }

  // Rows of x as T: where they lie, or, if they are converted or come from several tensors, brought together in `rows`.
  const T* read_x(int64_t first, int64_t count, T* rows, const Workers<T>& by) const {
    if (problem.inputs.empty()) return held.rows(problem.tensors[0], first, count, in, rows, by);
    T* to = rows;
    for (size_t i = 0; i < problem.inputs.size(); ++i) {
      const int64_t features = problem.layers[0]->inputs[i];
      for (int64_t n = 0; n < count; ++n)
        held.read(features, held.at(problem.inputs[i], (first + n) * features), to + n * in);
      to += features;
    }
    return rows;
  }

  // Rows of gradients of the inputs, of which some may not be wanted.
  void write_inputs(void* const* gradients, int64_t first, int64_t count, const T* rows) const {
    for (size_t i = 0; i < problem.inputs.size(); ++i) {
      const int64_t features = problem.layers[0]->inputs[i];
      for (int64_t n = 0; gradients[i] && n < count; ++n)
        held.write(features, rows + n * in, held.at(gradients[i], (first + n) * features));
      rows += features;
    }
  }

  // f(first sample, count) for every block of a task
  template <class F> void for_blocks(int64_t task, F&& f) const {
    for (int64_t b = blocks * task / tasks; b < blocks * (task + 1) / tasks; ++b)
      f(b * samples, std::min(samples, batch - b * samples));
  }
};
