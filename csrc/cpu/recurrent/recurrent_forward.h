// The states behind all steps of a recurrence: from step to step a product of the state with each gate's matrix, then the
// gates.

template <class T> class RecurrentForward {
  RecurrentRun<T> run_;
  std::vector<Products<T>> products_;
  void* const output_;
  const int64_t of_step_;  // phases of a step

 public:
  // What the threads of a part share: [sequences, features] each.
  struct Shared {
    T* states[2];       // before a step and behind it, in turns
    T *update, *reset;  // reset before the product: z, and r * h, which goes into it
  };
  // A thread's own.
  struct Own {
    T* made;     // products of all gates [3, sequences, columns]
    T* rows[2];  // columns as T
    PartMemory<T> memory;
  };

  RecurrentForward(const Recurrent& problem, Held<T> held, void* output, int threads)
      : run_(problem, held, threads), products_(run_.make_products(false, run_.most)), output_(output),
        of_step_(run_.before ? 2 : 1) {
    run_.prepare({&products_});
  }

  void run(const Parallel& parallel) const { run_.over_parts(parallel, *this); }

  template <class Take> Shared make_shared(Take&& take) const {
    const int64_t size = run_.most * run_.widest, more = run_.before ? size : 0;
    Shared shared;
    shared.states[0] = take(size), shared.states[1] = take(size), shared.update = take(more), shared.reset = take(more);
    return shared;
  }
  template <class Take> Own make_own(Take&& take) const {
    const int64_t width = whole_vectors<T>(run_.widest);
    Own own;
    own.made = take(kGates * run_.most * width), own.rows[0] = take(width), own.rows[1] = take(width);
    own.memory = run_.make_memory(products_, run_.most, take);
    return own;
  }

  // The first one puts the initial states in their places.
  int64_t phases(const Part& part) const { return 1 + part.steps * of_step_; }

  void run(const Part& part, const Shared& shared, const Own& own, int64_t phase, int64_t chunk) const {
    const Products<T>& products = products_[part.products];
    const int64_t step = (phase - 1) / of_step_, t = run_.time(part, step), n = run_.there(part, t);
    const Columns columns = run_.columns(products, chunk);
    if (phase == 0) return begin(part, 0, run_.there(part, run_.time(part, 0)), columns, shared.states[0]);
    const T* state = shared.states[step % 2];
    const bool last = phase % of_step_ == 0;
    const int from = last && run_.before ? 2 : 0, to = last ? kGates : 2;
    for (int g = from; g < to; ++g) {
      const T* taken = g == 2 && run_.before ? shared.reset : state;
      products.multiply_by(g, columns, n, taken, made(own, g, columns), own.memory.of(part.products));
    }
    if (!last) return reset(part, t, n, columns, shared, own, state);
    candidates(part, t, n, columns, own);
    finish(part, step, n, columns, shared, own, state, shared.states[(step + 1) % 2]);
  }

 private:
  T* made(const Own& own, int g, const Columns& columns) const { return own.made + g * run_.most * columns.row; }

  // The initial states of sequences from .. to - 1 of a part.
  void begin(const Part& part, int64_t from, int64_t to, const Columns& columns, T* states) const {
    for (int64_t i = from; i < to; ++i) run_.read_initial(part, i, columns, states + i * part.features + columns.from);
  }

  // Reset before the product: z, and r * h.
  void reset(const Part& part, int64_t t, int64_t n, const Columns& columns, const Shared& shared, const Own& own,
             const T* state) const {
    for (int64_t i = 0; i < n; ++i) {
      const int64_t row = run_.row(part, i, t), at = i * part.features + columns.from;
      const T* x_r = run_.read_gate(part, 0, row, columns, own.rows[0]);
      const T* x_z = run_.read_gate(part, 1, row, columns, own.rows[1]);
      const T *u_r = made(own, 0, columns) + i * columns.row, *u_z = made(own, 1, columns) + i * columns.row;
      for_vectors<T>(columns.count, [&](int64_t j, auto&& get, auto&& put) __attribute__((always_inline)) {
        put(shared.reset + at + j, sigmoid<T>(get(x_r + j) + get(u_r + j)) * get(state + at + j));
        put(shared.update + at + j, sigmoid<T>(get(x_z + j) + get(u_z + j)));
      });
    }
  }

  // What the candidate's activation takes, in place of its product, and behind the activation; z in place of its product.
  void candidates(const Part& part, int64_t t, int64_t n, const Columns& columns, const Own& own) const {
    T* const candidate = made(own, 2, columns);
    const T* bias = run_.bias ? run_.bias + part.feature + columns.from : nullptr;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t row = run_.row(part, i, t);
      T* u_n = candidate + i * columns.row;
      if (run_.before) {
        const T* x_n = run_.read_gate(part, 2, row, columns, own.rows[0]);
        for_vectors<T>(columns.count, [&](int64_t j, auto&& get, auto&& put) __attribute__((always_inline)) {
          put(u_n + j, get(x_n + j) + get(u_n + j));
        });
        continue;
      }
      T *u_r = made(own, 0, columns) + i * columns.row, *u_z = made(own, 1, columns) + i * columns.row;
      const T* x_z = run_.read_gate(part, 1, row, columns, own.rows[1]);
      for_vectors<T>(columns.count, [&](int64_t j, auto&& get, auto&& put) __attribute__((always_inline)) {
        put(u_z + j, sigmoid<T>(get(x_z + j) + get(u_z + j)));
      });
      const T* x_r = run_.read_gate(part, 0, row, columns, own.rows[0]);
      const T* x_n = run_.read_gate(part, 2, row, columns, own.rows[1]);
      for_vectors<T>(columns.count, [&](int64_t j, auto&& get, auto&& put) __attribute__((always_inline)) {
        const Vec<T> r = sigmoid<T>(get(x_r + j) + get(u_r + j)), u = get(u_n + j);
        put(u_n + j, get(x_n + j) + r * (bias ? u + get(bias + j) : u));
      });
    }
    activation(n, columns, candidate);
  }

  // Of the columns alone: what lies between them has not been written.
  void activation(int64_t n, const Columns& columns, T* rows) const {
    if (columns.row == columns.count) return run_.activation.forward(n * columns.count, rows);
    for (int64_t i = 0; i < n; ++i) run_.activation.forward(columns.count, rows + i * columns.row);
  }

  // The states behind a step, in `to` as the next step takes them: of sequences that it begins or that it is the first step
  // of, the initial ones.
  void finish(const Part& part, int64_t step, int64_t n, const Columns& columns, const Shared& shared, const Own& own,
              const T* state, T* to) const {
    const int64_t t = run_.time(part, step), next = run_.time(part, step + 1), more = run_.there(part, next);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at = i * part.features + columns.from;
      const T* candidate = made(own, 2, columns) + i * columns.row;
      const T* z = run_.before ? shared.update + at : made(own, 1, columns) + i * columns.row;
      for_vectors<T>(columns.count, [&](int64_t j, auto&& get, auto&& put) __attribute__((always_inline)) {
        const Vec<T> update = get(z + j);
        put(to + at + j, (T(1) - update) * get(candidate + j) + update * get(state + at + j));
      });
      const int64_t made_at = run_.state_at(part, run_.row(part, i, t), columns);
      run_.held.write(columns.count, to + at, run_.held.at(output_, made_at));
      if (i < more && run_.starts(run_.row(part, i, next))) run_.read_initial(part, i, columns, to + at);
    }
    begin(part, n, more, columns, to);
  }
};
