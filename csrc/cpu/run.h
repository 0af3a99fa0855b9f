// What forward and backward share: the layers, their weights prepared, and the way over the batch.
//
// The batch is cut into blocks, and the blocks into as many tasks as there are threads. Called by forward.h and
// backward.h.

// Everything the blocks of one call share.
template <class T, class S> struct Run {
  const Problem& problem;
  std::vector<Layer<T, S>> layers;
  int64_t in, out, batch;
  int64_t largest = 0;  // state, in features
  int64_t samples;      // of a block
  int64_t blocks, tasks;

  // `keeps`: whether each layer's states stay until the block is done.
  Run(const Problem& problem_, bool keeps, int threads) : problem(problem_), batch(problem_.batch) {
    const void* const* tensors = problem.tensors.data() + 1;
    int64_t kept = 0;
    for (const Chain* chain : problem.layers) {
      const Layer<T, S>& layer = layers.emplace_back(*chain, tensors);
      tensors += chain->weights() + chain->bias;
      largest = std::max(largest, largest_state(layer.chain));
      if (keeps) kept += layer.chain.state_features() - (layers.size() == 1 ? layer.in : 0);
    }
    in = layers.front().in, out = layers.back().out;
    samples = choose_samples((2 * largest + kept) * int64_t(sizeof(T)), threads);
    blocks = (batch + samples - 1) / samples;
    tasks = std::min<int64_t>(threads, blocks);

    int64_t size = 0;
    for (const Layer<T, S>& layer : layers) size += layer.prepared_size(batch);
    T* at = Arena<T>(Purpose::weights, size).take(size);
    for (Layer<T, S>& layer : layers) layer.prepare(batch, [&](int64_t n) { return at += n, at - n; });
  }

  // The layers' layouts and the samples of a block. `bytes`: what the states of a sample take.
  int64_t choose_samples(int64_t bytes, int threads) {
    bool interleaved = false;
    int64_t samples = kPlainBytes / bytes;
    for (Layer<T, S>& layer : layers) {
      layer.interleaved = is_interleaved<T>(layer.chain, batch, bytes);
      interleaved |= layer.interleaved;
      samples = std::max(samples, plain_samples<T>(layer.chain, bytes));
    }
    if (interleaved) return interleaved_samples<T>(batch, bytes);
    const int64_t share = (batch + threads - 1) / threads;  // at least one block for each thread
    return std::clamp<int64_t>(samples, 1, share);
  }

  // f(first sample, count) for every block of a task
  template <class F> void for_blocks(int64_t task, F&& f) const {
    for (int64_t b = blocks * task / tasks; b < blocks * (task + 1) / tasks; ++b)
      f(b * samples, std::min(samples, batch - b * samples));
  }
};
