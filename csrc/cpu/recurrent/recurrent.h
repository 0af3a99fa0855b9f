// What a recurrence's forward and backward pass share: which sequences and features are walked together, and the three
// recurrent matrices, prepared once for all steps.
//
// Sequences are independent, the longest ones come first, and those of a part go from step to step together, so that their
// states stay in cache. Features are independent between the blocks of a block-diagonal matrix. A part of a dense
// recurrence that has threads to itself is shared by columns (team.h). The number of threads changes no result: it cuts
// only dense matrices, each number of whose products has one order of additions, whatever stands beside it.
// Called by recurrent_forward.h and recurrent_backward.h.

constexpr int64_t kTogether = 16, kDenseTogether = 64;  // sequences of a part, at most
constexpr int64_t kFewTogether = 8;                     // sequences below which threads rather share columns
constexpr int64_t kPartFeatures = 256;                  // features that pay for a part of a block-diagonal recurrence
constexpr int64_t kMemberWork = 1 << 16;                // multiply-adds between two waits for others

// f(first element, get, put) for vectors of n elements: get(from) and put(to, vector) leave alone what is beyond them.
template <class T, class F> FL_INLINE void for_vectors(int64_t n, F&& f) {
  constexpr int L = kLanes<T>;
  int64_t at = 0;
  for (; at + L <= n; at += L)
    f(at, [](const T* from) __attribute__((always_inline)) { return load(from); },
      [](T* to, Vec<T> v) __attribute__((always_inline)) { store(to, v); });
  if (const int rest = int(n - at))
    f(at, [rest](const T* from) __attribute__((always_inline)) { return load_first(from, rest); },
      [rest](T* to, Vec<T> v) __attribute__((always_inline)) { store_first(to, v, rest); });
}

// Some features, counted from the first one of a part: those of panels first .. last - 1.
struct Columns {
  int64_t first, last;
  int64_t from, count;
  int64_t row;  // elements from a row of their product to the next one
};

// What products need beside their operands.
template <class T> struct ProductMemory {
  std::vector<States<T>> states;  // of each gate's layer
  Workers<T> workers;
  T* sum;
};
// Of parts that are alike but for the last one, which may have fewer features.
template <class T> struct PartMemory {
  ProductMemory<T> of_first, of_last;
  int64_t last;  // which of the products
  const ProductMemory<T>& of(int64_t products) const { return products == last ? of_last : of_first; }
};

