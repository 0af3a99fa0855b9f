// y = the stack of x, block by block.

template <class T, class S>
void run_forward(const Problem& problem, void* y, int threads, const Parallel& parallel) {
  const Run<T, S> run(problem, false, threads);
  const int64_t state = run.largest * run.samples, last = int64_t(run.layers.size()) - 1;
  parallel(run.tasks, [&](int64_t task) {
    Arena<T> arena(Purpose::block, 6 * Arena<T>::padded(state) + Arena<T>::padded(kPackedSize<T>));
    T* const rows[] = {arena.take(state), arena.take(state)};
    T *x_state = arena.take(state), *y_state = arena.take(state), *even = arena.take(state), *odd = arena.take(state);
    T* packed = arena.take(kPackedSize<T>);
    std::vector<States<T>> states;
    for (const Layer<T, S>& layer : run.layers) {
      std::vector<T*>& after = states.emplace_back(States<T>{x_state, {}}).after;
      for (int64_t i = 0; i < layer.stages; ++i) after.push_back(i % 2 ? odd : even);
      after.back() = y_state;
    }
    run.for_blocks(task, [&](int64_t first, int64_t count) {
      const T* x = read_rows<T, S>(problem.tensors[0], first, count, run.in, rows[1]);
      for (int64_t i = 0; i <= last; ++i) {
        const Layer<T, S>& layer = run.layers[i];
        T* to = i < last ? rows[i % 2] : output_rows<T, S>(y, first, run.out, rows[i % 2]);
        layer.forward(layer.block(run.samples, count), x, to, states[i], packed);
        x = to;
      }
      write_rows<T, S>(y, first, count, run.out, x);
    });
  });
}
