// y = the stack of x, block by block.

template <class T>
void run_forward(const Problem& problem, Held<T> held, void* y, int threads, const Parallel& parallel) {
  const Run<T> run(problem, held, false, threads);
  const int64_t rows_size = run.widest * run.samples, last = int64_t(run.layers.size()) - 1;
  const auto run_task = [&](int64_t task) {
    T* rows[2];
    Workers<T> workers;
    std::vector<States<T>> states;
    in_memory<T>(Purpose::block, [&](auto&& take) {
      rows[0] = take(rows_size), rows[1] = take(rows_size);
      workers.take(run.workers, run.scratch_size, take);
      states.clear();
      for (const Layer<T>& layer : run.layers) states.push_back(layer.make_states(run.samples, false, take, run.places));
    });
    run.for_blocks(task, [&](int64_t first, int64_t count) {
      const T* x = run.read_x(first, count, rows[1], workers);
      for (int64_t i = 0; i <= last; ++i) {
        T* to = i < last ? rows[i % 2] : held.output_rows(y, first, run.out, rows[i % 2]);
        run.layers[i].forward(count, x, to, states[i], workers);
        x = to;
      }
      held.write_rows(y, first, count, run.out, x, workers);
      workers.finish(parallel);
    });
  };
  run.tasks == 1 ? run_task(0) : parallel(run.tasks, run_task);
}
