// What follows the contractions, over rows of finished sums: the bias, and a named activation or a program.

template <class T> class Activation {
  int64_t features_ = 0;
  const T* bias_ = nullptr;          // null without one
  const Named<T>* named_ = nullptr;  // null for the identity and for a program
  Evaluator<T> program_;

 public:
  Activation() = default;
  Activation(const Chain& chain, const T* bias, const std::vector<T>& parameters)
      : features_(chain.out_features()), bias_(bias), program_(chain.program.get(), parameters) {
    named_ = chain.program || chain.activation == "identity" ? nullptr : find_activation<T>(chain.activation);
  }

  explicit operator bool() const { return named_ || program_; }  // whether it is another than the identity

  // y = f(y + bias)
  void forward(int64_t rows, T* y) const {
    const auto row = named_ ? named_->forward : activate<T, activation_identity>;
    if (named_ || bias_)
      for (int64_t n = 0; n < rows; ++n) row(features_, bias_, y + n * features_);
    if (program_) program_.forward(rows * features_, y);
  }

  // grad *= f'(z + bias); where `sums` are given, the parameters' gradients are added to them. May write to z.
  void backward(int64_t rows, T* z, T* grad, double* sums) const {
    for (int64_t n = 0; n < rows; ++n) {
      if (named_) named_->backward(features_, bias_, z + n * features_, grad + n * features_);
      else if (bias_) activate<T, activation_identity>(features_, bias_, z + n * features_);
    }
    if (program_) program_.backward(rows * features_, z, grad, sums);
  }
};
