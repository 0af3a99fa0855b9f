// y = activation(chain(x) + bias), block by block.

template <class T, class S>
void run_forward(const Problem& problem, void* y, int threads, const Parallel& parallel) {
  const Run<T, S> run(problem, 2, threads);
  const int64_t samples = run.block.samples, state = largest_state(run.chain) * samples;
  const bool interleaved = run.block.interleaved;
  parallel(run.tasks, [&](int64_t task) {
    Arena<T> arena(Purpose::block, 6 * Arena<T>::padded(state) + Arena<T>::padded(kPackedSize<T>));
    T *x_rows = arena.take(state), *y_rows = arena.take(state), *x_state = arena.take(state);
    T *z_state = arena.take(state), *even = arena.take(state), *odd = arena.take(state);
    T* packed = arena.take(kPackedSize<T>);
    std::vector<T*> states(run.stages);
    for (int64_t i = 0; i < run.stages; ++i) states[i] = i % 2 ? odd : even;
    run.for_blocks(task, [&](int64_t at, int64_t count) {
      const Block block{interleaved ? samples : count, interleaved, count};
      const T* x = run.read_rows(problem.x, at, count, run.in, x_rows);
      if (interleaved) run.interleave(count, run.in, x, x_state), x = x_state;
      T* rows = run.output_rows(y, at, run.out, y_rows);
      states.back() = interleaved ? z_state : rows;
      for (int64_t r = 0; r < run.chain.rank; ++r) run.contract_all(r, run.stages, block, x, states, packed);
      if (interleaved) transpose<T>(run.out, count, z_state, samples, rows, run.out);
      run.activation->forward(count, rows);
      run.write_rows(y, at, count, run.out, rows);
    });
  });
}
