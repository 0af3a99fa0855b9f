// Gradients of a stack, block by block: its states are computed again as far as they are needed, then layers and
// contractions are gone through from the last to the first. Sums over samples are kept for each task, and added up in
// the order of the tasks.
//
// A sum over a long batch in float would lose what a tree of additions keeps: a few blocks are summed in T, and those
// sums in double, if there are more.

template <class T, class S> class Backward {
  // What is wanted of a layer, null where it is not, and where its sums lie among those of a task.
  struct Wanted {
    void* const* weights;
    void* bias;
    std::vector<bool> stages;     // of contraction i, or of any part of it
    std::vector<int64_t> offset;  // of its sums [rank, size]
    int64_t bias_offset;
    int64_t earliest;  // the first contraction whose weight gradient is wanted
    int64_t parameters = -1;  // the place of the sums of all the activation's parameters, if one of them is wanted
  };

  // What a block keeps of a layer.
  struct Kept {
    States<T> states;
    const T* x;  // in the layer's layout
    T* z_rows;   // before bias and activation
    T* y_rows;   // behind them
  };

  // The buffers of one task.
  struct Buffers {
    T *rows[2], *g_state, *gx_state, *x_rows, *scratch, *packed, *sum;
    double *total, *row_sum;
    std::vector<Kept> kept;
  };

  const Run<T, S> run_;
  const std::vector<Layer<T, S>>& layers_;
  const void* grad_y_;
  void* grad_x_;
  const int64_t count_;  // of layers
  std::vector<Wanted> wanted_;
  int64_t first_;      // layer that gradients go back to
  int64_t reach_ = 0;  // behind the last layer whose inputs are needed
  int64_t sums_size_ = 0, scratch_size_ = 0, row_sum_size_ = 0;
  int64_t blocks_per_flush_;
  bool flushes_ = false;
  T* sums_;                   // [tasks, sums_size]: of the last few blocks
  double* totals_ = nullptr;  // the same: of all blocks before and of parameters, where sums are flushed

 public:
  Backward(const Problem& problem, const void* grad_y, const std::vector<void*>& gradients, int threads)
      : run_(problem, true, threads), layers_(run_.layers), grad_y_(grad_y), grad_x_(gradients[0]),
        count_(int64_t(layers_.size())), first_(grad_x_ ? 0 : count_) {
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
    sums_ = Arena<T>(Purpose::sums, run_.tasks * sums_size_).take(run_.tasks * sums_size_);
    if (flushes_) totals_ = Arena<double>(Purpose::totals, run_.tasks * sums_size_).take(run_.tasks * sums_size_);
  }

  void run(const Parallel& parallel) {
    parallel(run_.tasks, [&](int64_t task) { run_task(task); });
    constexpr int64_t kPiece = 4096;  // elements of the sums that are added up at a time
    if (flushes_ || run_.tasks > 1)
      parallel((sums_size_ + kPiece - 1) / kPiece, [&](int64_t piece) {
        const int64_t from = piece * kPiece, count = std::min(kPiece, sums_size_ - from);
        double whole[kPiece] = {};
        for (int64_t at = from; at < run_.tasks * sums_size_; at += sums_size_)
          flushes_ ? add(count, totals_ + at, whole) : add(count, sums_ + at, whole);
        std::copy(whole, whole + count, sums_ + from);
      });
    for (int64_t l = 0; l < count_; ++l) {
      const Wanted& wanted = wanted_[l];
      if (wanted.bias) write(layers_[l].out, sums_ + wanted.bias_offset, static_cast<S*>(wanted.bias));
      for (int64_t i = 0; i < layers_[l].stages; ++i)
        if (wanted.stages[i]) write_weight_gradients(l, i);
      for (size_t i = 0; i < layers_[l].chain.parameters(); ++i)
        if (void* gradient = wanted.weights[layers_[l].parameter_index() + i])
          write(1, sums_ + wanted.parameters + i, static_cast<S*>(gradient));
    }
  }

 private:
  // Gives a layer's sums their places.
  Wanted plan(const Layer<T, S>& layer, void* const* gradients) {
    Wanted wanted{gradients, nullptr, {}, std::vector<int64_t>(layer.stages), sums_size_, layer.stages};
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
      wanted.offset[i] = sums_size_;
      sums_size_ += layer.chain.rank * c.weight_size();
      scratch_size_ = std::max(scratch_size_, grad_weight_scratch(c));
    }
    return wanted;
  }

  // take(elements) gives memory, in the same order every time.
  template <class Take> Buffers make_buffers(Take&& take) const {
    const int64_t samples = run_.samples, state = run_.largest * samples;
    Buffers b{};
    for (T** buffer : {&b.x_rows, &b.rows[0], &b.rows[1], &b.g_state, &b.gx_state}) *buffer = take(state);
    for (int64_t l = 0; l < count_; ++l) {
      const Layer<T, S>& layer = layers_[l];
      Kept& kept = b.kept.emplace_back();
      kept.states.x = layer.interleaved ? take(layer.in * samples) : nullptr;
      for (const Contraction& c : layer.chain.contractions)
        kept.states.after.push_back(take(c.outer * c.q * c.inner * samples));
      kept.z_rows = layer.interleaved ? take(layer.out * samples) : kept.states.after.back();
      kept.y_rows = l + 1 < count_ ? take(layer.out * samples) : nullptr;
    }
    b.scratch = take(scratch_size_), b.packed = take(kPackedSize<T>);
    b.row_sum = reinterpret_cast<double*>(take(row_sum_size_ * int64_t(sizeof(double) / sizeof(T))));
    return b;
  }

  void run_task(int64_t task) {
    int64_t size = 0;
    make_buffers([&](int64_t n) { return size += Arena<T>::padded(n), static_cast<T*>(nullptr); });
    Arena<T> arena(Purpose::block, size);
    Buffers b = make_buffers([&](int64_t n) { return arena.take(n); });
    b.sum = sums_ + task * sums_size_;
    b.total = totals_ + task * sums_size_;
    std::fill(b.sum, b.sum + sums_size_, T(0));
    if (flushes_) std::fill(b.total, b.total + sums_size_, 0.0);
    int64_t unflushed = 0;
    auto flush = [&] {
      add(sums_size_, b.sum, b.total);
      std::fill(b.sum, b.sum + sums_size_, T(0));
      unflushed = 0;
    };
    run_.for_blocks(task, [&](int64_t first, int64_t count) {
      if (unflushed == blocks_per_flush_) flush();
      go_forward(first, count, b);
      go_back(first, count, b);
      ++unflushed;
    });
    if (flushes_) flush();
  }

  // Keeps the states of a block that gradients need.
  void go_forward(int64_t first, int64_t count, Buffers& b) const {
    if (!reach_) return;
    const T* rows = read_rows<T, S>(run_.problem.tensors[0], first, count, run_.in, b.x_rows);
    for (int64_t l = 0; l < reach_; ++l) {
      const Layer<T, S>& layer = layers_[l];
      const Block block = layer.block(run_.samples, count);
      Kept& kept = b.kept[l];
      if (l < first_) {
        layer.forward(block, rows, kept.y_rows, kept.states, b.packed);
        rows = kept.y_rows;
        continue;
      }
      kept.x = layer.from_rows(block, layer.in, rows, kept.states.x);
      const bool ends = l + 1 == reach_;
      if (ends && !layer.activation) return;  // its states are made on the way back
      for (int64_t r = 0; r < layer.chain.rank; ++r)
        layer.contract_all(r, layer.stages, block, kept.x, kept.states.after, b.packed);
      layer.to_rows(block, layer.out, kept.states.after.back(), kept.z_rows);
      if (ends) return;
      T* y = layer.activation ? kept.y_rows : kept.z_rows;
      if (y != kept.z_rows) std::copy(kept.z_rows, kept.z_rows + count * layer.out, y);
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
    const T* g = read_rows<T, S>(grad_y_, first, count, run_.out, b.rows[count_ % 2]);
    for (int64_t l = count_; l-- > first_;) {
      const Layer<T, S>& layer = layers_[l];
      const Block block = layer.block(run_.samples, count);
      if (layer.activation) {  // g *= its derivative at z + bias
        T* own = b.rows[(l + 1) % 2];
        if (g != own) std::copy(g, g + count * layer.out, own), g = own;
        const int64_t parameters = wanted_[l].parameters;
        layer.activation.backward(count, b.kept[l].z_rows, own, parameters < 0 ? nullptr : b.total + parameters);
      }
      if (wanted_[l].bias) add_rows(count, layer.out, g, b.row_sum, b.sum + wanted_[l].bias_offset);
      const bool passes = l > first_ || grad_x_;
      if (!passes && wanted_[l].earliest == layer.stages) return;
      g = layer.from_rows(block, layer.out, g, b.g_state);
      T* rows = !passes ? nullptr : l ? b.rows[l % 2] : output_rows<T, S>(grad_x_, first, run_.in, b.rows[0]);
      T* gx = layer.interleaved ? b.gx_state : rows;
      for (int64_t r = 0; r < layer.chain.rank; ++r) go_back(l, r, block, g, passes ? gx : nullptr, b);
      if (!passes) return;
      layer.to_rows(block, layer.in, gx, rows);
      g = rows;
    }
    write_rows<T, S>(grad_x_, first, count, run_.in, g);
  }

  // The contractions of term r, from the last to the first one needed; gx is null where it is not wanted.
  void go_back(int64_t l, int64_t r, Block block, const T* g, T* gx, const Buffers& b) const {
    const Layer<T, S>& layer = layers_[l];
    const Wanted& wanted = wanted_[l];
    const std::vector<T*>& states = b.kept[l].states.after;
    const T* x = b.kept[l].x;
    const int64_t stages = layer.stages;
    const bool states_are_there = layer.chain.rank == 1 && (layer.activation || l + 1 < reach_);
    if (wanted.earliest < stages && !states_are_there)
      layer.contract_all(r, stages - 1, block, x, states, b.packed);
    for (int64_t i = stages; i-- > (gx ? 0 : wanted.earliest);) {
      const Contraction& c = layer.chain.contractions[i];
      if (wanted.stages[i]) {
        T* sum = b.sum + wanted.offset[i] + r * c.weight_size();
        contract_grad_w<T>(c, block, g, i ? states[i - 1] : x, sum, b.scratch, b.packed);
      }
      if (i == wanted.earliest && !gx) return;
      T* to = i ? states[i - 1] : gx;  // a state is used up once its weight gradient is taken
      contract_grad_x<T>(c, block, layer.weights[r * stages + i], g, to, r > 0 && i == 0, b.packed);
      g = to;
    }
  }

  // From the sums for contraction i to the gradients of the weights that it stands for.
  void write_weight_gradients(int64_t l, int64_t i) const {
    const Layer<T, S>& layer = layers_[l];
    const Group& group = layer.groups[i];
    const T* sums = sums_ + wanted_[l].offset[i];
    std::vector<T> buffer;
    for (int64_t r = 0; r < layer.chain.rank; ++r, sums += group.whole.weight_size())
      for (size_t part = 0; part < group.parts.size(); ++part) {
        const Contraction& c = group.parts[part];
        S* grad = static_cast<S*>(wanted_[l].weights[c.weight]);
        if (!grad) continue;
        const T* found = sums;
        if (group.parts.size() > 1) {
          buffer.resize(c.weight_size());
          part_gradient(group, layer.parts[r * layer.stages + i], part, sums, buffer.data());
          found = buffer.data();
        }
        write(c.weight_size(), found, grad + r * c.weight_size());
      }
  }
};
