// One layer of a stack as it is run: small neighbouring contractions merged, the weights prepared, the layout chosen.
//
// T is what is computed in, S what the tensors hold. From rows [samples, in] to rows [samples, out]; between them the
// states lie in the layer's layout. Called by run.h, forward.h and backward.h.

template <class T, class U> void add(int64_t n, const T* from, U* to) {
  for (int64_t i = 0; i < n; ++i) to[i] += from[i];
}

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

// A task's memory for a block's states in one layer. In the plain layout the first and the last are rows as they are.
template <class T> struct States {
  T* x;                   // x interleaved
  std::vector<T*> after;  // each contraction
};

template <class T, class S> struct Layer {
  const void* const* tensors;  // its weights, its activation's parameters and its bias
  std::vector<Group> groups;
  Chain chain;  // with one contraction for each group
  int64_t in, out, stages;
  bool interleaved = false;
  Activation<T> activation;                  // behind the bias
  std::vector<Weights<T>> weights;           // [rank * stages], in the order of contraction
  std::vector<std::vector<const T*>> parts;  // the same, of the parts of each group

  Layer(const Chain& given, const void* const* tensors_)
      : tensors(tensors_), groups(merge(given, [&](const Contraction& c) { return may_merge(given, c); })),
        chain(given), in(chain.in_features()), out(chain.out_features()), stages(int64_t(groups.size())) {
    chain.contractions.clear();
    for (const Group& group : groups) chain.contractions.push_back(group.whole);
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

  // What prepare() takes.
  int64_t prepared_size(int64_t batch) const {
    int64_t size = chain.bias ? out * Activation<T>::together(out) : 0;
    for (const Group& group : groups) {
      const bool merged = group.parts.size() > 1, transposed = needs_transposed_weight(group.whole, interleaved, batch);
      size += chain.rank * group.whole.weight_size() * (merged + transposed);
      if (kConverts<T, S>)
        for (const Contraction& part : group.parts) size += chain.rank * part.weight_size();
    }
    return size;
  }

  template <class Take> void prepare(int64_t batch, Take&& take) {
    for (int64_t r = 0; r < chain.rank; ++r)
      for (const Group& group : groups) {
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
        if (needs_transposed_weight(c, interleaved, batch)) {
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

  // Of `count` samples, in a block for `samples`.
  Block block(int64_t samples, int64_t count) const { return {interleaved ? samples : count, interleaved, count}; }

  // [valid, features] in the layer's layout: as it is, or [features, samples] in `state`. Samples beyond the valid ones
  // are zero: what is computed of them is never read.
  const T* from_rows(Block b, int64_t features, const T* rows, T* state) const {
    if (!interleaved) return rows;
    transpose<T>(b.valid, features, rows, features, state, b.samples);
    if (b.valid < b.samples)
      for (int64_t f = 0; f < features; ++f)
        std::fill(state + f * b.samples + b.valid, state + (f + 1) * b.samples, T(0));
    return state;
  }
  void to_rows(Block b, int64_t features, const T* state, T* rows) const {
    if (interleaved) transpose<T>(features, b.valid, state, b.samples, rows, features);
  }

  // to[i] = the first i + 1 contractions of term r over x, for i < count; the whole chain's is added up over r
  void contract_all(int64_t r, int64_t count, Block b, const T* x, const std::vector<T*>& to, T* packed) const {
    for (int64_t i = 0; i < count; ++i, x = to[i - 1])
      contract<T>(chain.contractions[i], b, weights[r * stages + i], x, to[i], r > 0 && i == stages - 1, packed);
  }

  // From rows x to rows y.
  void forward(Block b, const T* x, T* y, States<T>& states, T* packed) const {
    x = from_rows(b, in, x, states.x);
    if (!interleaved) states.after.back() = y;
    for (int64_t r = 0; r < chain.rank; ++r) contract_all(r, stages, b, x, states.after, packed);
    to_rows(b, out, states.after.back(), y);
    activation.forward(b.valid, y);
  }
};