// The recurrent matrices of the gates for some features, or their transposes.
//
// A dense product is made panel by panel: columns that are kept in registers, of a matrix that has been packed by panels,
// or, for few rows in all, of the weights where they lie. A structured one has one panel, and a layer for each gate.
template <class T> class Products {
  const Held<T> held_;
  const bool turned_, dense_, packs_;
  const int64_t features_;
  static constexpr int64_t kWidth = kMaxVecs * kLanes<T>;
  std::vector<const void*> tensors_;  // of a gate behind those of the one before
  std::vector<Layer<T>> layers_;
  std::vector<const T*> plain_;
  T* packed_ = nullptr;
  Chain chain_;

 public:
  // `rows`: taken in all; `samples`: at once.
  Products(const Chain& chain, Held<T> held, std::vector<const void*> tensors, bool turned, int64_t rows, int64_t samples)
      : held_(held), turned_(turned), dense_(is_dense(chain)), packs_(dense_ && !takes_dots<T>(chain.contractions[0], rows)),
        features_(chain.in_features()), tensors_(std::move(tensors)), chain_(bare(chain, turned)), rows_(rows),
        samples_(samples) {}

  static bool is_dense(const Chain& chain) {
    const Contraction& c = chain.contractions.front();
    return chain.contractions.size() == 1 && chain.rank == 1 && c.tied && c.outer * c.inner == 1;
  }

  int64_t panels() const { return dense_ ? (features_ + kWidth - 1) / kWidth : 1; }
  Columns columns(int64_t first, int64_t last) const {
    if (!dense_) return {0, 1, 0, features_, features_};
    const int64_t count = std::min(last * kWidth, features_) - first * kWidth;
    return {first, last, first * kWidth, count, packs_ ? whole_vectors<T>(count) : count};
  }

  // Elements of transposed weights, and those of what prepare() takes. Layers read weights when they are made: transposed
  // ones come first.
  int64_t transposed_size() const {
    int64_t size = 0;
    if (turned_ && !dense_)
      for (const Contraction& c : chain_.contractions) size += kGates * chain_.rank * c.weight_size();
    return size;
  }
  template <class Take> void make_layers(Take&& take) {
    if (dense_) return;
    if (turned_)
      for (size_t i = 0; i < tensors_.size(); ++i) tensors_[i] = transposed(int64_t(i), take);
    layers_.reserve(kGates);
    for (int g = 0; g < kGates; ++g)
      layers_.emplace_back(chain_, held_, tensors_.data() + g * int64_t(chain_.contractions.size()), samples_, rows_, false);
  }
  int64_t prepared_size() const {
    const int64_t f = features_;
    if (packs_) return kGates * f * whole_vectors<T>(f) + (held_.converts ? kWidth * f : 0);
    int64_t size = dense_ && held_.converts ? kGates * f * f : 0;
    for (const Layer<T>& layer : layers_) size += layer.prepared_size();
    return size;
  }
  // take(elements) gives memory.
  template <class Take> void prepare(Take&& take) {
    if (packs_) return pack(take);
    if (dense_)
      for (const void* weight : tensors_) {
        T* buffer = held_.converts ? take(features_ * features_) : nullptr;
        plain_.push_back(held_.rows(weight, 0, features_, features_, buffer));
      }
    for (Layer<T>& layer : layers_) layer.prepare(take);
  }

  template <class Take> ProductMemory<T> make_memory(int64_t samples, Take&& take) const {
    ProductMemory<T> memory;
    int64_t scratch = 0;
    for (const Layer<T>& layer : layers_) {
      memory.states.push_back(layer.make_states(samples, false, take));
      scratch = std::max(scratch, layer.scratch_size());
    }
    memory.workers.take(1, scratch, take);
    memory.sum = turned_ && !dense_ ? take(samples * features_) : nullptr;
    return memory;
  }

  // The columns of gate g's product with x [n, features].
  void multiply_by(int g, const Columns& columns, int64_t n, const T* x, T* y, const ProductMemory<T>& memory) const {
    const int64_t f = features_;
    if (!dense_) return layers_[g].contract_all(n, x, y, memory.states[g], memory.workers);
    for_panels(columns, y, [&](const Columns& panel, T* to) {
      if (packs_)
        multiply<T>({n, panel.row, f}, {x, f, 1}, {packed_ + (g * whole_vectors<T>(f) + panel.from) * f, panel.row, 1},
                    {to, columns.row, 1}, false, nullptr);
      else
        multiply_dots<T>({n, panel.count, f}, {x, f, 1}, {plain_[g] + panel.from * f, f, 1}, {to, columns.row, 1}, false);
    });
  }

  // Where gradients of gates are taken from, in memory for so many rows of all gates.
  T* gradients_of(int g, int64_t rows, T* gradients) const { return gradients + g * features_ * (dense_ ? 1 : rows); }
  int64_t gradients_row() const { return features_ * (dense_ ? kGates : 1); }

  // The columns of the sum of the products that the gates from .. to - 1 have with their gradients; of the transposes.
  void back(int from, int to, const Columns& columns, int64_t n, int64_t rows, T* gradients, T* y,
            const ProductMemory<T>& memory) const {
    const int64_t f = features_, all = kGates * f;
    for (int g = from; g < to && !dense_; ++g) {
      T* made = g > from ? memory.sum : y;
      layers_[g].contract_all(n, gradients_of(g, rows, gradients), made, memory.states[g], memory.workers);
      if (g > from) add(n * f, memory.sum, y);
    }
    for_panels(columns, y, [&](const Columns& panel, T* made) {
      if (packs_)
        return multiply<T>({n, panel.row, (to - from) * f}, {gradients_of(from, rows, gradients), all, 1},
                           {packed_ + panel.from * all + from * f * panel.row, panel.row, 1}, {made, columns.row, 1}, false,
                           nullptr);
      for (int g = from; g < to; ++g)
        multiply<T>({n, panel.count, f}, {gradients_of(g, rows, gradients), all, 1}, {plain_[g] + panel.from, f, 1},
                    {made, columns.row, 1}, g > from, nullptr);
    });
  }

 private:
  int64_t rows_, samples_;

  // f(columns, where their product belongs) for the panels of a dense product.
  template <class F> void for_panels(const Columns& columns, T* y, F&& f) const {
    for (int64_t i = columns.first; i < columns.last && dense_; ++i) {
      const Columns panel = this->columns(i, i + 1);
      f(panel, y + panel.from - columns.from);
    }
  }

  // The contractions alone, or those of the transposed matrix.
  static Chain bare(const Chain& chain, bool turned) {
    Chain made;
    made.rank = chain.rank;
    made.contractions = chain.contractions;
    if (!turned) return made;
    std::reverse(made.contractions.begin(), made.contractions.end());
    for (Contraction& c : made.contractions) std::swap(c.p, c.q);
    return made;
  }

  // A tensor's matrices, transposed, as tensors hold them: what is converted has two bytes.
  template <class Take> const void* transposed(int64_t i, Take&& take) const {
    const int64_t weight = i % int64_t(chain_.contractions.size());
    const Contraction& c = *std::find_if(chain_.contractions.begin(), chain_.contractions.end(),
                                         [&](const Contraction& each) { return each.weight == weight; });
    const int64_t size = chain_.rank * c.weight_size();
    T* const memory = take(size);
    for (int64_t at = 0; at < size; at += c.p * c.q) {  // its p are the rows, which the given ones have as columns
      if (!held_.converts) {
        transpose<T>(c.p, c.q, static_cast<const T*>(tensors_[i]) + at, c.q, memory + at, c.p);
        continue;
      }
      const uint16_t* from = static_cast<const uint16_t*>(tensors_[i]) + at;
      uint16_t* made = reinterpret_cast<uint16_t*>(memory) + at;
      for (int64_t p = 0; p < c.p; ++p)
        for (int64_t q = 0; q < c.q; ++q) made[q * c.p + p] = from[p * c.q + q];
    }
    return memory;
  }

  // Panel behind panel, each with rows for the inputs of a product: those of a gate, or, turned, of all gates.
  template <class Take> void pack(Take&& take) {
    const int64_t f = features_;
    packed_ = take(kGates * f * whole_vectors<T>(f));
    T* buffer = held_.converts ? take(kWidth * f) : nullptr;
    for (int g = 0; g < kGates; ++g)
      for (int64_t i = 0; i < panels(); ++i) {
        const Columns columns = this->columns(i, i + 1);
        T* to = packed_ + (turned_ ? columns.from * kGates + g * columns.row : g * whole_vectors<T>(f) + columns.from) * f;
        if (columns.count < columns.row) std::fill(to, to + f * columns.row, T(0));
        if (turned_) {
          for (int64_t p = 0; p < f; ++p, to += columns.row)
            held_.read(columns.count, held_.at(tensors_[g], p * f + columns.from), to);
        } else {
          const T* rows = held_.rows(tensors_[g], columns.from, columns.count, f, buffer);
          transpose<T>(columns.count, f, rows, f, to, columns.row);
        }
      }
  }
};

