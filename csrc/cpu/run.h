// A chain over a batch: blocks of samples, each taken through all stages while its state sits in cache.
//
// T is what is computed in, S what the tensors hold. The batch is cut into as many runs of blocks as there
// are threads; in the backward pass each run sums its own weight gradients, added up in order at the end.

template <class T> void add(int64_t n, const T* from, T* to) {
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
  const Activation<T>* activation;  // null for the identity
  std::vector<Weights<T>> weights;             // [rank * stages], in the order of contraction
  std::vector<std::vector<const T*>> parts;    // the same, of the parts of each group
  const T* bias = nullptr;

  Run(const Problem& problem_, int64_t states, int threads)
      : problem(problem_), groups(merge(*problem_.chain)), chain(*problem_.chain), in(chain.in_features()),
        out(chain.out_features()), batch(problem_.batch), stages(int64_t(groups.size())) {
    chain.contractions.clear();
    for (const Group& group : groups) chain.contractions.push_back(group.whole);
    block = choose_block<T>(chain, batch, states);
    if (!block.interleaved) {  // at least one block for each thread
      const int64_t share = (batch + threads - 1) / threads;
      block.samples = std::min(block.samples, share);
    }
    blocks = (batch + block.samples - 1) / block.samples;
    tasks = std::min<int64_t>(threads, blocks);
    activation = chain.activation == "identity" ? nullptr : find_activation<T>(chain.activation);
    prepare_weights();
  }

  static constexpr bool kConverts = !std::is_same<T, S>::value;

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
          const S* given = static_cast<const S*>(problem.weights[part.weight]) + r * n;
          own.push_back(read_rows(given, 0, 1, n, kConverts ? take(n) : nullptr));
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

  int64_t packed_scratch() const {
    int64_t size = 0;
    for (const Contraction& c : chain.contractions) size = std::max({size, packed_size<T>(c.p), packed_size<T>(c.q)});
    return size;
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

  // [count, features] -> [features, samples]; samples beyond count are zero, so that they add nothing
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

template <class T, class S>
void run_forward(const Problem& problem, void* y, int threads, const Parallel& parallel) {
  const Run<T, S> run(problem, 2, threads);
  const int64_t samples = run.block.samples, state = largest_state(run.chain) * samples;
  const bool interleaved = run.block.interleaved;
  parallel(run.tasks, [&](int64_t task) {
    Arena<T> arena(Purpose::block, 6 * Arena<T>::padded(state) + Arena<T>::padded(run.packed_scratch()));
    T *x_rows = arena.take(state), *y_rows = arena.take(state), *x_state = arena.take(state);
    T *z_state = arena.take(state), *even = arena.take(state), *odd = arena.take(state);
    T* packed = arena.take(run.packed_scratch());
    std::vector<T*> states(run.stages);
    for (int64_t i = 0; i < run.stages; ++i) states[i] = i % 2 ? odd : even;
    run.for_blocks(task, [&](int64_t at, int64_t count) {
      const Block block{interleaved ? samples : count, interleaved};
      const T* x = run.read_rows(problem.x, at, count, run.in, x_rows);
      if (interleaved) run.interleave(count, run.in, x, x_state), x = x_state;
      T* rows = run.output_rows(y, at, run.out, y_rows);
      states.back() = interleaved ? z_state : rows;
      for (int64_t r = 0; r < run.chain.rank; ++r) run.contract_all(r, run.stages, block, x, states, packed);
      if (interleaved) transpose<T>(run.out, count, z_state, samples, rows, run.out);
      if (run.activation || run.bias)
        for (int64_t n = 0; n < count; ++n)
          (run.activation ? run.activation->forward : activate<T, activation_identity>)(run.out, run.bias,
                                                                                       rows + n * run.out);
      run.write_rows(y, at, count, run.out, rows);
    });
  });
}

// From the sums for contraction i, all ranks, to the gradients of the weights that it stands for.
template <class T, class S>
void write_weight_gradients(const Run<T, S>& run, int64_t i, const T* sums, const Gradients& wanted) {
  const Group& group = run.groups[i];
  std::vector<T> part_sums;
  for (int64_t r = 0; r < run.chain.rank; ++r, sums += group.whole.weight_size())
    for (size_t part = 0; part < group.parts.size(); ++part) {
      const Contraction& c = group.parts[part];
      S* grad = static_cast<S*>(wanted.grad_weights[c.weight]);
      if (!grad) continue;
      const T* found = sums;
      if (group.parts.size() > 1) {
        part_sums.resize(c.weight_size());
        part_gradient(group, run.parts[r * run.stages + i], part, sums, part_sums.data());
        found = part_sums.data();
      }
      write(c.weight_size(), found, grad + r * c.weight_size());
    }
}

template <class T, class S>
void run_backward(const Problem& problem, const void* grad_y, const Gradients& wanted, int threads,
                  const Parallel& parallel) {
  using R = Run<T, S>;
  const R run(problem, int64_t(problem.chain->contractions.size()) + 2, threads);
  const Chain& chain = run.chain;
  const int64_t stages = run.stages, samples = run.block.samples, state = largest_state(chain) * samples;
  const bool interleaved = run.block.interleaved;

  // Sums of one task: the weight gradients, each [rank, size], then the bias gradient.
  int64_t sums_size = wanted.grad_bias ? run.out : 0, scratch_size = 0;
  int64_t earliest = stages;  // the first contraction whose weight gradient is wanted
  std::vector<int64_t> offset(stages);
  std::vector<bool> wants_weight(stages);
  for (int64_t i = stages; i-- > 0;) {
    const Contraction& c = chain.contractions[i];
    for (const Contraction& part : run.groups[i].parts)
      if (wanted.grad_weights[part.weight]) wants_weight[i] = true;
    if (!wants_weight[i]) continue;
    earliest = i;
    offset[i] = sums_size;
    sums_size += chain.rank * c.weight_size();
    scratch_size = std::max(scratch_size, grad_weight_scratch(c));
  }
  const int64_t last_needed = wanted.grad_x ? 0 : earliest;
  const int64_t kept = earliest < stages ? stages - 1 : 0;  // states to recompute
  T* sums = Arena<T>(Purpose::sums, run.tasks * sums_size).take(run.tasks * sums_size);

  parallel(run.tasks, [&](int64_t task) {
    Arena<T> arena(Purpose::block, (stages + 7) * Arena<T>::padded(state) + Arena<T>::padded(scratch_size) +
                   Arena<T>::padded(run.packed_scratch()));
    T *x_rows = arena.take(state), *x_state = arena.take(state), *z_state = arena.take(state);
    T *z_rows = arena.take(state), *g_rows = arena.take(state), *g_state = arena.take(state);
    T* gx_rows = arena.take(state);
    std::vector<T*> states(stages);  // states[i]: after contraction i
    for (T*& s : states) s = arena.take(state);
    T *scratch = arena.take(scratch_size), *packed = arena.take(run.packed_scratch());
    T* sum = sums + task * sums_size;
    std::fill(sum, sum + sums_size, T(0));

    run.for_blocks(task, [&](int64_t at, int64_t count) {
      const Block block{interleaved ? samples : count, interleaved};
      const T* x = R::read_rows(problem.x, at, count, run.in, x_rows);
      if (interleaved) run.interleave(count, run.in, x, x_state), x = x_state;
      const T* g = R::read_rows(grad_y, at, count, run.out, g_rows);
      if (run.activation) {
        const T* z = states.back();
        for (int64_t r = 0; r < chain.rank; ++r) run.contract_all(r, stages, block, x, states, packed);
        if (interleaved) transpose<T>(run.out, count, z, samples, z_rows, run.out), z = z_rows;
        if (g != g_rows) std::copy(g, g + count * run.out, g_rows), g = g_rows;
        for (int64_t n = 0; n < count; ++n)
          run.activation->backward(run.out, run.bias, z + n * run.out, g_rows + n * run.out);
      }
      if (wanted.grad_bias)
        for (int64_t n = 0; n < count; ++n) add(run.out, g + n * run.out, sum);
      if (last_needed == stages) return;
      if (interleaved) run.interleave(count, run.out, g, g_state), g = g_state;
      T* gx_out = wanted.grad_x ? R::output_rows(wanted.grad_x, at, run.in, gx_rows) : nullptr;
      T* gx = interleaved ? z_state : gx_out;
      for (int64_t r = 0; r < chain.rank; ++r) {
        if (kept && !(run.activation && chain.rank == 1)) run.contract_all(r, kept, block, x, states, packed);
        const T* grad = g;
        for (int64_t i = stages; i-- > last_needed;) {
          const Contraction& c = chain.contractions[i];
          const T* input = i ? states[i - 1] : x;
          if (wants_weight[i])
            contract_grad_w<T>(c, block, grad, input, sum + offset[i] + r * c.weight_size(), scratch);
          if (i == last_needed && !wanted.grad_x) break;
          T* to = i ? states[i - 1] : gx;  // a state is used up once its weight gradient is taken
          contract_grad_x<T>(c, block, run.weights[r * stages + i], grad, to, r > 0 && i == 0, packed);
          grad = to;
        }
      }
      if (!wanted.grad_x) return;
      if (interleaved) transpose<T>(run.in, count, gx, samples, gx_out, run.in);
      R::write_rows(wanted.grad_x, at, count, run.in, gx_out);
    });
  });

  constexpr int64_t kPiece = 4096;  // elements of the sums that one task adds up
  parallel((sums_size + kPiece - 1) / kPiece, [&](int64_t piece) {
    const int64_t from = piece * kPiece, to = std::min(sums_size, from + kPiece);
    for (int64_t t = 1; t < run.tasks; ++t) add(to - from, sums + t * sums_size + from, sums + from);
  });
  if (wanted.grad_bias) write(run.out, sums, static_cast<S*>(wanted.grad_bias));
  for (int64_t i = 0; i < stages; ++i)
    if (wants_weight[i]) write_weight_gradients(run, i, sums + offset[i], wanted);
}

template <class F> auto with_types(DType dtype, F&& f) {
  switch (dtype) {
    case DType::float64: return f(double(), double());
    case DType::float32: return f(float(), float());
    case DType::bfloat16: return f(float(), BFloat16());
    default: return f(float(), Float16());
  }
}
