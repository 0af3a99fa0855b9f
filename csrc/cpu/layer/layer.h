// One layer of a stack as it is run: small neighbouring contractions merged, cut into phases, the weights prepared.
//
// T is what is computed in, S what the tensors hold. Rows [samples, in] become rows [samples, out], phase by phase. Called
// by run.h, forward.h and backward.h.

template <class T, class U> void add(int64_t n, const T* from, U* to) {
  for (int64_t i = 0; i < n; ++i) to[i] += from[i];
}

// What every contraction of a worker may use: contract_scratch() elements, and kPackedSize.
template <class T> struct Scratch {
  T *elements, *packed;
};

// Who works on a block: one, at once, or, where there are fewer samples than fill all threads, several, in steps that are put down
// first. In a step each has a share of a phase's chunks, or of numbers, the same whoever comes to do it, so that sums are of the
// same numbers. What is handed over has to have what it needs by value.
template <class T> class Workers {
  mutable std::vector<std::function<void(int64_t)>> steps_;

 public:
  std::vector<Scratch<T>> scratch;  // of each

  template <class Take> void take(int64_t count, int64_t size, Take&& take) {
    scratch.clear();
    for (int64_t i = 0; i < count; ++i) scratch.push_back({take(size), take(kPackedSize<T>)});
  }
  int64_t count() const { return int64_t(scratch.size()); }

  // f(first, behind the last one, worker) of n things, in whole pieces
  template <class F> void share(int64_t n, int64_t piece, F&& f) const {
    const int64_t workers = count(), pieces = (n + piece - 1) / piece;
    if (workers == 1) return f(int64_t(0), n, int64_t(0));
    steps_.push_back([=](int64_t i) { f(pieces * i / workers * piece, std::min(pieces * (i + 1) / workers * piece, n), i); });
  }
  // f(chunk, worker) for all of so many samples
  template <class F> void for_chunks(const Phase& phase, int64_t samples, F&& f) const {
    share(phase.chunks(samples), 1, [=, &phase](int64_t first, int64_t end, int64_t worker) {
      for (int64_t i = first; i < end; ++i) f(phase.chunk<T>(i, samples), worker);
    });
  }
  // f(first, count) for numbers that lie together
  template <class F> void for_numbers(int64_t n, F&& f) const {
    share(n, 64, [=](int64_t first, int64_t end, int64_t) { if (first < end) f(first, end - first); });
  }
  // f(), by one of them
  template <class F> void once(F&& f) const {
    if (count() == 1) return f();
    steps_.push_back([=](int64_t i) { if (i == 0) f(); });
  }

  // Does what has been put down.
  void finish(const Parallel& parallel) const {
    if (steps_.empty()) return;
    Team team(count());
    parallel(count(), [&](int64_t member) {
      team.run(member, int64_t(steps_.size()), [&](int64_t step, int64_t worker) { steps_[step](worker); });
    });
    steps_.clear();
  }
};

// A chunk of a phase, which one worker does, at once.
template <class T> struct Alone {
  const Scratch<T>& scratch;

  const T* gather(const Phase& phase, const Chunk& chunk, int64_t size, const T* rows, T* local) const {
    return phase.gather(chunk, size, rows, local);
  }
  void scatter(const Phase& phase, const Chunk& chunk, int64_t size, const T* local, T* rows) const {
    if (!phase.in_place()) phase.scatter(chunk, size, local, rows);
  }
  // f(part, scratch) for all positions of a contraction
  template <class F> void for_positions(const Contraction& c, F&& f) const { f(Positions::all(c), scratch); }
};

// A chunk that all workers do together: each has some features where it is brought together, and then some positions of each
// untied contraction. So each has weights and their gradients of its own.
template <class T> struct Together {
  const Workers<T>& workers;

  const T* gather(const Phase& phase, const Chunk& chunk, int64_t size, const T* rows, T* local) const {
    rows += chunk.unit * size;
    if (phase.in_place()) return rows;
    workers.share(size, kLanes<T>, [=](int64_t first, int64_t end, int64_t) {
      if (first < end) Phase::gather_some(chunk, size, first, end, rows, local);
    });
    return local;
  }
  void scatter(const Phase& phase, const Chunk& chunk, int64_t size, const T* local, T* rows) const {
    if (phase.in_place()) return;
    rows += chunk.unit * size;
    workers.share(size, kLanes<T>, [=](int64_t first, int64_t end, int64_t) {
      if (first < end) Phase::scatter_some(chunk, size, first, end, local, rows);
    });
  }
  template <class F> void for_positions(const Contraction& c, F&& f) const {
    workers.share(c.outer * c.inner, 1, [=, of = &workers](int64_t first, int64_t end, int64_t worker) {
      if (first < end) f(Positions::of(c, first, end), of->scratch[worker]);
    });
  }
};

