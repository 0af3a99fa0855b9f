// A layer's contractions, cut into phases: neighbours that are done together, on a part of the state that stays in cache.
//
// A contraction leaves the modes in front of its own and those behind it as they are. So a few of them, one after another,
// work on every index of the modes in front of all of them by itself, and on every index of the modes behind:
//     units     [units, features] to [units, features]: a unit is a sample with an index of the modes in front. A chunk of
//               units is done in the plain layout where it lies, or transposed, in the interleaved one.
//     columns   [units, features, inner]: where the modes behind are many, a chunk is some columns of a unit, copied together.
// Most layers have one phase, whose units are samples. More are for sizes of which one layout leaves vectors empty where
// another one does not, and for states that leave the cache. Called by layer.h.

constexpr int64_t kNearBytes = 256 << 10;          // what a chunk's states may take in the second-level cache,
constexpr int64_t kPlainBytes = 64 << 10;          // in the plain layout, where no more is gained by more samples,
constexpr int64_t kUntiedBytes = 1 << 20;          // and interleaved, where each way through untied weights serves
constexpr int64_t kUntiedSamples[] = {32, 64};     // so many samples, of
constexpr int64_t kManyBytes = 64 << 20;           // at most,
constexpr int64_t kWideBytes = 16 << 20;           // and where weights leave the cache and states need not stay
constexpr int64_t kWholeTiles = 3 * kTileRows[1];  // rows: so many divide into tiles of every height
// Cycles for a byte from beyond the second-level cache: read from end to end, in short rows that lie far apart,
// and in rows that all fall on the same few places of a cache; and for a vector that is copied, with its address.
constexpr double kFarCost = 0.1, kStridedCost = 0.14, kPagesCost = 0.25, kCopyCost = 3;
constexpr double kNever = 1e30;
constexpr int64_t kMostTogether = 8;  // contractions of a phase that is not all of a layer
constexpr size_t kMostKnown = 1024;   // ways to cut chains that a thread remembers
constexpr double kMeetCost = 3e3;     // that workers wait for each other behind a phase,
constexpr double kForkCost = 30e3;    // and that threads begin together and end together

struct Chunk {
  int64_t unit, units;      // the first one, and how many
  int64_t column, columns;  // likewise
  Block block;
};

struct Phase {
  int64_t first, last;                    // its contractions are first .. last - 1 of the layer
  int64_t slabs;                          // units of a sample
  int64_t in, out;                        // numbers of a unit
  int64_t inner;                          // columns of a unit
  bool interleaved, by_columns;
  bool far;                               // whether what it reads comes from beyond the second-level cache
  std::vector<Contraction> contractions;  // of a unit with all its columns
  int64_t units = 1, columns = 1;         // of a chunk; interleaved, units that fill vectors

  int64_t size() const { return last - first; }
  bool in_place() const { return !interleaved && !by_columns; }  // whether a chunk is done where it lies
  Contraction contraction(int64_t i, int64_t width) const {      // of `width` columns
    Contraction c = contractions[i];
    c.inner = c.inner / inner * width;
    return c;
  }

  // A chunk's units as samples of a block
  template <class T> Block block(int64_t count) const {
    return {interleaved ? whole_vectors<T>(count) : count, interleaved, count};
  }

  // Of so many samples
  int64_t chunks(int64_t samples) const { return (samples * slabs + units - 1) / units * chunks_of_unit(); }
  int64_t chunks_of_unit() const { return (inner + columns - 1) / columns; }
  template <class T> Chunk chunk(int64_t i, int64_t samples) const {
    const int64_t unit = i / chunks_of_unit() * units, column = i % chunks_of_unit() * columns;
    const int64_t count = std::min(units, samples * slabs - unit);
    return {unit, count, column, std::min(columns, inner - column), block<T>(count)};
  }

