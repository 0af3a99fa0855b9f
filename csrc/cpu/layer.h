// One layer of a stack as it is run: small neighbouring contractions merged, cut into phases, the weights prepared.
//
// T is what is computed in, S what the tensors hold. Rows [samples, in] become rows [samples, out], phase by phase. Called
// by run.h, forward.h and backward.h.

template <class T, class U> void add(int64_t n, const T* from, U* to) {
  for (int64_t i = 0; i < n; ++i) to[i] += from[i];
}

// What every contraction of a task may use: contract_scratch() elements, and kPackedSize.
template <class T> struct Scratch {
  T *elements, *packed;
};

template <class T, class S> constexpr bool kConverts = !std::is_same<T, S>::value;

// Rows of a tensor as T: where they lie if they are T already, else converted into `rows`.
template <class T, class S>
const T* read_rows(const void* tensor, int64_t first, int64_t count, int64_t features, T* rows) {
  const S* from = static_cast<const S*>(tensor) + first * features;
  if constexpr (kConverts<T, S>) return read(count * features, from, rows), rows;
  else return from;
}
// Where rows of an output are computed: in place, or in `rows` until write_rows converts them.
template <class T, class S> T* output_rows(void* tensor, int64_t first, int64_t features, T* rows) {
  if constexpr (kConverts<T, S>) return rows;
  else return static_cast<T*>(tensor) + first * features;
}
template <class T, class S>
void write_rows(void* tensor, int64_t first, int64_t count, int64_t features, const T* rows) {
  if constexpr (kConverts<T, S>) write(count * features, rows, static_cast<S*>(tensor) + first * features);
}

// A task's memory for a layer: of each phase the states of a chunk, and behind all but the last one those of a block.
template <class T> struct States {
  struct OfChunk {
    T *x, *y, *grad_y, *grad_x;  // brought together, where a chunk is not done in place
    std::vector<T*> after;       // behind each contraction but the last
  };
  std::vector<OfChunk> chunk;
  std::vector<T*> between;
};

