// What forward and backward share: the layers, their weights prepared, and the way over the batch.
//
// The batch is cut into blocks, and the blocks into as many tasks as there are threads. Called by forward.h and
// backward.h.

constexpr int64_t kSummedTogether = 256;  // samples whose gradients of large untied weights are summed in one place

// Everything the blocks of one call share.
template <class T, class S> struct Run {
  const Problem& problem;
  std::vector<Layer<T, S>> layers;
  int64_t in, out, batch;
  int64_t widest = 0;   // features between two layers, or at an end
  int64_t scratch_size = 0;
  int64_t samples;      // of a block
  int64_t blocks, tasks;

  // `backward`: whether it is for gradients, which keep each layer's states until a block is done.
  Run(const Problem& problem_, bool backward, int threads) : problem(problem_), batch(problem_.batch) {
    const void* const* tensors = problem.tensors.data() + 1;
    const int64_t share = (batch + threads - 1) / threads;  // at least one block for each thread
    int64_t bytes = 0;
    for (const Chain* chain : problem.layers) {
      const Layer<T, S>& layer = layers.emplace_back(*chain, tensors, share, backward);
      tensors += chain->weights() + chain->bias;
      widest = std::max({widest, layer.in, layer.out});
      scratch_size = std::max(scratch_size, layer.scratch_size());
      bytes += (layer.in + layer.out) * int64_t(sizeof(T)) * (backward ? 2 : 1);
    }
    in = layers.front().in, out = layers.back().out;
    samples = 1;
    int64_t most = kPlainBytes / bytes;
    for (const Layer<T, S>& layer : layers)
      for (const Phase& phase : layer.phases) {
        samples = std::max(samples, (phase.units + phase.slabs - 1) / phase.slabs);
        int64_t untied = 0;  // bytes
        for (const Contraction& c : phase.contractions) untied += c.tied ? 0 : c.weight_size() * int64_t(sizeof(T));
        if (backward && untied > kUntiedBytes) most = std::max(most, kSummedTogether);
      }
    samples = std::min(samples * std::max<int64_t>(1, most / samples), share);  // in whole chunks
    blocks = (batch + samples - 1) / samples;
    tasks = std::min<int64_t>(threads, blocks);

    int64_t size = 0;
    for (const Layer<T, S>& layer : layers) size += layer.prepared_size(batch);
    T* at = Arena<T>(Purpose::weights, size).take(size);
    for (Layer<T, S>& layer : layers) layer.prepare(batch, [&](int64_t n) { return at += n, at - n; });
  }

  // Rows of x as T: where they lie, or, if they are converted or come from several tensors, brought together in `rows`.
  const T* read_x(int64_t first, int64_t count, T* rows) const {
    if (problem.inputs.empty()) return read_rows<T, S>(problem.tensors[0], first, count, in, rows);
    T* to = rows;
    for (size_t i = 0; i < problem.inputs.size(); ++i) {
      const int64_t features = problem.layers[0]->inputs[i];
      const S* from = static_cast<const S*>(problem.inputs[i]) + first * features;
      for (int64_t n = 0; n < count; ++n) read(features, from + n * features, to + n * in);
      to += features;
    }
    return rows;
  }

  // Rows of gradients of the inputs, of which some may not be wanted.
  void write_inputs(void* const* gradients, int64_t first, int64_t count, const T* rows) const {
    for (size_t i = 0; i < problem.inputs.size(); ++i) {
      const int64_t features = problem.layers[0]->inputs[i];
      S* to = static_cast<S*>(gradients[i]) + first * features;
      for (int64_t n = 0; gradients[i] && n < count; ++n) write(features, rows + n * in, to + n * features);
      rows += features;
    }
  }

  // f(first sample, count) for every block of a task
  template <class F> void for_blocks(int64_t task, F&& f) const {
    for (int64_t b = blocks * task / tasks; b < blocks * (task + 1) / tasks; ++b)
      f(b * samples, std::min(samples, batch - b * samples));
  }
};