  // A chunk of rows with `size` numbers a unit: where it lies, or brought together in `local`. Units beyond those that are
  // there are zero: what is computed of them is never read.
  template <class T> const T* gather(const Chunk& chunk, int64_t size, const T* rows, T* local) const {
    rows += chunk.unit * size;
    if (in_place()) {
      if (far && contractions.front().inner > kMaxVecs * kLanes<T> && chunk.units * size * int64_t(sizeof(T)) <= kNearBytes)
        touch(chunk.units * size, rows);
      return rows;
    }
    if (by_columns) {
      move(size / inner, chunk.columns, rows + chunk.column, inner, local, chunk.columns);
      return local;
    }
    gather_some(chunk, size, 0, size, rows, local);
    return local;
  }
  // The features first .. end - 1 of rows, interleaved.
  template <class T>
  static void gather_some(const Chunk& chunk, int64_t size, int64_t first, int64_t end, const T* rows, T* local) {
    const int64_t padded = chunk.block.samples;
    transpose<T>(chunk.units, end - first, rows + first, size, local + first * padded, padded);
    if (chunk.units < padded)
      for (int64_t i = first; i < end; ++i)
        std::fill(local + i * padded + chunk.units, local + (i + 1) * padded, T(0));
  }

  // A chunk that has been made in `local`, to rows.
  template <class T> void scatter(const Chunk& chunk, int64_t size, const T* local, T* rows) const {
    rows += chunk.unit * size;
    if (by_columns) move(size / inner, chunk.columns, local, chunk.columns, rows + chunk.column, inner);
    else scatter_some(chunk, size, 0, size, local, rows);
  }
  template <class T>
  static void scatter_some(const Chunk& chunk, int64_t size, int64_t first, int64_t end, const T* local, T* rows) {
    transpose<T>(end - first, chunk.units, local + first * chunk.block.samples, chunk.block.samples, rows + first, size);
  }

 private:
  template <class T>
  static void move(int64_t count, int64_t width, const T* from, int64_t from_row, T* to, int64_t to_row) {
    constexpr int64_t L = kLanes<T>;
    for (int64_t i = 0; i < count; ++i, from += from_row, to += to_row) {
      int64_t at = 0;
      for (; at + L <= width; at += L) store(to + at, load(from + at));
      for (; at < width; ++at) to[at] = from[at];
    }
  }
};

// A way to cut a layer, and the cycles that it takes.
struct Cut {
  std::vector<Phase> phases;
  double cost;
};

