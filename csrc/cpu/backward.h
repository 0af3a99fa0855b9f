// Gradients of a chain, block by block: the states are computed again, then the contractions are gone through from the
// last to the first. Sums over samples are kept for each task, and added up in the order of the tasks.
//
// A sum over a long batch in float would lose what a tree of additions keeps: a few blocks are summed in T, and those
// sums in double.

template <class T, class S> class Backward {
  using R = Run<T, S>;
  const R run_;
  const Chain& chain_;
  const void* grad_y_;
  const Gradients& wanted_;
  const int64_t stages_, samples_, state_;  // state_: elements of the largest state of a block
  const bool interleaved_;

  std::vector<bool> wants_weight_;  // of contraction i, or of any part of it
  std::vector<int64_t> offset_;     // of its sums [rank, size] among those of a task; the bias comes first
  int64_t sums_size_ = 0, scratch_size_ = 0;
  int64_t parameters_ = -1;         // the offset of those of the activation's parameters, if any is wanted
  int64_t earliest_;                // the first contraction whose weight gradient is wanted
  int64_t blocks_per_flush_;
  T* sums_;         // [tasks, sums_size]: of the last few blocks
  double* totals_;  // the same: of all blocks before

  // The buffers of one task. A state is after contraction i.
  struct Buffers {
    T *x_rows, *x_state, *z_rows, *g_rows, *g_state, *gx_rows, *gx_state, *scratch, *packed, *sum;
    std::vector<T*> states;
  };

 public:
  Backward(const Problem& problem, const void* grad_y, const Gradients& wanted, int threads)
      : run_(problem, int64_t(problem.chain->contractions.size()) + 2, threads), chain_(run_.chain), grad_y_(grad_y),
        wanted_(wanted), stages_(run_.stages), samples_(run_.block.samples), state_(largest_state(chain_) * samples_),
        interleaved_(run_.block.interleaved), wants_weight_(stages_), offset_(stages_), earliest_(stages_) {
    sums_size_ = wanted.grad_bias ? run_.out : 0;
    double multiply_adds = 1;
    for (int64_t i = stages_; i-- > 0;) {
      const Contraction& c = chain_.contractions[i];
      multiply_adds += double(c.outer * c.q * c.inner * c.p) * double(samples_);
      for (const Contraction& part : run_.groups[i].parts)
        if (wanted.grad_weights[part.weight]) wants_weight_[i] = true;
      if (!wants_weight_[i]) continue;
      earliest_ = i;
      offset_[i] = sums_size_;
      sums_size_ += chain_.rank * c.weight_size();
      scratch_size_ = std::max(scratch_size_, grad_weight_scratch(c));
    }
    for (size_t i = 0; i < chain_.parameters(); ++i)
      if (parameter_gradient(i)) parameters_ = sums_size_;
    if (parameters_ >= 0) sums_size_ += int64_t(chain_.parameters());
    // As often as costs a few percent of the work at most.
    blocks_per_flush_ = std::clamp<int64_t>(int64_t(512 * double(sums_size_) / multiply_adds), 1, 16);
    sums_ = Arena<T>(Purpose::sums, run_.tasks * sums_size_).take(run_.tasks * sums_size_);
    totals_ = Arena<double>(Purpose::totals, run_.tasks * sums_size_).take(run_.tasks * sums_size_);
  }

  void run(const Parallel& parallel) {
    parallel(run_.tasks, [&](int64_t task) { run_task(task); });
    constexpr int64_t kPiece = 4096;  // elements of the sums that are added up at a time
    parallel((sums_size_ + kPiece - 1) / kPiece, [&](int64_t piece) {
      const int64_t from = piece * kPiece, to = std::min(sums_size_, from + kPiece);
      for (int64_t task = 1; task < run_.tasks; ++task)
        add(to - from, totals_ + task * sums_size_ + from, totals_ + from);
      std::copy(totals_ + from, totals_ + to, sums_ + from);
    });
    if (wanted_.grad_bias) write(run_.out, sums_, static_cast<S*>(wanted_.grad_bias));
    for (int64_t i = 0; i < stages_; ++i)
      if (wants_weight_[i]) write_weight_gradients(i);
    for (size_t i = 0; i < chain_.parameters(); ++i)
      if (S* gradient = parameter_gradient(i)) write(1, sums_ + parameters_ + i, gradient);
  }

 private:
  S* parameter_gradient(size_t i) const {
    return static_cast<S*>(wanted_.grad_weights[run_.problem.chain->contractions.size() + i]);
  }

  void run_task(int64_t task) {
    constexpr auto padded = Arena<T>::padded;
    Arena<T> arena(Purpose::block, (stages_ + 7) * padded(state_) + padded(scratch_size_) + padded(kPackedSize<T>));
    Buffers b;
    for (T** buffer : {&b.x_rows, &b.x_state, &b.z_rows, &b.g_rows, &b.g_state, &b.gx_rows, &b.gx_state})
      *buffer = arena.take(state_);
    for (int64_t i = 0; i < stages_; ++i) b.states.push_back(arena.take(state_));
    b.scratch = arena.take(scratch_size_), b.packed = arena.take(kPackedSize<T>);
    b.sum = sums_ + task * sums_size_;
    double* total = totals_ + task * sums_size_;
    std::fill(b.sum, b.sum + sums_size_, T(0));
    std::fill(total, total + sums_size_, 0.0);
    int64_t unflushed = 0;
    auto flush = [&] {
      add(sums_size_, b.sum, total);
      std::fill(b.sum, b.sum + sums_size_, T(0));
      unflushed = 0;
    };
    run_.for_blocks(task, [&](int64_t first, int64_t count) {
      run_block(first, count, b, parameters_ < 0 ? nullptr : total + parameters_);
      if (++unflushed == blocks_per_flush_) flush();
    });
    flush();
  }

  void run_block(int64_t first, int64_t count, const Buffers& b, double* parameter_sums) {
    const Block block{interleaved_ ? samples_ : count, interleaved_, count};
    const T* x = R::read_rows(run_.problem.x, first, count, run_.in, b.x_rows);
    if (interleaved_) run_.interleave(count, run_.in, x, b.x_state), x = b.x_state;
    const T* g = R::read_rows(grad_y_, first, count, run_.out, b.g_rows);
    if (!run_.activation->is_identity()) {
      if (g != b.g_rows) std::copy(g, g + count * run_.out, b.g_rows), g = b.g_rows;
      undo_activation(block, x, b, parameter_sums);
    }
    if (wanted_.grad_bias)
      for (int64_t n = 0; n < count; ++n) add(run_.out, g + n * run_.out, b.sum);
    if (!wanted_.grad_x && earliest_ == stages_) return;
    if (interleaved_) run_.interleave(count, run_.out, g, b.g_state), g = b.g_state;

    T* rows = wanted_.grad_x ? R::output_rows(wanted_.grad_x, first, run_.in, b.gx_rows) : nullptr;
    T* gx = interleaved_ ? b.gx_state : rows;
    for (int64_t r = 0; r < chain_.rank; ++r) go_back(r, block, x, g, gx, b);
    if (!wanted_.grad_x) return;
    if (interleaved_) transpose<T>(run_.in, count, gx, samples_, rows, run_.in);
    R::write_rows(wanted_.grad_x, first, count, run_.in, rows);
  }

  // g_rows *= the activation's derivative at z = chain(x) + bias
  void undo_activation(Block block, const T* x, const Buffers& b, double* parameter_sums) {
    T* z = b.states.back();
    for (int64_t r = 0; r < chain_.rank; ++r) run_.contract_all(r, stages_, block, x, b.states, b.packed);
    if (interleaved_) transpose<T>(run_.out, block.valid, z, samples_, b.z_rows, run_.out), z = b.z_rows;
    run_.activation->backward(block.valid, z, b.g_rows, parameter_sums);
  }

  // The contractions of rank r, from the last to the first one needed.
  void go_back(int64_t r, Block block, const T* x, const T* g, T* gx, const Buffers& b) {
    const bool states_are_there = !run_.activation->is_identity() && chain_.rank == 1;
    if (earliest_ < stages_ && !states_are_there) run_.contract_all(r, stages_ - 1, block, x, b.states, b.packed);
    for (int64_t i = stages_; i-- > (wanted_.grad_x ? 0 : earliest_);) {
      const Contraction& c = chain_.contractions[i];
      if (wants_weight_[i]) {
        T* sum = b.sum + offset_[i] + r * c.weight_size();
        contract_grad_w<T>(c, block, g, i ? b.states[i - 1] : x, sum, b.scratch);
      }
      if (i == earliest_ && !wanted_.grad_x) return;
      T* to = i ? b.states[i - 1] : gx;  // a state is used up once its weight gradient is taken
      contract_grad_x<T>(c, block, run_.weights[r * stages_ + i], g, to, r > 0 && i == 0, b.packed);
      g = to;
    }
  }

  // From the sums for contraction i to the gradients of the weights that it stands for.
  void write_weight_gradients(int64_t i) const {
    const Group& group = run_.groups[i];
    const T* sums = sums_ + offset_[i];
    std::vector<T> buffer;
    for (int64_t r = 0; r < chain_.rank; ++r, sums += group.whole.weight_size())
      for (size_t part = 0; part < group.parts.size(); ++part) {
        const Contraction& c = group.parts[part];
        S* grad = static_cast<S*>(wanted_.grad_weights[c.weight]);
        if (!grad) continue;
        const T* found = sums;
        if (group.parts.size() > 1) {
          buffer.resize(c.weight_size());
          part_gradient(group, run_.parts[r * stages_ + i], part, sums, buffer.data());
          found = buffer.data();
        }
        write(c.weight_size(), found, grad + r * c.weight_size());
      }
  }
};
