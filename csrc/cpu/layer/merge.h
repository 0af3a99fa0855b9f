// Small neighbouring factors become one: (A ⊗ B) x has more multiply-adds than A (B x), but fills whole vectors and
// reads and writes the state once instead of twice. Pays up to 16 x 16 (docs/kernels/cpu.md).

constexpr int64_t kLargestMerged = 16;

// A contraction of the merged chain and the ones it stands for, in their order: the last mode's comes first.
struct Group {
  Contraction whole;
  std::vector<Contraction> parts;
};

// Whether products of up to four such weights neither leave the range nor turn infinity times zero into NaN.
template <class T> bool is_tame(int64_t n, const T* weight) {
  const T most = std::ldexp(T(1), std::numeric_limits<T>::max_exponent / 4 - 1);
  auto tame = [&](T w) { return w == 0 || (std::abs(w) >= 1 / most && std::abs(w) <= most); };
  return std::all_of(weight, weight + n, tame);
}

// tame(c): whether the weight of contraction c may be merged.
template <class F> std::vector<Group> merge(const Chain& chain, F&& tame) {
  std::vector<Group> groups;
  for (const Contraction& c : chain.contractions) {
    if (!groups.empty()) {
      Contraction& w = groups.back().whole;
      const bool neighbours = c.tied && w.tied && c.outer * c.p == w.outer && c.inner == w.q * w.inner;
      const bool small = c.p * w.p <= kLargestMerged && c.q * w.q <= kLargestMerged && groups.back().parts.size() < 4;
      if (neighbours && small && tame(c) && tame(groups.back().parts.back())) {
        w = {true, 0, c.outer, c.p * w.p, c.q * w.q, w.inner};
        groups.back().parts.push_back(c);
        continue;
      }
    }
    groups.push_back({c, {c}});
  }
  return groups;
}

// f(entry of the merged weight, the entry of each part that is a factor of it)
template <class F> void for_entries(const Group& group, F&& f) {
  std::vector<int64_t> entries(group.parts.size());
  for (int64_t q = 0; q < group.whole.q; ++q)
    for (int64_t p = 0; p < group.whole.p; ++p) {
      int64_t rest_q = q, rest_p = p;
      for (size_t i = 0; i < entries.size(); ++i) {
        const Contraction& part = group.parts[i];
        entries[i] = rest_q % part.q * part.p + rest_p % part.p;
        rest_q /= part.q, rest_p /= part.p;
      }
      f(q * group.whole.p + p, entries);
    }
}

// The merged weight, from the weights of the parts.
template <class T> void merge_weights(const Group& group, const std::vector<const T*>& weights, T* merged) {
  for_entries(group, [&](int64_t at, const std::vector<int64_t>& entries) {
    merged[at] = 1;
    for (size_t i = 0; i < entries.size(); ++i) merged[at] *= weights[i][entries[i]];
  });
}

// The gradient of one part, from that of the merged weight.
template <class T>
void part_gradient(const Group& group, const std::vector<const T*>& weights, size_t part, const T* merged, T* grad) {
  std::fill(grad, grad + group.parts[part].weight_size(), T(0));
  for_entries(group, [&](int64_t at, const std::vector<int64_t>& entries) {
    T others = merged[at];
    for (size_t i = 0; i < entries.size(); ++i)
      if (i != part) others *= weights[i][entries[i]];
    grad[entries[part]] += others;
  });
}
