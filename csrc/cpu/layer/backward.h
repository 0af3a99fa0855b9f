// Gradients of a stack, block by block: its states are computed again as far as they are needed, then layers and
// contractions are gone through from the last to the first. Sums over samples are kept for each task, and added up in
// the order of the tasks.
//
// A sum over a long batch in float would lose what a tree of additions keeps: a few blocks are summed in T, and those
// sums in double, if there are more.

template <class T> class Backward {
  // What is wanted of a layer, null where it is not, and where its sums lie among those of a task.
  struct Wanted {
    void* const* weights;
    void* bias = nullptr;
    std::vector<bool> stages;     // of contraction i, or of any part of it
    std::vector<int64_t> offset;  // of its sums [rank, size]
    std::vector<T*> whole;        // null, or where they are made at once: in the gradient itself
    int64_t bias_offset;
    int64_t earliest;  // the first contraction whose weight gradient is wanted
    int64_t parameters = -1;  // the place of the sums of all the activation's parameters, if one of them is wanted
  };

  // What a block keeps of a layer.
  struct Kept {
    States<T> states;
    const T* x;       // rows
    T *z, *y;         // rows before and behind bias and activation
    bool has_states;  // whether those of the block's chunk, or between its phases, have been made
  };

  // The buffers of one task.
  struct Buffers {
    T *rows[2], *between[2], *x, *sum;  // `sum`: of the first worker, behind which lie the others'
    double *total, *row_sum;
    Workers<T> workers;
    std::vector<Kept> kept;
  };

  const Run<T> run_;
  const Held<T>& held_;
  const std::vector<Layer<T>>& layers_;
  const void* grad_y_;
  void* grad_x_;
  void* const* grad_inputs_;  // null unless one of them is wanted
  const int64_t count_;  // of layers
  std::vector<Wanted> wanted_;
  int64_t first_;      // layer that gradients go back to
  int64_t reach_ = 0;  // behind the last layer whose inputs are needed
  int64_t sums_size_ = 0, row_sum_size_ = 0;
  int64_t blocks_per_flush_;
  bool flushes_ = false;
  const int64_t places_;      // of sums: a worker's of a task each
  T* sums_;                   // [places, sums_size]: of the last few blocks
  double* totals_ = nullptr;  // the same: of all blocks before and of parameters, where sums are flushed

 public:
  Backward(const Problem& problem, Held<T> held, const void* grad_y, const std::vector<void*>& gradients, int threads)
      : run_(problem, held, true, threads), held_(run_.held), layers_(run_.layers), grad_y_(grad_y), grad_x_(gradients[0]),
        grad_inputs_(inputs_of(problem, gradients)), count_(int64_t(layers_.size())), first_(wants_x() ? 0 : count_),
        places_(run_.tasks * run_.places) {
    void* const* at = gradients.data() + 1;
    double multiply_adds = 1;
    for (int64_t l = 0; l < count_; ++l) {
      const Wanted& wanted = wanted_.emplace_back(plan(layers_[l], at));
      at += layers_[l].bias_index() + layers_[l].chain.bias;
      const bool wants_weights = wanted.earliest < layers_[l].stages;
      flushes_ |= wanted.parameters >= 0;
      if (wanted.bias || wants_weights || wanted.parameters >= 0) first_ = std::min(first_, l);
      if (first_ <= l && (wants_weights || layers_[l].activation)) reach_ = l + 1;
      for (const Contraction& c : layers_[l].chain.contractions)
        multiply_adds += double(c.outer * c.q * c.inner * c.p) * double(run_.samples);
    }
    // As often as costs a few percent of the work at most.
    blocks_per_flush_ = std::clamp<int64_t>(int64_t(2048 * double(sums_size_) / multiply_adds), 1, 16);
    flushes_ |= run_.blocks > run_.tasks * blocks_per_flush_;
    sums_ = Arena<T>(Purpose::sums, places_ * sums_size_).take(places_ * sums_size_);
    if (flushes_) totals_ = Arena<double>(Purpose::totals, places_ * sums_size_).take(places_ * sums_size_);
  }

  void run(const Parallel& parallel) {
    const auto of_task = [&](int64_t task) { run_task(task, parallel); };
    run_.tasks == 1 ? of_task(0) : parallel(run_.tasks, of_task);
    constexpr int64_t kPiece = 4096;  // elements of the sums that are added up at a time
    if (flushes_ || places_ > 1)
      parallel((sums_size_ + kPiece - 1) / kPiece, [&](int64_t piece) {
        const int64_t from = piece * kPiece, count = std::min(kPiece, sums_size_ - from);
        double whole[kPiece] = {};
        for (int64_t at = from; at < places_ * sums_size_; at += sums_size_)
          flushes_ ? add(count, totals_ + at, whole) : add(count, sums_ + at, whole);
        std::copy(whole, whole + count, sums_ + from);
      });
    for (int64_t l = 0; l < count_; ++l) {
      const Wanted& wanted = wanted_[l];
      if (wanted.bias) held_.write(layers_[l].out, sums_ + wanted.bias_offset, wanted.bias);
      for (int64_t i = 0; i < layers_[l].stages; ++i)
        if (wanted.stages[i] && !wanted.whole[i]) write_weight_gradients(l, i);
      for (size_t i = 0; i < layers_[l].chain.parameters(); ++i)
        if (void* gradient = wanted.weights[layers_[l].parameter_index() + i])
          held_.write(1, sums_ + wanted.parameters + i, gradient);
    }
  }

 private:
  static void* const* inputs_of(const Problem& problem, const std::vector<void*>& gradients) {
    void* const* const from = gradients.data() + problem.tensors.size();
    return std::any_of(from, from + problem.inputs.size(), [](void* gradient) { return gradient; }) ? from : nullptr;
  }
  bool wants_x() const { return grad_x_ || grad_inputs_; }

  // Gives a layer's sums their places.
  Wanted plan(const Layer<T>& layer, void* const* gradients) {
    Wanted wanted{gradients};
    wanted.offset.resize(layer.stages), wanted.whole.resize(layer.stages);
    wanted.bias_offset = sums_size_, wanted.earliest = layer.stages;
    if (layer.chain.bias) wanted.bias = gradients[layer.bias_index()];
    if (wanted.bias) {
      sums_size_ += layer.out;
      row_sum_size_ = std::max(row_sum_size_, rows_as_one(layer.out) * layer.out);
    }
    void* const* of_parameters = gradients + layer.parameter_index();
    const int64_t parameters = int64_t(layer.chain.parameters());
    if (std::any_of(of_parameters, of_parameters + parameters, [](void* gradient) { return gradient; })) {
      wanted.parameters = sums_size_;
      sums_size_ += parameters;
    }
    for (int64_t i = 0; i < layer.stages; ++i) {
      const Contraction& c = layer.chain.contractions[i];
      bool wants = false;
      for (const Contraction& part : layer.groups[i].parts) wants |= gradients[part.weight] != nullptr;
      wanted.stages.push_back(wants);
      if (!wants) continue;
      wanted.earliest = std::min(wanted.earliest, i);
      if (run_.blocks == 1 && run_.places == 1 && !held_.converts && layer.groups[i].parts.size() == 1) {
        wanted.whole[i] = static_cast<T*>(gradients[c.weight]);
        continue;
      }
      wanted.offset[i] = sums_size_;
      sums_size_ += layer.chain.rank * c.weight_size();
    }
    return wanted;
  }

  // take(elements) gives memory, in the same order every time.
  template <class Take> Buffers make_buffers(Take&& take) const {
    const int64_t samples = run_.samples;
    Buffers b{};
    for (T** rows : {&b.x, &b.rows[0], &b.rows[1]}) *rows = take(run_.widest * samples);
    int64_t largest = 0;  // states between two phases
    for (int64_t l = 0; l < count_; ++l) {
      const Layer<T>& layer = layers_[l];
      Kept& kept = b.kept.emplace_back();
      kept.states = layer.make_states(samples, true, take, run_.places);
      kept.z = take(layer.out * samples);
      kept.y = l + 1 < count_ ? take(layer.out * samples) : nullptr;
      for (const Phase& phase : layer.cut->phases)
        if (phase.last < layer.stages) largest = std::max(largest, layer.chain.rank * phase.out * phase.slabs);
    }
    for (T*& between : b.between) between = take(largest * samples);
    b.workers.take(run_.workers, run_.scratch_size, take);
    b.row_sum = reinterpret_cast<double*>(take(row_sum_size_ * int64_t(sizeof(double) / sizeof(T))));
    return b;
  }

  void run_task(int64_t task, const Parallel& parallel) {
    Buffers b;
    in_memory<T>(Purpose::block, [&](auto&& take) { b = make_buffers(take); });
    const int64_t size = run_.places * sums_size_;
    b.sum = sums_ + task * size;
    b.total = totals_ + task * size;
    std::fill(b.sum, b.sum + size, T(0));
    if (flushes_) std::fill(b.total, b.total + size, 0.0);
    int64_t unflushed = 0;
    auto flush = [&] {
      add(size, b.sum, b.total);
      std::fill(b.sum, b.sum + size, T(0));
      unflushed = 0;
    };
    run_.for_blocks(task, [&](int64_t first, int64_t count) {
      if (unflushed == blocks_per_flush_) flush();
      go_forward(first, count, b);
      go_back(first, count, b);
      b.workers.finish(parallel);
      ++unflushed;
    });
    if (flushes_) flush();
  }

  // Keeps what gradients need of a block.
  void go_forward(int64_t first, int64_t count, Buffers& b) const {
    if (!reach_) return;
    const T* rows = run_.read_x(first, count, b.x, b.workers);
    for (int64_t l = 0; l < reach_; ++l) {
      const Layer<T>& layer = layers_[l];
      Kept& kept = b.kept[l];
      kept.x = rows, kept.has_states = false;
      if (l < first_) {
        layer.forward(count, rows, kept.y, kept.states, b.workers);
        rows = kept.y;
        continue;
      }
      const bool ends = l + 1 == reach_;
      if (ends && !layer.activation) return;  // its states are made on the way back
      layer.contract_all(count, rows, kept.z, kept.states, b.workers);
      kept.has_states = layer.chain.rank == 1 || layer.cut->phases.size() > 1;
      if (ends) return;
      T* y = layer.activation ? kept.y : kept.z;
      if (y != kept.z) std::copy(kept.z, kept.z + count * layer.out, y);
      layer.activation.forward(count, y);
      rows = y;
    }
  }

  // Short rows are added several at a time, which fills vectors.
  static int64_t rows_as_one(int64_t size) { return std::max<int64_t>(1, 64 / size); }

  // Adds the sum of a block's rows to `sum`. Numbers added one behind another in T lose bits, and equal ones, as the
  // gradient of a mean is, all in one direction: so four are added in T at a time, and their sums in double.
  static void add_rows(int64_t count, int64_t size, const T* rows, double* total, T* sum) {
    if (count == 1) return add(size, rows, sum);
    const int64_t length = rows_as_one(size) * size, end = count * size;
    std::fill(total, total + length, 0.0);
    int64_t at = 0;
    for (; at + 4 * length <= end; at += 4 * length) {
      const T *a = rows + at, *b = a + length, *c = b + length, *d = c + length;
      for (int64_t i = 0; i < length; ++i) total[i] += (a[i] + b[i]) + (c[i] + d[i]);
    }
    for (; at < end; at += length) add(std::min(length, end - at), rows + at, total);
    for (int64_t n = size; n < length; n += size) add(size, total + n, total);
    for (int64_t i = 0; i < size; ++i) sum[i] += T(total[i]);
  }

  void go_back(int64_t first, int64_t count, const Buffers& b) const {
    if (first_ == count_) return;
    const T* g = held_.rows(grad_y_, first, count, run_.out, b.rows[count_ % 2], b.workers);
    for (int64_t l = count_; l-- > first_;) {
      const Layer<T>& layer = layers_[l];
      if (layer.activation) {  // g *= its derivative at z + bias
        T* own = b.rows[(l + 1) % 2];
        b.workers.once([=, &layer, &b] {
          if (g != own) std::copy(g, g + count * layer.out, own);
          const int64_t parameters = wanted_[l].parameters;
          layer.activation.backward(count, b.kept[l].z, own, parameters < 0 ? nullptr : b.total + parameters);
        });
        g = own;
      }
      if (wanted_[l].bias)
        b.workers.once([=, &layer, &b] { add_rows(count, layer.out, g, b.row_sum, b.sum + wanted_[l].bias_offset); });
      const bool passes = l > first_ || wants_x();
      if (!passes && wanted_[l].earliest == layer.stages) return;
      const bool apart = l || grad_inputs_;
      T* gx = !passes ? nullptr : apart ? b.rows[l % 2] : held_.output_rows(grad_x_, first, run_.in, b.rows[0]);
      go_back(l, count, g, gx, b);
      if (!passes) return;
      g = gx;
    }
    if (grad_inputs_) return b.workers.once([=] { run_.write_inputs(grad_inputs_, first, count, g); });
    held_.write_rows(grad_x_, first, count, run_.in, g, b.workers);
  }

  // The phases of all terms, from the last to the first one needed; gx is null where it is not wanted.
  void go_back(int64_t l, int64_t count, const T* g, T* gx, const Buffers& b) const {
    const Layer<T>& layer = layers_[l];
    const Kept& kept = b.kept[l];
    const int64_t phases = int64_t(layer.cut->phases.size());
    int64_t reach = phases;  // behind the last phase of which a weight's gradient is wanted, whose x has to be there
    while (reach && !wants_of(l, layer.cut->phases[reach - 1], 0)) --reach;
    if (!kept.has_states && reach) layer.run_phases(reach - 1, count, kept.x, nullptr, kept.states, b.workers);
    OfTerms<const T> from{g, 0};
    for (int64_t i = phases; i--;) {
      const bool needed = gx || wanted_[l].earliest < layer.cut->phases[i].first;  // the gradient of the phase's x
      const OfTerms<T> to = !needed ? OfTerms<T>{} : i ? layer.behind(i - 1, count, b.between[i % 2]) : OfTerms<T>{gx, 0};
      OfTerms<const T> x{kept.x, 0};
      if (i) x = layer.behind(i - 1, count, kept.states.between[i - 1]);
      go_back(l, i, count, x, from, to, b);
      if (!needed) return;
      from = to;
    }
  }

  // Whether a weight's gradient is wanted of contraction `from` of a phase or one behind it. That of the first one needs the
  // phase's x, those of the others states.
  bool wants_of(int64_t l, const Phase& phase, int64_t from) const {
    const std::vector<bool>& stages = wanted_[l].stages;
    const auto first = stages.begin() + phase.first + from, last = stages.begin() + phase.last;
    return std::find(first, last, true) != last;
  }

  // A phase of all terms: from its x and the gradient of what it makes. gx, which is null where it is not wanted, is their sum
  // where they have the same x.
  void go_back(int64_t l, int64_t which, int64_t count, OfTerms<const T> x, OfTerms<const T> g, OfTerms<T> gx,
               const Buffers& b) const {
    const Layer<T>& layer = layers_[l];
    const Phase& phase = layer.cut->phases[which];
    const bool one_chunk = layer.cut->phases.size() == 1 && phase.columns == phase.inner && count * phase.slabs <= phase.units;
    const bool has_states = b.kept[l].has_states && one_chunk;
    const bool needs_x = wants_of(l, phase, 0), needs_states = wants_of(l, phase, 1);
    layer.for_chunks(which, count, b.kept[l].states, b.workers,
                     [=, &layer, &phase, &b](const Chunk& chunk, const auto& own, int64_t worker, const auto& by) {
      const bool is_there = has_states && !phase.in_place();
      const T *chunk_x = nullptr, *chunk_g = nullptr;
      for (int64_t r = 0; r < layer.chain.rank; ++r) {
        if (needs_x && (r == 0 || !x.same()))
          chunk_x = is_there ? own.x : by.gather(phase, chunk, phase.in, x.of(r), own.x);
        if (r == 0 || !g.same()) chunk_g = by.gather(phase, chunk, phase.out, g.of(r), own.grad_y);
        T* chunk_gx = !gx.rows ? nullptr : phase.in_place() ? gx.of(r) + chunk.unit * phase.in : own.grad_x;
        if (!has_states && needs_states)
          layer.contract_chunk(phase, chunk, r, phase.size() - 1, chunk_x, own.after, nullptr, false, by);
        go_back(l, phase, chunk, r, chunk_x, chunk_g, chunk_gx, r > 0 && gx.same(), own.after, b.sum + worker * sums_size_, by);
        if (gx.rows && (r + 1 == layer.chain.rank || !gx.same())) by.scatter(phase, chunk, phase.in, chunk_gx, gx.of(r));
      }
    });
  }

  // The contractions of a chunk and term r, from the last to the first one needed.
  template <class By>
  void go_back(int64_t l, const Phase& phase, const Chunk& chunk, int64_t r, const T* x, const T* g, T* gx, bool adds,
               const std::vector<T*>& after, T* sums, const By& by) const {
    const Layer<T>& layer = layers_[l];
    const Wanted& wanted = wanted_[l];
    for (int64_t i = phase.size(); i--;) {
      const Contraction c = phase.contraction(i, chunk.columns);
      const int64_t whole = phase.first + i;
      const bool of_weight = wanted.stages[whole], of_x = whole > wanted.earliest || gx, adds_here = adds && i == 0;
      T* const gradient = wanted.whole[whole];
      T* const sum = !of_weight ? nullptr : (gradient ? gradient : sums + wanted.offset[whole]) + r * c.weight_size();
      const bool first = gradient && chunk.unit == 0 && chunk.column == 0;
      const T* const from = i ? after[i - 1] : x;
      T* const to = i ? after[i - 1] : gx;  // a state is used up once its weight gradient is taken
      const Weights<T> w = layer.weights[r * layer.stages + whole];
      by.for_positions(c, [=](Positions part, const Scratch<T>& scratch) {
        if (of_weight)
          contract_grad_w<T>(c, chunk.block, part, g, from, sum, !first, scratch.elements, scratch.packed);
        if (of_x) contract_grad_x<T>(c, chunk.block, part, w, g, to, adds_here, scratch.elements, scratch.packed);
      });
      if (!of_x) return;
      g = to;
    }
  }

  // From the sums for contraction i to the gradients of the weights that it stands for.
  void write_weight_gradients(int64_t l, int64_t i) const {
    const Layer<T>& layer = layers_[l];
    const Group& group = layer.groups[i];
    const T* sums = sums_ + wanted_[l].offset[i];
    std::vector<T> buffer;
    for (int64_t r = 0; r < layer.chain.rank; ++r, sums += group.whole.weight_size())
      for (size_t part = 0; part < group.parts.size(); ++part) {
        const Contraction& c = group.parts[part];
        void* grad = wanted_[l].weights[c.weight];
        if (!grad) continue;
        const T* found = sums;
        if (group.parts.size() > 1) {
          buffer.resize(c.weight_size());
          part_gradient(group, layer.parts[r * layer.stages + i], part, sums, buffer.data());
          found = buffer.data();
        }
        held_.write(c.weight_size(), found, held_.at(grad, r * c.weight_size()));
      }
  }
};
