// Gradients of a recurrence, from its last step to its first one.
//
// The states before all steps are known, so the gates of several steps are computed again together. What is kept of them
// are the factors by which a gradient goes on; then the steps are gone through, each by one product with the transposed
// matrices (of a reset before the product: two). With g the gradient of the state behind a step, a that of what the
// candidate's activation takes, and d its derivative:
//     a = g (1 - z) d                           grad_z = g (h - n) z (1 - z)
//     grad_r = a (U_n h + b) r (1 - r)          grad_h = g z + U_r' grad_r + U_z' grad_z + U_n' (a r)          reset after
//     grad_r = (U_n' a) h r (1 - r)             grad_h = g z + U_r' grad_r + U_z' grad_z + (U_n' a) r          reset before

constexpr int64_t kAtOnce = 64;  // rows of which gates are computed together

template <class T> class RecurrentBackward {
  const Held<T> held_;
  RecurrentRun<T> run_;
  const RecurrentGradients& gradients_;
  const int64_t together_, rows_;  // steps whose gates are computed together, and rows of these
  const int64_t first_, of_step_;  // phases before steps are gone through, and of a step
  std::vector<Products<T>> products_, turned_;

 public:
  // What the threads of a part share. Of rows: states before a step, gates, and factors of g that give a and grad_z; then
  // the factor of a that gives grad_r, or, of a reset before the product, r * h.
  struct Shared {
    T *h, *r, *z, *to_a, *to_z, *to_r;
    T* gates[2];        // gradients that go into products, of a step and of the one gone through next
    T *state, *initial; // gradients of states [sequences, features]
  };
  struct Own {
    T* made;     // products of all gates [3, rows, columns]
    T* rows[4];  // columns as T
    PartMemory<T> memory, turned;
  };

  RecurrentBackward(const Recurrent& problem, Held<T> held, const RecurrentGradients& gradients, int threads)
      : held_(held), run_(problem, held, threads), gradients_(gradients), together_(std::max<int64_t>(1, kAtOnce / run_.most)),
        rows_(together_ * run_.most), first_(run_.before ? 3 : 2), of_step_(run_.before ? 2 : 1),
        products_(run_.make_products(false, rows_)), turned_(run_.make_products(true, run_.most)) {
    run_.prepare({&products_, &turned_});
  }

  void run(const Parallel& parallel) const { run_.over_parts(parallel, *this); }

  template <class Take> Shared make_shared(Take&& take) const {
    Shared shared;
    for (T** rows : {&shared.h, &shared.r, &shared.z, &shared.to_a, &shared.to_z, &shared.to_r})
      *rows = take(rows_ * run_.widest);
    for (T*& gates : shared.gates) gates = take(kGates * run_.most * run_.widest);
    shared.state = take(run_.most * run_.widest), shared.initial = take(run_.most * run_.widest);
    return shared;
  }
  template <class Take> Own make_own(Take&& take) const {
    const int64_t width = whole_vectors<T>(run_.widest);
    Own own;
    own.made = take(kGates * rows_ * width);
    for (T*& rows : own.rows) rows = take(width);
    own.memory = run_.make_memory(products_, rows_, take);
    own.turned = run_.make_memory(turned_, run_.most, take);
    return own;
  }

  // Of several steps: states are brought together, gates computed, of which the last phase goes into the first of the
  // steps, then the steps gone through.
  int64_t phases(const Part& part) const {
    const int64_t whole = part.steps / together_, rest = part.steps % together_;
    return whole * phases_of(together_) + (rest ? phases_of(rest) : 0);
  }

  void run(const Part& part, const Shared& shared, const Own& own, int64_t phase, int64_t chunk) const {
    const int64_t done = phase / phases_of(together_), at = phase % phases_of(together_);
    const int64_t last = part.steps - 1 - done * together_;  // steps last .. last - count + 1 are gone through
    const int64_t count = std::min(together_, last + 1);
    const Products<T>& products = products_[part.products];
    const Columns columns = run_.columns(products, chunk);
    if (at == 0) {
      bring_states(part, last, count, columns, shared, done == 0);
    } else if (at < first_) {
      if (run_.before && at == 1) return resets(part, last, count, columns, shared, own);
      gates(part, last, count, columns, shared, own);
      go_into(part, last, 0, 0, columns, shared, own);
    } else {
      const int64_t step = (at - first_) / of_step_;  // among these
      if (run_.before && (at - first_) % 2 == 0) return go_through_reset(part, last, step, columns, shared, own);
      go_through(part, last, step, columns, shared, own);
      if (step + 1 < count) go_into(part, last, step + 1, base(part, last, step + 1), columns, shared, own);
    }
  }

 private:
  int64_t phases_of(int64_t steps) const { return first_ + steps * of_step_; }
  T* made(const Own& own, int g, const Columns& columns) const { return own.made + g * rows_ * columns.row; }
  int64_t time(const Part& part, int64_t last, int64_t step) const { return run_.time(part, last - step); }

  // Rows of the steps before one of those that are gone through from `last` on.
  int64_t base(const Part& part, int64_t last, int64_t step) const {
    int64_t rows = 0;
    for (int64_t i = 0; i < step; ++i) rows += run_.there(part, time(part, last, i));
    return rows;
  }

  // f(row among those that are kept, sequence of the part, number of the step). Returns how many rows there are.
  template <class F> int64_t for_rows(const Part& part, int64_t last, int64_t count, F&& f) const {
    int64_t kept = 0;
    for (int64_t step = 0; step < count; ++step) {
      const int64_t t = time(part, last, step), n = run_.there(part, t);
      for (int64_t i = 0; i < n; ++i) f(kept++, i, t);
    }
    return kept;
  }

  void bring_states(const Part& part, int64_t last, int64_t count, const Columns& columns, const Shared& shared,
                    bool first) const {
    const int64_t f = part.features;
    if (first)
      for (int64_t i = 0; i < part.count; ++i)
        for (T* rows : {shared.state, shared.initial})
          std::fill(rows + i * f + columns.from, rows + i * f + columns.from + columns.count, T(0));
    for_rows(part, last, count, [&](int64_t kept, int64_t i, int64_t t) {
      T* to = shared.h + kept * f + columns.from;
      if (run_.begins(part, i, t) || run_.starts(run_.row(part, i, t))) return run_.read_initial(part, i, columns, to);
      const int64_t row = run_.row(part, i, run_.reversed ? t + 1 : t - 1);
      held_.read(columns.count, held_.at(gradients_.output, run_.state_at(part, row, columns)), to);
    });
  }

  // Reset before the product: r, z and r * h.
  void resets(const Part& part, int64_t last, int64_t count, const Columns& columns, const Shared& shared,
              const Own& own) const {
    const Products<T>& products = products_[part.products];
    const int64_t n = base(part, last, count);
    const ProductMemory<T>& memory = own.memory.of(part.products);
    for (int g : {0, 1}) products.multiply_by(g, columns, n, shared.h, made(own, g, columns), memory);
    for_rows(part, last, count, [&](int64_t kept, int64_t i, int64_t t) {
      const int64_t row = run_.row(part, i, t), at = kept * part.features + columns.from;
      const T* x_r = run_.read_gate(part, 0, row, columns, own.rows[0]);
      const T* x_z = run_.read_gate(part, 1, row, columns, own.rows[1]);
      const T *u_r = made(own, 0, columns) + kept * columns.row, *u_z = made(own, 1, columns) + kept * columns.row;
      for_vectors<T>(columns.count, [&](int64_t j, auto&& get, auto&& put) __attribute__((always_inline)) {
        const Vec<T> r = sigmoid<T>(get(x_r + j) + get(u_r + j));
        put(shared.r + at + j, r);
        put(shared.z + at + j, sigmoid<T>(get(x_z + j) + get(u_z + j)));
        put(shared.to_r + at + j, r * get(shared.h + at + j));
      });
      held_.write(columns.count, shared.to_r + at, beside(part, row, columns));
    });
  }

  // The gates, and what they are kept as.
  void gates(const Part& part, int64_t last, int64_t count, const Columns& columns, const Shared& shared,
             const Own& own) const {
    const Products<T>& products = products_[part.products];
    const int64_t n = base(part, last, count);
    const T* bias = run_.bias ? run_.bias + part.feature + columns.from : nullptr;
    const ProductMemory<T>& memory = own.memory.of(part.products);
    for (int g = run_.before ? 2 : 0; g < kGates; ++g)
      products.multiply_by(g, columns, n, run_.before ? shared.to_r : shared.h, made(own, g, columns), memory);
    for_rows(part, last, count, [&](int64_t kept, int64_t i, int64_t t) {
      const int64_t row = run_.row(part, i, t), at = kept * part.features + columns.from, own_at = kept * columns.row;
      T *u_n = made(own, 2, columns) + own_at, *slope = made(own, 0, columns) + own_at;
      const T* x_n = run_.read_gate(part, 2, row, columns, own.rows[2]);
      if (run_.before) {
        for_vectors<T>(columns.count, [&](int64_t j, auto&& get, auto&& put) __attribute__((always_inline)) {
          put(u_n + j, get(x_n + j) + get(u_n + j));
          put(slope + j, T(1) - get(shared.z + at + j));
        });
      } else {
        const T* x_r = run_.read_gate(part, 0, row, columns, own.rows[0]);
        const T* x_z = run_.read_gate(part, 1, row, columns, own.rows[1]);
        const T *u_r = slope, *u_z = made(own, 1, columns) + own_at;
        for_vectors<T>(columns.count, [&](int64_t j, auto&& get, auto&& put) __attribute__((always_inline)) {
          const Vec<T> r = sigmoid<T>(get(x_r + j) + get(u_r + j)), z = sigmoid<T>(get(x_z + j) + get(u_z + j));
          const Vec<T> u = bias ? get(u_n + j) + get(bias + j) : get(u_n + j);
          put(shared.r + at + j, r);
          put(shared.z + at + j, z);
          put(shared.to_r + at + j, u * r * (T(1) - r));
          put(u_n + j, get(x_n + j) + r * u);
          put(slope + j, T(1) - z);
        });
      }
    });
    through_activation(n, columns, made(own, 2, columns), made(own, 0, columns));
    for_rows(part, last, count, [&](int64_t kept, int64_t, int64_t) {
      const int64_t at = kept * part.features + columns.from, own_at = kept * columns.row;
      const T *candidate = made(own, 2, columns) + own_at, *slope = made(own, 0, columns) + own_at;
      for_vectors<T>(columns.count, [&](int64_t j, auto&& get, auto&& put) __attribute__((always_inline)) {
        const Vec<T> z = get(shared.z + at + j);
        put(shared.to_a + at + j, get(slope + j));
        put(shared.to_z + at + j, (get(shared.h + at + j) - get(candidate + j)) * z * (T(1) - z));
      });
    });
  }

  // Rows before the activation become those behind it; `grad` is multiplied by its derivative.
  void through_activation(int64_t n, const Columns& columns, T* rows, T* grad) const {
    const bool whole = columns.row == columns.count;  // else nothing has been written between rows
    const int64_t count = whole ? n * columns.count : columns.count;
    for (int64_t i = 0; i < (whole ? 1 : n); ++i, rows += columns.row, grad += columns.row) {
      run_.activation.backward(count, rows, grad, nullptr);
      run_.activation.forward(count, rows);
    }
  }

  // From the gradient of the state behind a step to those of gates, and what of it goes on past them.
  void go_into(const Part& part, int64_t last, int64_t step, int64_t kept, const Columns& columns, const Shared& shared,
               const Own& own) const {
    const Products<T>& turned = turned_[part.products];
    const int64_t t = time(part, last, step), n = run_.there(part, t), f = part.features;
    T* const gates = shared.gates[step % 2];
    for (int64_t i = 0; i < n; ++i) {
      const int64_t row = run_.row(part, i, t), at = (kept + i) * f + columns.from;
      T* state = shared.state + i * f + columns.from;
      const T* given = held_.rows(gradients_.grad_output, run_.state_at(part, row, columns), columns.count, 1, own.rows[0]);
      T* to[kGates];
      for (int g = 0; g < kGates; ++g)
        to[g] = turned.gradients_of(g, run_.most, gates) + i * turned.gradients_row() + columns.from;
      const bool ends = run_.ends(part, i, t);
      if (run_.before) {
        for_vectors<T>(columns.count, [&](int64_t j, auto&& get, auto&& put) __attribute__((always_inline)) {
          const Vec<T> g = ends ? get(given + j) : get(given + j) + get(state + j);
          put(to[1] + j, g * get(shared.to_z + at + j));
          put(to[2] + j, g * get(shared.to_a + at + j));
          put(state + j, g * get(shared.z + at + j));
        });
        write_gate(part, 2, row, columns, to[2]);
      } else {
        T* a = own.rows[1];
        for_vectors<T>(columns.count, [&](int64_t j, auto&& get, auto&& put) __attribute__((always_inline)) {
          const Vec<T> g = ends ? get(given + j) : get(given + j) + get(state + j), of_n = g * get(shared.to_a + at + j);
          put(a + j, of_n);
          put(to[0] + j, of_n * get(shared.to_r + at + j));
          put(to[1] + j, g * get(shared.to_z + at + j));
          put(to[2] + j, of_n * get(shared.r + at + j));
          put(state + j, g * get(shared.z + at + j));
        });
        write_gate(part, 0, row, columns, to[0]);
        write_gate(part, 2, row, columns, a);
        held_.write(columns.count, to[2], beside(part, row, columns));
      }
      write_gate(part, 1, row, columns, to[1]);
    }
  }

  // Reset before the product: back through the candidate's matrix to r and, as far as that is, to the state.
  void go_through_reset(const Part& part, int64_t last, int64_t step, const Columns& columns, const Shared& shared,
                        const Own& own) const {
    const Products<T>& turned = turned_[part.products];
    const int64_t t = time(part, last, step), n = run_.there(part, t), f = part.features;
    const int64_t kept = base(part, last, step);
    T* const gates = shared.gates[step % 2];
    turned.back(2, kGates, columns, n, run_.most, gates, own.made, own.turned.of(part.products));
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at = (kept + i) * f + columns.from;
      const T* made = own.made + i * columns.row;
      T* state = shared.state + i * f + columns.from;
      T* to = turned.gradients_of(0, run_.most, gates) + i * turned.gradients_row() + columns.from;
      for_vectors<T>(columns.count, [&](int64_t j, auto&& get, auto&& put) __attribute__((always_inline)) {
        const Vec<T> r = get(shared.r + at + j), of_product = get(made + j);
        put(to + j, of_product * get(shared.h + at + j) * r * (T(1) - r));
        put(state + j, get(state + j) + of_product * r);
      });
      write_gate(part, 0, run_.row(part, i, t), columns, to);
    }
  }

  // Back through the matrices to the state before a step, or to the initial one.
  void go_through(const Part& part, int64_t last, int64_t step, const Columns& columns, const Shared& shared,
                  const Own& own) const {
    const Products<T>& turned = turned_[part.products];
    const int64_t t = time(part, last, step), n = run_.there(part, t), f = part.features;
    turned.back(0, run_.before ? 2 : kGates, columns, n, run_.most, shared.gates[step % 2], own.made,
                own.turned.of(part.products));
    for (int64_t i = 0; i < n; ++i) {
      const T* made = own.made + i * columns.row;
      T *state = shared.state + i * f + columns.from, *initial = shared.initial + i * f + columns.from;
      add(columns.count, made, state);
      const bool begins = run_.begins(part, i, t);
      if (!begins && !run_.starts(run_.row(part, i, t))) continue;
      add(columns.count, state, initial);
      std::fill(state, state + columns.count, T(0));
      if (begins)
        held_.write(columns.count, initial,
                    held_.at(gradients_.initial, run_.state_at(part, run_.sequence(part, i).index, columns)));
    }
  }

  void write_gate(const Part& part, int g, int64_t row, const Columns& columns, const T* from) const {
    void* gate = gradients_.gates[gradients_.gates.size() == 1 ? 0 : g];
    held_.write(columns.count, from, held_.at(gate, run_.gate_at(part, g, row, columns)));
  }
  void* beside(const Part& part, int64_t row, const Columns& columns) const {
    return held_.at(gradients_.beside, run_.state_at(part, row, columns));
  }
};
