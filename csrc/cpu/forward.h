// y = the stack of x, block by block.

template <class T, class S>
void run_forward(const Problem& problem, void* y, int threads, const Parallel& parallel) {
  const Run<T, S> run(problem, false, threads);
  const int64_t rows_size = run.widest * run.samples, last = int64_t(run.layers.size()) - 1;
  parallel(run.tasks, [&](int64_t task) {
    T* rows[2];
    Scratch<T> scratch;
    std::vector<States<T>> states;
    in_memory<T>(Purpose::block, [&](auto&& take) {
      rows[0] = take(rows_size), rows[1] = take(rows_size);
      scratch = {take(run.scratch_size), take(kPackedSize<T>)};
      states.clear();
      for (const Layer<T, S>& layer : run.layers) states.push_back(layer.make_states(run.samples, false, take));
    });
    run.for_blocks(task, [&](int64_t first, int64_t count) {
      const T* x = run.read_x(first, count, rows[1]);
      for (int64_t i = 0; i <= last; ++i) {
        T* to = i < last ? rows[i % 2] : output_rows<T, S>(y, first, run.out, rows[i % 2]);
        run.layers[i].forward(count, x, to, states[i], scratch);
        x = to;
      }
      write_rows<T, S>(y, first, count, run.out, x);
    });
  });
}
