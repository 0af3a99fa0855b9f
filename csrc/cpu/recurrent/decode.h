// One step of a decoder: gather, gated units layer by layer, head, and what is made of its scores (../../decoder.h).
//
// Threads share out features of a layer's state, and then rows of the head. Each number is a sum of its own, whose order
// depends on neither threads nor samples beside it, and the best token of all is the first of the best ones of each thread.

// The best score so far and its token: of equal ones the first, NaN above all, as torch.argmax has it.
template <class T> struct Best {
  T score = -std::numeric_limits<T>::infinity();
  int64_t token = -1;
  void take(T other, int64_t its_token) {
    const bool is_nan = other != other, was_nan = score != score;
    if (token < 0 || (is_nan != was_nan ? is_nan : other > score)) score = other, token = its_token;
  }
};

// What is added to a score over the temperature, as maths/noise.py has it.
template <class T> T gumbel(uint64_t seed, uint64_t step, int64_t sample, int64_t token) {
  const T uniform = T(2 * (noise_bits(seed, step, uint32_t(sample), uint32_t(token)) >> 9) + 1) * T(0x1p-24);
  return -std::log(-std::log(uniform));
}

template <class T> void draw_tokens(const Draw& problem, Held<T> held, int64_t* tokens, const Parallel& parallel) {
  parallel(problem.samples, [&](int64_t sample) {
    T* const scores = Arena<T>(Purpose::block, problem.count).take(problem.count);
    held.read(problem.count, held.at(problem.scores, sample * problem.count), scores);
    const int64_t* const places = problem.places ? problem.places + sample * problem.count : nullptr;
    Best<T> best;
    for (int64_t i = 0; i < problem.count; ++i) {
      const int64_t token = places ? places[i] : i;
      best.take(scores[i] / T(problem.temperature) + gumbel<T>(problem.seed, problem.step, sample, token), token);
    }
    tokens[sample] = best.token;
  });
}