template <class T, class S> void read_as(int64_t n, const void* from, T* to) { read(n, static_cast<const S*>(from), to); }
template <class T, class S> void write_as(int64_t n, const T* from, void* to) { write(n, from, static_cast<S*>(to)); }

// How tensors hold what is computed in T. The kernels know no more of it than this, and are compiled once for each T.
template <class T> struct Held {
  int64_t bytes;  // of a number
  bool converts;
  void (*read)(int64_t n, const void* from, T* to);
  void (*write)(int64_t n, const T* from, void* to);

  template <class S> static Held as() {
    return {int64_t(sizeof(S)), !std::is_same<T, S>::value, read_as<T, S>, write_as<T, S>};
  }

  const void* at(const void* tensor, int64_t i) const { return static_cast<const char*>(tensor) + i * bytes; }
  void* at(void* tensor, int64_t i) const { return static_cast<char*>(tensor) + i * bytes; }

  // Rows of a tensor as T: where they lie if they are T already, else converted into `rows`.
  const T* rows(const void* tensor, int64_t first, int64_t count, int64_t features, T* rows) const {
    const void* from = at(tensor, first * features);
    if (!converts) return static_cast<const T*>(from);
    return read(count * features, from, rows), rows;
  }
  const T* rows(const void* tensor, int64_t first, int64_t count, int64_t features, T* rows, const Workers<T>& by) const {
    const void* from = at(tensor, first * features);
    if (!converts) return static_cast<const T*>(from);
    by.for_numbers(count * features, [=, held = *this](int64_t i, int64_t n) { held.read(n, held.at(from, i), rows + i); });
    return rows;
  }
  // Where rows of an output are computed: in place, or in `rows` until write_rows converts them.
  T* output_rows(void* tensor, int64_t first, int64_t features, T* rows) const {
    return converts ? rows : static_cast<T*>(at(tensor, first * features));
  }
  void write_rows(void* tensor, int64_t first, int64_t count, int64_t features, const T* rows, const Workers<T>& by) const {
    if (!converts) return;
    void* to = at(tensor, first * features);
    by.for_numbers(count * features, [=, held = *this](int64_t i, int64_t n) { held.write(n, rows + i, held.at(to, i)); });
  }
};

// Rows of each of a layer's terms: `apart` numbers lie between those of two terms, or all have the same rows, if it is 0.
template <class U> struct OfTerms {
  U* rows;
  int64_t apart;

  operator OfTerms<const U>() const { return {rows, apart}; }
  bool same() const { return !apart; }
  U* of(int64_t term) const { return rows + term * apart; }
};

// A task's memory for a layer: of each worker and phase the states of a chunk, and behind all phases but the last one those of a
// block, of all terms.
template <class T> struct States {
  struct OfChunk {
    T *x, *y, *grad_y, *grad_x;  // brought together, where a chunk is not done in place
    std::vector<T*> after;       // behind each contraction but the last
  };
  std::vector<std::vector<OfChunk>> chunk;
  std::vector<T*> between;
};