// Cuts a layer's contractions so that what they cost is least: of all ways to cut, by what is cheapest for the first ones.
// `rows`: of all samples that a way is taken for, some at once. Each phase's chunks are shared by so many workers.
template <class T> class Phases {
  const std::vector<Contraction>& all_;
  const int64_t rank_, samples_, rows_, workers_;
  const bool backward_;
  static constexpr int64_t L = kLanes<T>;

 public:
  // Made once for a chain, whose contractions and number of samples come again and again.
  using Known = std::shared_ptr<const Cut>;
  static Known of(const Chain& chain, int64_t samples, int64_t rows, bool backward, int64_t workers) {
    using Key = std::vector<int64_t>;
    thread_local std::map<Key, Known> known;
    Key key{chain.rank, samples, rows, backward, workers};
    for (const Contraction& c : chain.contractions) key.insert(key.end(), {c.tied, c.outer, c.p, c.q, c.inner});
    const auto found = known.find(key);
    if (found != known.end()) return found->second;
    if (known.size() == kMostKnown) known.clear();
    const auto made = std::make_shared<const Cut>(Phases(chain, samples, rows, backward, workers).best());
    return known.emplace(std::move(key), made).first->second;
  }

 private:
  Phases(const Chain& chain, int64_t samples, int64_t rows, bool backward, int64_t workers)
      : all_(chain.contractions), rank_(chain.rank), samples_(samples), rows_(rows), workers_(workers), backward_(backward) {}

  Cut best() const {
    const int64_t n = int64_t(all_.size());
    std::vector<double> cost(n + 1, std::numeric_limits<double>::infinity());
    std::vector<Phase> last(n + 1);  // the last phase of the best way to the first contractions
    cost[0] = 0;
    for (int64_t to = 1; to <= n; ++to)
      for (int64_t from = to - 1; from >= 0; --from) {
        if (to - from > kMostTogether && (from > 0 || to < n)) continue;
        const double before = cost[from] + (from ? far_cost(in_of(all_[from])) : 0);
        for (const Phase& phase : ways(from, to))
          if (const double whole = before + cost_of(phase); whole < cost[to]) cost[to] = whole, last[to] = phase;
      }
    std::vector<Phase> found;
    for (int64_t to = n; to > 0; to = found.back().first) found.push_back(last[to]);
    std::reverse(found.begin(), found.end());
    return {found, cost[n]};
  }

  // What a state costs that does not stay in cache from one phase to the next, among those of the other terms.
  double far_cost(int64_t elements) const {
    const double bytes = double(elements * int64_t(sizeof(T)));
    if (double(rank_) * bytes <= double(kNearBytes)) return 0;
    return 2 * kFarCost * bytes * double(samples_) / double(workers_);  // written and read
  }

  std::vector<Phase> ways(int64_t from, int64_t to) const {
    int64_t slabs = all_[from].outer, inner = all_[from].inner;
    bool tied = true;
    for (int64_t i = from; i < to; ++i) {
      tied &= all_[i].tied;
      slabs = std::min(slabs, all_[i].outer), inner = std::min(inner, all_[i].inner);
    }
    if (!tied) slabs = inner = 1;
    std::vector<Phase> found{make(from, to, slabs, inner, false, false)};
    for (int64_t most : kUntiedSamples) {
      found.push_back(make(from, to, slabs, inner, true, false, most));
      if (tied) break;
    }
    const bool large = in_of(all_[from]) / slabs * int64_t(sizeof(T)) > kNearBytes;
    if ((to - from > 1 || large) && inner >= 8 * L) found.push_back(make(from, to, slabs, inner, false, true));
    return found;
  }

  // `most`: samples of a chunk, interleaved and untied
  Phase make(int64_t from, int64_t to, int64_t slabs, int64_t inner, bool interleaved, bool by_columns,
             int64_t most = 1) const {
    const int64_t in = in_of(all_[from]) / slabs, out = out_of(all_[to - 1]) / slabs;
    Phase phase{from, to, slabs, in, out, inner, interleaved, by_columns, false, {}};
    phase.far = in_of(all_[from]) * (from ? 1 : samples_) * int64_t(sizeof(T)) > kNearBytes;
    int64_t states = phase.in;  // numbers of a unit
    for (int64_t i = from; i < to; ++i) {
      Contraction c = all_[i];
      c.outer /= slabs;
      phase.contractions.push_back(c);
      states += out_of(c);
    }
    if (backward_) states += phase.in + phase.out;
    const int64_t bytes = states * int64_t(sizeof(T)), units = (samples_ * slabs + workers_ - 1) / workers_;
    phase.columns = inner;
    if (by_columns) {
      const int64_t share = samples_ * slabs < workers_ ? whole_vectors<T>((inner + workers_ - 1) / workers_) : inner;
      const int64_t fitting = std::min(kNearBytes / (bytes / inner) / L * L, share);
      phase.columns = std::clamp<int64_t>(fitting, 4 * L, inner);
    } else if (interleaved && phase.contractions.front().tied) {
      const int64_t fitting = kNearBytes / bytes / L * L;
      phase.units = std::min(std::clamp<int64_t>(fitting, L, 4 * L), whole_vectors<T>(units));
    } else if (interleaved) {
      most = std::clamp<int64_t>(kManyBytes / bytes, L, most);
      const int64_t chunks = (units + most - 1) / most;
      phase.units = whole_vectors<T>((units + chunks - 1) / chunks);
    } else {
      const bool tied = phase.contractions.front().tied;
      const int64_t least = fewest(phase, bytes), more = std::max(kPlainBytes / bytes, least);
      const int64_t fitting = tied ? more / least * least : kWideBytes / bytes;
      phase.units = std::clamp<int64_t>(fitting, 1, units);
    }
    return phase;
  }

  // Units enough to fill register tiles of any height in the plain layout, where rows of a state are those of a tile, and to
  // pay for a way through weights that come from afar.
  static int64_t fewest(const Phase& phase, int64_t bytes) {
    int64_t units = 1;
    for (const Contraction& c : phase.contractions) {
      if (c.inner > 1) continue;
      const bool wide = c.weight_size() * int64_t(sizeof(T)) > kPlainBytes;
      const int64_t rows = wide ? std::clamp<int64_t>(kWideBytes / bytes * c.outer, kWholeTiles, 240) : kWholeTiles;
      units = std::max(units, (rows + c.outer - 1) / c.outer);
    }
    return units;
  }

  // Of all samples: of the chunks that are full, and of the last units; of the worker who has most of them. And of weights
  // that are transposed before.
  double cost_of(const Phase& phase) const {
    const int64_t all = samples_ * phase.slabs, rest = all % phase.units;
    double cost = double(all / phase.units) * cost_of(phase, phase.units), prepared = 0;
    if (rest) cost += cost_of(phase, rest);
    cost *= double(phase.chunks_of_unit());
    for (int64_t i = 0; i < phase.size(); ++i) {
      const Contraction& c = phase.contractions[i];
      if (needs_transposed_weight<T>(c, phase.interleaved, rows_ * phase.slabs)) prepared += transpose_cost<T>(c.q, c.p);
    }
    const int64_t chunks = phase.chunks(samples_);
    if (workers_ > 1) cost = cost * double((chunks + workers_ - 1) / workers_) / double(chunks) + kMeetCost;
    return cost + prepared * double(samples_) / double(rows_);
  }

  // Of one chunk and term. Terms share what is done of x and y.
  double cost_of(const Phase& phase, int64_t units) const {
    const int64_t in = phase.in, out = phase.out;
    const bool ends = phase.last == int64_t(all_.size());
    const double of_in = phase.first ? 1 : 1 / double(rank_), of_out = ends ? 1 / double(rank_) : 1;
    double cost = kCallCost, inside = 0, weights = 0;
    for (int64_t i = 0; i < phase.size(); ++i) {
      const Contraction c = phase.contraction(i, phase.columns);
      // For gradients all phases but the last make what the next one reads, and each makes its own states.
      const int64_t times = backward_ ? !ends + (i + 1 < phase.size()) : 1;
      const bool dotted = !needs_transposed_weight<T>(c, phase.interleaved, rows_ * phase.slabs);
      cost += double(times) * contract_cost<T>(c, units, phase.interleaved, dotted);
      if (backward_) cost += gradients_cost<T>(c, units, phase.interleaved);
      if (i + 1 < phase.size()) inside += double(out_of(c));
      if (!c.tied) weights += double(c.weight_size());
    }
    if (phase.interleaved) {
      const double states = inside + double(in + out) * (backward_ ? 2 : 1);
      if (weights == 0 && states * double(L * sizeof(T)) > 2 * kNearBytes) return kNever;
      const double ways = backward_ && !ends ? 2 : 1;
      cost += transpose_cost<T>(units, in) * of_in * (backward_ ? ways + 1 : 1) + transpose_cost<T>(units, out) * of_out * ways;
      inside += double(in + out);
    } else if (phase.by_columns) {
      cost += kCopyCost * (double(in) * of_in + double(out) * of_out) / double(phase.inner) * vectors<T>(phase.columns) *
              (backward_ ? 1.5 : 1);
    }
    const double bytes = inside * double(units * int64_t(sizeof(T)));
    const double again = (double(in) * (1 - of_in) * (backward_ ? 4 : 1) + double(out) * (1 - of_out) * 2) * double(units) *
                         double(sizeof(T));  // x and y of a chunk, for each term but the first
    if (again > double(2 * kNearBytes)) cost += kFarCost * again;
    if (weights > 0) cost += 2 * kFarCost * std::max(0.0, bytes - double(kUntiedBytes));
    else if (bytes > double(2 * kNearBytes)) cost += 2 * kFarCost * bytes;
    const double read = double(in * units / phase.inner * phase.columns) * double(sizeof(T)) * (backward_ ? 2 : 1);
    if (phase.far && phase.in_place() && read > double(kNearBytes)) {
      const Contraction& c = phase.contractions.front();
      const bool pages = c.p > 8 && c.inner * int64_t(sizeof(T)) % 4096 == 0;
      cost += ((pages ? kPagesCost : kStridedCost) - kFarCost) * read;
    }
    weights *= double(sizeof(T));
    if (weights > double(kNearBytes)) cost += kFarCost * weights * (backward_ ? 3 : 1);
    return cost;
  }
};