template <class T> class DecodeStep {
  static constexpr int64_t kRows = 64;  // of a matrix, whose products are made together

  const Decode& problem_;
  const Held<T> held_;
  const Decoded& made_;
  const Decoder& decoder_;
  const int64_t batch_, hidden_, threads_;
  Activation<T> activation_;

 public:
  DecodeStep(const Decode& problem, Held<T> held, const Decoded& made, int threads)
      : problem_(problem), held_(held), made_(made), decoder_(*problem.decoder), batch_(problem.batch),
        hidden_(decoder_.hidden()), threads_(threads) {
    Chain single = decoder_.recurrence->chain;
    single.contractions = {{true, 0, 1, 1, 1, 1}};
    single.bias = false;
    activation_ = Activation<T>(single, nullptr, {});
  }

  void run(const Parallel& parallel) const {
    const int64_t own = decoder_.embedding, context = decoder_.context, of_state = batch_ * hidden_;
    T *inputs = nullptr, *before = nullptr, *biases[2] = {};
    in_memory<T>(Purpose::states, [&](auto&& take) {
      inputs = take(batch_ * std::max(own + context, hidden_)), before = take(of_state);
      for (T*& bias : biases) bias = take(kGates * hidden_);
    });
    for (int64_t b = 0; b < batch_; ++b) {
      T* const to = inputs + b * (own + context);
      held_.read(own, held_.at(problem_.embedding, problem_.tokens[b] * own), to);
      if (context) held_.read(context, held_.at(problem_.context, b * context), to + own);
    }
    for (int64_t l = 0; l < decoder_.layers; ++l) {
      const void* const state = held_.at(problem_.state, l * of_state);
      void* const to = held_.at(made_.state, l * of_state);
      const void* const* const layer = problem_.layers + l * 4;
      held_.read(of_state, state, before);
      for (int i = 0; i < 2; ++i)
        if (layer[2 + i]) held_.read(kGates * hidden_, layer[2 + i], biases[i]);
      parallel(threads_, [&](int64_t thread) {
        step(layer, decoder_.inputs(l), inputs, before, biases, to, first(thread, hidden_), first(thread + 1, hidden_));
      });
      held_.read(of_state, to, inputs);  // as the next layer and the head see it
    }
    std::vector<Best<T>> best(size_t(threads_ * batch_));
    parallel(threads_, [&](int64_t thread) {
      score(inputs, best.data() + thread * batch_, first(thread, decoder_.vocabulary), first(thread + 1, decoder_.vocabulary));
    });
    for (int64_t b = 0; b < batch_ && made_.tokens; ++b) {
      Best<T> all;
      for (int64_t thread = 0; thread < threads_; ++thread)
        if (const Best<T>& each = best[size_t(thread * batch_ + b)]; each.token >= 0) all.take(each.score, each.token);
      made_.tokens[b] = all.token;
    }
  }

 private:
  int64_t first(int64_t thread, int64_t all) const {
    const int64_t parts = (all + kRows - 1) / kRows;
    return std::min(all, parts * thread / threads_ * kRows);
  }

  // Products of x [batch, features] and `count` rows of a weight, in pieces that are the same for any batch and count.
  void multiply(const void* weight, int64_t row, int64_t count, const T* x, int64_t features, T* buffer, T* y) const {
    const T* rows = held_.rows(weight, row, count, features, buffer);
    multiply_dots<T>({batch_, count, features}, {x, features, 1}, {rows, features, 1}, {y, count, 1}, false,
                     dotted_piece<T>(2 * kRows));
  }

  // Features from .. end - 1 of the state behind a step.
  void step(const void* const* layer, int64_t features, const T* inputs, const T* before, T* const (&biases)[2], void* to,
            int64_t from, int64_t end) const {
    T *of_inputs[kGates], *of_states[kGates], *row = nullptr, *buffer = nullptr;
    in_memory<T>(Purpose::block, [&](auto&& take) {
      for (int g = 0; g < kGates; ++g) of_inputs[g] = take(batch_ * kRows), of_states[g] = take(batch_ * kRows);
      row = take(kRows);
      buffer = take(held_.converts ? kRows * std::max(features, hidden_) : 0);
    });
    const bool biased = layer[2] != nullptr;
    for (; from < end; from += kRows) {
      const int64_t count = std::min(kRows, end - from);
      for (int g = 0; g < kGates; ++g) {
        multiply(layer[0], g * hidden_ + from, count, inputs, features, buffer, of_inputs[g]);
        multiply(layer[1], g * hidden_ + from, count, before, hidden_, buffer, of_states[g]);
        for (int64_t b = 0; b < batch_ && biased; ++b) {
          add(count, biases[0] + g * hidden_ + from, of_inputs[g] + b * count);
          add(count, biases[1] + g * hidden_ + from, of_states[g] + b * count);
        }
      }
      T *const candidate = of_inputs[2], *const update = of_inputs[1];
      for_vectors<T>(batch_ * count, [&](int64_t j, auto&& get, auto&& put) __attribute__((always_inline)) {
        const Vec<T> reset = sigmoid<T>(get(of_inputs[0] + j) + get(of_states[0] + j));
        put(update + j, sigmoid<T>(get(update + j) + get(of_states[1] + j)));
        put(candidate + j, get(candidate + j) + reset * get(of_states[2] + j));
      });
      activation_.forward(batch_ * count, candidate);
      for (int64_t b = 0; b < batch_; ++b) {
        for_vectors<T>(count, [&](int64_t j, auto&& get, auto&& put) __attribute__((always_inline)) {
          const Vec<T> z = get(update + b * count + j), h = get(before + b * hidden_ + from + j);
          put(row + j, (T(1) - z) * get(candidate + b * count + j) + z * h);
        });
        held_.write(count, row, held_.at(to, b * hidden_ + from));
      }
    }
  }

  // Scores of tokens from .. end - 1.
  void score(const T* states, Best<T>* best, int64_t from, int64_t end) const {
    T *scores = nullptr, *bias = nullptr, *buffer = nullptr;
    in_memory<T>(Purpose::block, [&](auto&& take) {
      scores = take(batch_ * kRows), bias = take(kRows);
      buffer = take(held_.converts ? kRows * hidden_ : 0);
    });
    for (; from < end; from += kRows) {
      const int64_t count = std::min(kRows, end - from);
      multiply(problem_.head, from, count, states, hidden_, buffer, scores);
      if (problem_.bias) held_.read(count, held_.at(problem_.bias, from), bias);
      for (int64_t b = 0; b < batch_; ++b) {
        T* const row = scores + b * count;
        if (problem_.bias) add(count, bias, row);
        if (made_.scores) std::copy(row, row + count, static_cast<T*>(made_.scores) + b * decoder_.vocabulary + from);
        for (int64_t i = 0; i < count && decoder_.made == Decoder::drawn; ++i)
          row[i] = row[i] / T(problem_.temperature) + gumbel<T>(problem_.seed, problem_.step, b, from + i);
        for (int64_t i = 0; i < count && made_.tokens; ++i) best[b].take(row[i], from + i);
      }
    }
  }
};
