// What forward and backward share: the chain as it is run, its weights prepared, and the way over the batch.
//
// T is what is computed in, S what the tensors hold. The batch is cut into blocks, and the blocks into as many tasks
// as there are threads. Called by forward.h and backward.h.

template <class T, class U> void add(int64_t n, const T* from, U* to) {
  for (int64_t i = 0; i < n; ++i) to[i] += from[i];
}

// Everything the blocks of one call share.
template <class T, class S> struct Run {
  const Problem& problem;
  std::vector<Group> groups;
  Chain chain;  // with one contraction for each group
  int64_t in, out, batch, stages;
  Block block;
  int64_t blocks, tasks;
  std::vector<Weights<T>> weights;           // [rank * stages], in the order of contraction
  std::vector<std::vector<const T*>> parts;  // the same, of the parts of each group
  const T* bias = nullptr;
  std::optional<Activation<T>> activation;

  Run(const Problem& problem_, int64_t states, int threads)
      : problem(problem_), groups(merge(*problem_.chain, [this](const Contraction& c) { return may_merge(c); })),
        chain(*problem_.chain), in(chain.in_features()), out(chain.out_features()), batch(problem_.batch),
        stages(int64_t(groups.size())) {
    chain.contractions.clear();
    for (const Group& group : groups) chain.contractions.push_back(group.whole);
    block = choose_block<T>(chain, batch, states);
    if (!block.interleaved) {  // at least one block for each thread
      const int64_t share = (batch + threads - 1) / threads;
      block.samples = std::min(block.samples, share);
    }
    blocks = (batch + block.samples - 1) / block.samples;
    tasks = std::min<int64_t>(threads, blocks);
    prepare_weights();
    std::vector<T> parameters(chain.parameters());
    for (size_t i = 0; i < parameters.size(); ++i)
      parameters[i] = *read_rows(problem.weights[problem.chain->contractions.size() + i], 0, 1, 1, &parameters[i]);
    activation.emplace(chain, bias, parameters);
  }

  static constexpr bool kConverts = !std::is_same<T, S>::value;

  bool may_merge(const Contraction& c) const {
    std::vector<T> buffer(kLargestMerged * kLargestMerged);
    for (int64_t r = 0; r < problem.chain->rank; ++r)
      if (!is_tame(c.weight_size(), read_rows(problem.weights[c.weight], r, 1, c.weight_size(), buffer.data())))
        return false;
    return true;
  }

  void prepare_weights() {
    int64_t size = kConverts && chain.bias ? out : 0;
    for (const Group& group : groups) {
      const bool merged = group.parts.size() > 1, transposed = needs_transposed_weight(group.whole, block.interleaved);
      size += chain.rank * group.whole.weight_size() * (merged + transposed);
      if (kConverts)
        for (const Contraction& part : group.parts) size += chain.rank * part.weight_size();
    }
    T* at = Arena<T>(Purpose::weights, size).take(size);
    auto take = [&](int64_t n) { return at += n, at - n; };
    for (int64_t r = 0; r < chain.rank; ++r)
      for (const Group& group : groups) {
        std::vector<const T*>& own = parts.emplace_back();
        for (const Contraction& part : group.parts) {
          const int64_t n = part.weight_size();
          own.push_back(read_rows(problem.weights[part.weight], r, 1, n, kConverts ? take(n) : nullptr));
        }
        const Contraction& c = group.whole;
        Weights<T> w{own[0], nullptr};
        if (own.size() > 1) {
          T* merged = take(c.weight_size());
          merge_weights(group, own, merged);
          w.data = merged;
        }
        if (needs_transposed_weight(c, block.interleaved)) {
          T* transposed = take(c.weight_size());
          transpose<T>(c.q, c.p, w.data, c.p, transposed, c.q);
          w.transposed = transposed;
        }
        weights.push_back(w);
      }
    if (chain.bias) bias = read_rows(problem.bias, 0, 1, out, kConverts ? take(out) : nullptr);
  }

  // f(first sample, count) for every block of a task
  template <class F> void for_blocks(int64_t task, F&& f) const {
    for (int64_t b = blocks * task / tasks; b < blocks * (task + 1) / tasks; ++b)
      f(b * block.samples, std::min(block.samples, batch - b * block.samples));
  }

  // Rows of a tensor as T: where they lie if they are T already, else converted into `rows`.
  static const T* read_rows(const void* tensor, int64_t first, int64_t count, int64_t features, T* rows) {
    const S* from = static_cast<const S*>(tensor) + first * features;
    if constexpr (kConverts) return read(count * features, from, rows), rows;
    else return from;
  }
  // Where rows of an output are computed: in place, or in `rows` until write_rows converts them.
  static T* output_rows(void* tensor, int64_t first, int64_t features, T* rows) {
    if constexpr (kConverts) return rows;
    else return static_cast<T*>(tensor) + first * features;
  }
  static void write_rows(void* tensor, int64_t first, int64_t count, int64_t features, const T* rows) {
    if constexpr (kConverts) write(count * features, rows, static_cast<S*>(tensor) + first * features);
  }

  // [count, features] -> [features, samples]; samples beyond count are zero: what is computed of them is never read
  void interleave(int64_t count, int64_t features, const T* rows, T* state) const {
    transpose<T>(count, features, rows, features, state, block.samples);
    if (count < block.samples)
      for (int64_t f = 0; f < features; ++f)
        std::fill(state + f * block.samples + count, state + (f + 1) * block.samples, T(0));
  }

  // to[i] = the first i + 1 contractions of rank r over x, for i < count; the whole chain's is added up over r
  void contract_all(int64_t r, int64_t count, Block b, const T* x, const std::vector<T*>& to, T* packed) const {
    for (int64_t i = 0; i < count; ++i, x = to[i - 1])
      contract<T>(chain.contractions[i], b, weights[r * stages + i], x, to[i], r > 0 && i == stages - 1, packed);
  }
};
