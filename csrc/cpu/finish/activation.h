// What follows the contractions, over rows of finished sums: the bias, and a named activation or a program.

template <class T> class Activation {
  int64_t features_ = 0;
  const T* bias_ = nullptr;          // as often as rows are taken together; null without one
  const Named<T>* named_ = nullptr;  // null for the identity and for a program
  Evaluator<T> program_;

 public:
  Activation() = default;
  Activation(const Chain& chain, const T* bias, const std::vector<T>& parameters)
      : features_(chain.out_features()), bias_(bias), program_(chain.program.get(), parameters) {
    named_ = chain.program || chain.activation == "identity" ? nullptr : find_activation<T>(chain.activation);
  }

  // Rows that are taken together: of short ones alone, most of the last vector would be empty.
  static int64_t together(int64_t features) {
    constexpr int64_t L = kLanes<T>;
    return features < 8 * L ? L * std::max<int64_t>(1, 64 / features) : 1;
  }

  explicit operator bool() const { return named_ || program_; }  // whether it is another than the identity

  // y = f(y + bias)
  void forward(int64_t rows, T* y) const {
    const auto row = named_ ? named_->forward : activate<T, activation_identity>;
    if (named_ || bias_)
      for_rows(rows, [&](int64_t at, int64_t count) { row(count, bias_, y + at); });
    if (program_) program_.forward(rows * features_, y);
  }

  bool does_nothing() const { return !named_ && !bias_ && !program_; }
  // The same of some features of a row, which y has.
  void forward_part(int64_t first, int64_t count, T* y) const {
    const auto row = named_ ? named_->forward : activate<T, activation_identity>;
    if (named_ || bias_) row(count, bias_ ? bias_ + first : nullptr, y);
    if (program_) program_.forward(count, y);
  }

  // grad *= f'(z + bias); where `sums` are given, the parameters' gradients are added to them. May write to z.
  void backward(int64_t rows, T* z, T* grad, double* sums) const {
    for_rows(rows, [&](int64_t at, int64_t count) {
      if (named_) named_->backward(count, bias_, z + at, grad + at);
      else if (bias_) activate<T, activation_identity>(count, bias_, z + at);
    });
    if (program_) program_.backward(rows * features_, z, grad, sums);
  }

 private:
  // f(first element, elements)
  template <class F> void for_rows(int64_t rows, F&& f) const {
    const int64_t size = features_ * together(features_);
    for (int64_t at = 0; at < rows * features_; at += size) f(at, std::min(size, rows * features_ - at));
  }
};