// Sequences and features that go from step to step together.
struct Part {
  int64_t first, count;        // among the sequences in their order
  int64_t feature, features;
  int64_t products;            // which of these
  int64_t steps;               // of its longest sequence
};

template <class T> struct RecurrentRun {
  struct Sequence {
    int64_t index, length;
  };

  const Recurrent& problem;
  const Held<T> held;
  const Chain& chain;
  const bool before, reversed;
  const int64_t hidden;
  std::vector<Sequence> sequences;  // the longest first
  int64_t rows = 0;                 // steps of all sequences
  std::vector<Part> parts;
  int64_t most = 1, widest = 1;     // sequences and features of a part
  int64_t members = 1, workers = 1; // threads that share a part; parts that are walked at a time
  Activation<T> activation;         // of the candidate, as rows of one feature
  const T* bias = nullptr;

  RecurrentRun(const Recurrent& problem_, Held<T> held_, int threads)
      : problem(problem_), held(held_), chain(problem.recurrence->chain), before(problem.recurrence->before),
        reversed(problem.recurrence->reversed), hidden(problem.recurrence->hidden()) {
    for (int64_t i = 0; i < problem.sequences; ++i) {
      const int64_t length = problem.length(i);
      if (length) sequences.push_back({i, length});
      rows += length;
    }
    if (problem.lengths)
      std::stable_sort(sequences.begin(), sequences.end(),
                       [](const Sequence& a, const Sequence& b) { return a.length > b.length; });
    cut(threads);
    Chain single = chain;
    single.contractions = {{true, 0, 1, 1, 1, 1}};
    single.bias = false;
    activation = Activation<T>(single, nullptr, {});
  }

  // Matrices for the features of each part, the `turned` ones for fewer rows at once. take(elements) gives memory.
  std::vector<Products<T>> make_products(bool turned, int64_t samples) const {
    std::vector<Products<T>> products;
    for (const Part& part : parts) {
      if (part.products < int64_t(products.size())) continue;
      Chain own = chain;
      std::vector<const void*> tensors = problem.weights;
      if (part.features < hidden) {
        Contraction& c = own.contractions[0];
        const int64_t size = c.p * c.q, head = part.feature / c.q;
        c.outer = part.features / c.q;
        for (const void*& tensor : tensors) tensor = held.at(tensor, head * size);
      }
      products.emplace_back(own, held, std::move(tensors), turned, rows, samples);
    }
    return products;
  }

  void prepare(std::initializer_list<std::vector<Products<T>>*> all) {
    int64_t transposed = 0, size = chain.bias ? hidden : 0;
    for (auto* products : all)
      for (const Products<T>& each : *products) transposed += each.transposed_size();
    Packed<T> take{Arena<T>(Purpose::totals, transposed).take(transposed)};
    for (auto* products : all)
      for (Products<T>& each : *products) each.make_layers(take), size += each.prepared_size();
    take.at = Arena<T>(Purpose::weights, size).take(size);
    if (chain.bias) bias = held.rows(problem.bias, 0, 1, hidden, take(hidden));
    for (auto* products : all)
      for (Products<T>& each : *products) each.prepare(take);
  }

  // Step of a part's walk to the number of that step.
  int64_t time(const Part& part, int64_t step) const { return reversed ? part.steps - 1 - step : step; }
  // How many of its sequences, which are the first ones, have a step.
  int64_t there(const Part& part, int64_t t) const {
    const auto from = sequences.begin() + part.first, to = from + part.count;
    if (t < 0 || t >= part.steps) return 0;
    if ((to - 1)->length > t) return part.count;
    return std::partition_point(from, to, [t](const Sequence& each) { return each.length > t; }) - from;
  }
  const Sequence& sequence(const Part& part, int64_t i) const { return sequences[part.first + i]; }
  int64_t row(const Part& part, int64_t i, int64_t t) const { return problem.row(sequence(part, i).index, t); }
  bool begins(const Part& part, int64_t i, int64_t t) const { return t == (reversed ? sequence(part, i).length - 1 : 0); }
  bool ends(const Part& part, int64_t i, int64_t t) const { return t == (reversed ? 0 : sequence(part, i).length - 1); }
  bool starts(int64_t row) const { return problem.starts && problem.starts[row]; }

  // Where the columns of gate g begin in a row of the gates.
  int64_t gate_at(const Part& part, int g, int64_t row, const Columns& columns) const {
    const int64_t at = part.feature + columns.from;
    return problem.gates.size() == 1 ? (row * kGates + g) * hidden + at : row * hidden + at;
  }
  const T* read_gate(const Part& part, int g, int64_t row, const Columns& columns, T* buffer) const {
    const void* gate = problem.gates[problem.gates.size() == 1 ? 0 : g];
    return held.rows(gate, gate_at(part, g, row, columns), columns.count, 1, buffer);
  }
  int64_t state_at(const Part& part, int64_t row, const Columns& columns) const {
    return row * hidden + part.feature + columns.from;
  }
  void read_initial(const Part& part, int64_t i, const Columns& columns, T* to) const {
    const int64_t at = state_at(part, sequence(part, i).index, columns);
    held.read(columns.count, held.at(problem.initial, at), to);
  }

  // walk.make_shared(take) and walk.make_own(take) give the buffers of a part and of a thread; walk.phases(part) counts the
  // phases of walk.run(part, shared, own, phase, chunk).
  template <class Walk> void over_parts(const Parallel& parallel, const Walk& walk) const {
    const int64_t count = int64_t(parts.size());
    if (members == 1) {
      std::atomic<int64_t> next{0};
      parallel(workers, [&](int64_t) {
        typename Walk::Shared shared;
        typename Walk::Own own;
        in_memory<T>(Purpose::block, [&](auto&& take) { shared = walk.make_shared(take), own = walk.make_own(take); });
        for (int64_t i; (i = next++) < count;)
          for (int64_t phase = 0, phases = walk.phases(parts[i]); phase < phases; ++phase)
            walk.run(parts[i], shared, own, phase, 0);
      });
      return;
    }
    std::vector<typename Walk::Shared> shared;
    in_memory<T>(Purpose::states, [&](auto&& take) {
      shared.clear();
      for (int64_t i = 0; i < count; ++i) shared.push_back(walk.make_shared(take));
    });
    std::vector<std::unique_ptr<Team>> teams;
    for (int64_t i = 0; i < count; ++i) teams.push_back(std::make_unique<Team>(members));
    parallel(count * members, [&](int64_t task) {
      const int64_t i = task / members;
      typename Walk::Own own;
      in_memory<T>(Purpose::block, [&](auto&& take) { own = walk.make_own(take); });
      teams[i]->run(task % members, walk.phases(parts[i]), [&](int64_t phase, int64_t chunk) {
        walk.run(parts[i], shared[i], own, phase, chunk);
      });
    });
  }

  template <class Take>
  static PartMemory<T> make_memory(const std::vector<Products<T>>& products, int64_t samples, Take&& take) {
    return {products.front().make_memory(samples, take), products.back().make_memory(samples, take),
            int64_t(products.size()) - 1};
  }

  // What a member takes, or others in its stead.
  Columns columns(const Products<T>& products, int64_t chunk) const {
    const int64_t panels = products.panels();
    return products.columns(panels * chunk / members, panels * (chunk + 1) / members);
  }

 private:
  void cut(int threads) {
    const int64_t count = int64_t(sequences.size());
    const Contraction& c = chain.contractions.front();
    if (Products<T>::is_dense(chain)) {
      const bool shares = !takes_dots<T>(c, rows);  // else what a dot product makes may depend on the rows beside it
      const int64_t share = (count + threads - 1) / threads;
      const int64_t together = shares ? std::clamp<int64_t>(share, kFewTogether, kDenseTogether) : kDenseTogether;
      for (int64_t first = 0; first < count; first += together)
        add_part(first, std::min(together, count - first), 0, hidden, 0);
      const int64_t panels = Products<T>(chain, held, {}, false, rows, most).panels();
      const int64_t work = kGates * hidden * hidden * most / kMemberWork;
      if (const int64_t blocks = int64_t(parts.size()); blocks && blocks < threads)
        members = std::max<int64_t>(1, std::min({threads / blocks, panels, work}));
    } else {
      const bool divides = chain.contractions.size() == 1 && chain.rank == 1 && !c.tied && c.inner == 1;
      const int64_t features = divides ? std::max<int64_t>(1, kPartFeatures / c.q) * c.q : hidden;
      for (int64_t first = 0; first < count; first += kTogether)
        for (int64_t at = 0, which = 0; at < hidden; at += features, ++which)
          add_part(first, std::min(kTogether, count - first), at, std::min(features, hidden - at), which);
    }
    workers = std::min<int64_t>(threads, int64_t(parts.size()));
  }

  void add_part(int64_t first, int64_t count, int64_t feature, int64_t features, int64_t products) {
    parts.push_back({first, count, feature, features, products, sequences[first].length});
    most = std::max(most, count), widest = std::max(widest, features);
  }
};