template <class T, class S> struct Layer {
  const void* const* tensors;  // its weights, its activation's parameters and its bias
  std::vector<Group> groups;
  Chain chain;  // with one contraction for each group
  int64_t in, out, stages;
  typename Phases<T>::Cut cut;
  const std::vector<Phase>& phases;
  Activation<T> activation;                  // behind the bias
  std::vector<Weights<T>> weights;           // [rank * stages], in the order of contraction
  std::vector<std::vector<const T*>> parts;  // the same, of the parts of each group

  Layer(const Chain& given, const void* const* tensors_, int64_t samples, bool backward)
      : tensors(tensors_), groups(merge(given, [&](const Contraction& c) { return may_merge(given, c); })),
        chain(with(given, groups)), in(chain.in_features()), out(chain.out_features()), stages(int64_t(groups.size())),
        cut(Phases<T>::of(chain.contractions, samples, backward)), phases(*cut) {}

  static Chain with(Chain chain, const std::vector<Group>& groups) {
    chain.contractions.clear();
    for (const Group& group : groups) chain.contractions.push_back(group.whole);
    return chain;
  }

  bool may_merge(const Chain& given, const Contraction& c) const {
    std::vector<T> buffer(kLargestMerged * kLargestMerged);
    for (int64_t r = 0; r < given.rank; ++r)
      if (!is_tame(c.weight_size(), read_rows<T, S>(tensors[c.weight], r, 1, c.weight_size(), buffer.data())))
        return false;
    return true;
  }

  int64_t parameter_index() const {
    int64_t index = 0;
    for (const Group& group : groups) index += int64_t(group.parts.size());
    return index;
  }
  int64_t bias_index() const { return parameter_index() + int64_t(chain.parameters()); }

  // Whether contraction i has vectors along its outputs.
  bool needs_transposed(int64_t i, int64_t batch) const {
    const Phase& phase = *std::find_if(phases.begin(), phases.end(), [&](const Phase& p) { return i < p.last; });
    const Contraction c = phase.contraction(i - phase.first, phase.columns);
    return needs_transposed_weight<T>(c, phase.interleaved, batch * phase.slabs);
  }

  // What prepare() takes.
  int64_t prepared_size(int64_t batch) const {
    int64_t size = chain.bias ? out * Activation<T>::together(out) : 0;
    for (int64_t i = 0; i < stages; ++i) {
      const Group& group = groups[i];
      size += chain.rank * group.whole.weight_size() * ((group.parts.size() > 1) + needs_transposed(i, batch));
      if (kConverts<T, S>)
        for (const Contraction& part : group.parts) size += chain.rank * part.weight_size();
    }
    return size;
  }

  template <class Take> void prepare(int64_t batch, Take&& take) {
    for (int64_t r = 0; r < chain.rank; ++r)
      for (int64_t i = 0; i < stages; ++i) {
        const Group& group = groups[i];
        std::vector<const T*>& own = parts.emplace_back();
        for (const Contraction& part : group.parts) {
          const int64_t n = part.weight_size();
          own.push_back(read_rows<T, S>(tensors[part.weight], r, 1, n, kConverts<T, S> ? take(n) : nullptr));
        }
        const Contraction& c = group.whole;
        Weights<T> w{own[0], nullptr};
        if (own.size() > 1) {
          T* merged = take(c.weight_size());
          merge_weights(group, own, merged);
          w.data = merged;
        }
        if (needs_transposed(i, batch)) {
          T* transposed = take(c.weight_size());
          transpose<T>(c.q, c.p, w.data, c.p, transposed, c.q);
          w.transposed = transposed;
        }
        weights.push_back(w);
      }
    const int64_t together = Activation<T>::together(out);
    T* bias = chain.bias ? take(out * together) : nullptr;
    for (int64_t n = 0; bias && n < together; ++n)
      read(out, static_cast<const S*>(tensors[bias_index()]), bias + n * out);
    std::vector<T> parameters(chain.parameters());
    for (size_t i = 0; i < parameters.size(); ++i)
      parameters[i] = *read_rows<T, S>(tensors[parameter_index() + i], 0, 1, 1, &parameters[i]);
    activation = Activation<T>(chain, bias, parameters);
  }

  // take(elements) gives memory, in the same order every time. `keeps`: every state of a chunk has a place of its own, as
  // have those of its gradients.
  template <class Take> States<T> make_states(int64_t samples, bool keeps, Take&& take) const {
    States<T> states;
    for (const Phase& phase : phases) {
      const auto size = [&](int64_t numbers) { return phase.units * numbers / phase.inner * phase.columns; };
      const bool moved = !phase.in_place();
      typename States<T>::OfChunk& chunk = states.chunk.emplace_back();
      chunk.x = moved ? take(size(phase.in)) : nullptr, chunk.y = moved ? take(size(phase.out)) : nullptr;
      chunk.grad_y = moved && keeps ? take(size(phase.out)) : nullptr;
      chunk.grad_x = moved && keeps ? take(size(phase.in)) : nullptr;
      int64_t largest = 0;
      for (int64_t i = 0; i + 1 < phase.size(); ++i) largest = std::max(largest, out_of(phase.contractions[i]));
      for (int64_t i = 0; i + 1 < phase.size(); ++i)
        chunk.after.push_back(keeps   ? take(size(out_of(phase.contractions[i])))
                              : i < 2 ? take(size(largest))
                                      : chunk.after[i - 2]);
      if (phase.last < stages) states.between.push_back(take(phase.out * phase.slabs * samples));
    }
    return states;
  }
  int64_t scratch_size() const {
    int64_t size = 0;
    for (const Phase& phase : phases)
      for (int64_t i = 0; i < phase.size(); ++i)
        size = std::max(size, contract_scratch(phase.contraction(i, phase.columns), phase.template block<T>(phase.units)));
    return size;
  }

  // The first `count` contractions of a phase for a chunk and term r; the last of all is added to what there is, if `adds`.
  void contract_chunk(const Phase& phase, const Chunk& chunk, int64_t r, int64_t count, const T* x,
                      const std::vector<T*>& after, T* y, bool adds, const Scratch<T>& scratch) const {
    for (int64_t i = 0; i < count; ++i) {
      const bool last = i + 1 == phase.size();
      T* to = last ? y : after[i];
      contract<T>(phase.contraction(i, chunk.columns), chunk.block, weights[r * stages + phase.first + i], x, to,
                  last && adds, scratch.elements, scratch.packed);
      x = to;
    }
  }

  // A phase of the terms from .. to - 1, of rows x to rows (+)= y.
  void run(int64_t which, int64_t samples, int64_t from, int64_t to, const T* x, T* y, bool adds, const States<T>& states,
           const Scratch<T>& scratch) const {
    const Phase& phase = phases[which];
    const typename States<T>::OfChunk& own = states.chunk[which];
    phase.template for_chunks<T>(samples, [&](const Chunk& chunk) {
      const T* chunk_x = phase.gather(chunk, phase.in, x, own.x);
      T* chunk_y = phase.in_place() ? y + chunk.unit * phase.out : own.y;
      for (int64_t r = from; r < to; ++r) {
        const bool adds_here = r > from || (adds && phase.in_place());
        contract_chunk(phase, chunk, r, phase.size(), chunk_x, own.after, chunk_y, adds_here, scratch);
      }
      if (!phase.in_place()) phase.scatter(chunk, phase.out, chunk_y, y, adds);
    });
  }

  // The first `count` phases of term r, whose results go to states.between, or to y.
  void run_term(int64_t r, int64_t count, int64_t samples, const T* x, T* y, const States<T>& states,
                const Scratch<T>& scratch) const {
    for (int64_t i = 0; i < count; ++i) {
      const bool last = i + 1 == int64_t(phases.size());
      T* to = last ? y : states.between[i];
      run(i, samples, r, r + 1, x, to, last && r > 0, states, scratch);
      x = to;
    }
  }

  // From rows x to rows y, before the bias.
  void contract_all(int64_t samples, const T* x, T* y, const States<T>& states, const Scratch<T>& scratch) const {
    if (phases.size() == 1) return run(0, samples, 0, chain.rank, x, y, false, states, scratch);
    for (int64_t r = 0; r < chain.rank; ++r) run_term(r, int64_t(phases.size()), samples, x, y, states, scratch);
  }

  void forward(int64_t samples, const T* x, T* y, const States<T>& states, const Scratch<T>& scratch) const {
    contract_all(samples, x, y, states, scratch);
    activation.forward(samples, y);
  }
};