template <class T> struct Layer {
  Held<T> held;
  const void* const* tensors;  // its weights, its activation's parameters and its bias
  int64_t rows;                // samples that its prepared weights are for
  bool apart = false;          // whether workers share each chunk, by positions
  std::vector<Group> groups;
  Chain chain;  // with one contraction for each group
  int64_t in, out, stages;
  typename Phases<T>::Known cut;
  Activation<T> activation;                  // behind the bias
  std::vector<Weights<T>> weights;           // [rank * stages], in the order of contraction
  std::vector<std::vector<const T*>> parts;  // the same, of the parts of each group

  // `samples` at once, of so many `rows_` in all.
  Layer(const Chain& given, Held<T> held_, const void* const* tensors_, int64_t samples, int64_t rows_, bool backward)
      : held(held_), tensors(tensors_), rows(rows_),
        groups(merge(given, [&](const Contraction& c) { return may_merge(given, c); })),
        chain(with(given, groups)), in(chain.in_features()), out(chain.out_features()), stages(int64_t(groups.size())),
        cut(Phases<T>::of(chain, samples, rows, backward, 1)) {}

  // For so many samples, all of them at once, in phases whose chunks workers share.
  void cut_again(int64_t samples, bool backward, int64_t workers) {
    rows = samples;
    cut = Phases<T>::of(chain, samples, rows, backward, workers);
  }

  static Chain with(Chain chain, const std::vector<Group>& groups) {
    chain.contractions.clear();
    for (const Group& group : groups) chain.contractions.push_back(group.whole);
    return chain;
  }

  bool may_merge(const Chain& given, const Contraction& c) const {
    std::vector<T> buffer(kLargestMerged * kLargestMerged);
    for (int64_t r = 0; r < given.rank; ++r)
      if (!is_tame(c.weight_size(), held.rows(tensors[c.weight], r, 1, c.weight_size(), buffer.data())))
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
  bool needs_transposed(int64_t i) const {
    const Phase& phase = *std::find_if(cut->phases.begin(), cut->phases.end(), [&](const Phase& p) { return i < p.last; });
    const Contraction c = phase.contraction(i - phase.first, phase.columns);
    return needs_transposed_weight<T>(c, phase.interleaved, rows * phase.slabs);
  }

  // What prepare() takes.
  int64_t prepared_size() const {
    int64_t size = chain.bias ? out * Activation<T>::together(out) : 0;
    for (int64_t i = 0; i < stages; ++i) {
      const Group& group = groups[i];
      size += chain.rank * group.whole.weight_size() * ((group.parts.size() > 1) + needs_transposed(i));
      if (held.converts)
        for (const Contraction& part : group.parts) size += chain.rank * part.weight_size();
    }
    return size;
  }

  template <class Take> void prepare(Take&& take) {
    for (int64_t r = 0; r < chain.rank; ++r)
      for (int64_t i = 0; i < stages; ++i) {
        const Group& group = groups[i];
        std::vector<const T*>& own = parts.emplace_back();
        for (const Contraction& part : group.parts) {
          const int64_t n = part.weight_size();
          own.push_back(held.rows(tensors[part.weight], r, 1, n, held.converts ? take(n) : nullptr));
        }
        const Contraction& c = group.whole;
        Weights<T> w{own[0], nullptr};
        if (own.size() > 1) {
          T* merged = take(c.weight_size());
          merge_weights(group, own, merged);
          w.data = merged;
        }
        if (needs_transposed(i)) {
          T* transposed = take(c.weight_size());
          transpose<T>(c.q, c.p, w.data, c.p, transposed, c.q);
          w.transposed = transposed;
        }
        weights.push_back(w);
      }
    const int64_t together = Activation<T>::together(out);
    T* bias = chain.bias ? take(out * together) : nullptr;
    for (int64_t n = 0; bias && n < together; ++n) held.read(out, tensors[bias_index()], bias + n * out);
    std::vector<T> parameters(chain.parameters());
    for (size_t i = 0; i < parameters.size(); ++i)
      parameters[i] = *held.rows(tensors[parameter_index() + i], 0, 1, 1, &parameters[i]);
    activation = Activation<T>(chain, bias, parameters);
  }

  // take(elements) gives memory, in the same order every time. `keeps`: every state of a chunk has a place of its own, as
  // have those of its gradients.
  template <class Take> States<T> make_states(int64_t samples, bool keeps, Take&& take, int64_t workers = 1) const {
    States<T> states;
    states.chunk.resize(size_t(workers));
    for (const Phase& phase : cut->phases) {
      for (auto& of_worker : states.chunk) of_worker.push_back(make_chunk(phase, keeps, take));
      if (phase.last < stages) states.between.push_back(take(chain.rank * phase.out * phase.slabs * samples));
    }
    return states;
  }
  template <class Take> typename States<T>::OfChunk make_chunk(const Phase& phase, bool keeps, Take&& take) const {
    const auto size = [&](int64_t numbers) { return phase.units * numbers / phase.inner * phase.columns; };
    const bool moved = !phase.in_place();
    typename States<T>::OfChunk chunk{};
    if (moved) chunk.x = take(size(phase.in)), chunk.y = take(size(phase.out));
    if (moved && keeps) chunk.grad_y = take(size(phase.out)), chunk.grad_x = take(size(phase.in));
    int64_t largest = 0;
    for (int64_t i = 0; i + 1 < phase.size(); ++i) largest = std::max(largest, out_of(phase.contractions[i]));
    for (int64_t i = 0; i + 1 < phase.size(); ++i)
      chunk.after.push_back(keeps   ? take(size(out_of(phase.contractions[i])))
                            : i < 2 ? take(size(largest))
                                    : chunk.after[i - 2]);
    return chunk;
  }
  int64_t scratch_size() const {
    int64_t size = 0;
    for (const Phase& phase : cut->phases)
      for (int64_t i = 0; i < phase.size(); ++i)
        size = std::max(size, contract_scratch(phase.contraction(i, phase.columns), phase.template block<T>(phase.units)));
    return size;
  }

  // The first `count` contractions of a phase for a chunk and term r; the last of all is added to what there is, if `adds`.
  template <class By>
  void contract_chunk(const Phase& phase, const Chunk& chunk, int64_t r, int64_t count, const T* x,
                      const std::vector<T*>& after, T* y, bool adds, const By& by) const {
    for (int64_t i = 0; i < count; ++i) {
      const bool last = i + 1 == phase.size(), adds_here = last && adds;
      T* to = last ? y : after[i];
      const Contraction c = phase.contraction(i, chunk.columns);
      const Weights<T> w = weights[r * stages + phase.first + i];
      by.for_positions(c, [=](Positions part, const Scratch<T>& scratch) {
        contract<T>(c, chunk.block, part, w, x, to, adds_here, scratch.elements, scratch.packed);
      });
      x = to;
    }
  }

  // f(chunk, states, by) for a phase's chunks: workers have some each, or all of them do one after another together.
  template <class F>
  void for_chunks(int64_t which, int64_t samples, const States<T>& states, const Workers<T>& workers, F&& f) const {
    const Phase& phase = cut->phases[which];
    if (apart && workers.count() > 1) {
      for (int64_t i = 0; i < phase.chunks(samples); ++i)
        f(phase.chunk<T>(i, samples), states.chunk[0][which], 0, Together<T>{workers});
    } else {
      workers.for_chunks(phase, samples, [=, &states, &workers](const Chunk& chunk, int64_t worker) {
        f(chunk, states.chunk[worker][which], worker, Alone<T>{workers.scratch[worker]});
      });
    }
  }

  // The rows between a phase and the next one.
  OfTerms<T> behind(int64_t which, int64_t samples, T* rows) const {
    const Phase& phase = cut->phases[which];
    return {rows, phase.out * phase.slabs * samples};
  }

  // A phase of all terms. Where they have the same x it is brought together once for all of them, and y, which is their sum, is
  // taken to its place once.
  void run(int64_t which, int64_t samples, OfTerms<const T> x, OfTerms<T> y, const States<T>& states,
           const Workers<T>& workers) const {
    const Phase& phase = cut->phases[which];
    for_chunks(which, samples, states, workers, [=, &phase](const Chunk& chunk, const auto& own, int64_t, const auto& by) {
      const T* chunk_x = nullptr;
      for (int64_t r = 0; r < chain.rank; ++r) {
        if (r == 0 || !x.same()) chunk_x = by.gather(phase, chunk, phase.in, x.of(r), own.x);
        T* chunk_y = phase.in_place() ? y.of(r) + chunk.unit * phase.out : own.y;
        contract_chunk(phase, chunk, r, phase.size(), chunk_x, own.after, chunk_y, r > 0 && y.same(), by);
        if (r + 1 == chain.rank || !y.same()) by.scatter(phase, chunk, phase.out, chunk_y, y.of(r));
      }
    });
  }

  // The first `count` phases, whose results go to states.between, or to y.
  void run_phases(int64_t count, int64_t samples, const T* x, T* y, const States<T>& states, const Workers<T>& workers) const {
    OfTerms<const T> from{x, 0};
    for (int64_t i = 0; i < count; ++i) {
      const OfTerms<T> to = i + 1 == int64_t(cut->phases.size()) ? OfTerms<T>{y, 0} : behind(i, samples, states.between[i]);
      run(i, samples, from, to, states, workers);
      from = to;
    }
  }

  // From rows x to rows y, before the bias.
  void contract_all(int64_t samples, const T* x, T* y, const States<T>& states, const Workers<T>& workers) const {
    run_phases(int64_t(cut->phases.size()), samples, x, y, states, workers);
  }

  void forward(int64_t samples, const T* x, T* y, const States<T>& states, const Workers<T>& workers) const {
    contract_all(samples, x, y, states, workers);
    activate_all(samples, y, workers);
  }

  // Bias and activation of rows; several workers have some features each.
  void activate_all(int64_t samples, T* y, const Workers<T>& workers) const {
    if (workers.count() == 1) return activation.forward(samples, y);
    if (activation.does_nothing()) return;
    workers.for_numbers(out, [=](int64_t first, int64_t count) {
      for (int64_t n = 0; n < samples; ++n) activation.forward_part(first, count, y + n * out + first);
    });
  }
};
