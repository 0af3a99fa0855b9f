// Dense layers one behind another on sm_90a, with more weights than a block can hold: y = act(x W' + b) for each, 64 samples
// at a time for a warpgroup.
//
// A warpgroup's states lie in shared memory, in slabs of 128 bytes of each row: its products read them there, and what becomes
// of the sums is written back, so that warpgroups never meet. Biases stay in shared memory. Weights go by, for each round of
// samples again, through a ring of SLOTS chunks, which four warps fill: N rows of one slab, or of as many as a slot holds. Or
// they lie in memory as in a slot, IN_CHUNKS (weight_chunks.cuh), as those of 32 bits do, which have been rounded there, and
// those that stay as they are: a thread has the copy engine bring them.
// They fetch the next x as well, which has a place of its own. In which order a chunk has rows is free: they are so dealt that
// lanes write states without meeting in a bank, and the last layer's results by 16 bytes of a row. States that are wanted in
// memory, too, go there while products read them: with each chunk the slabs that it is multiplied by.
//
// Results whose rows 16 bytes do not divide lie in shared memory first, a warp's 16 rows one behind another as in memory, from where
// they leave by whole sectors of L2: by pieces of a row they would be parts of sectors, which cost as much as whole ones.
//
// Pass: Element, GROUPS (warpgroups), SLOTS, SLOT_ROWS (of 128 bytes), CHUNKS (of all layers), STATE_BYTES (of a warpgroup),
//       IN_CHUNKS, CHUNKS_BEFORE (the kernel before makes these, and lets this one start meanwhile), states_at, results_at, barriers_at (bytes), RESULTS (whether results go that way), MORE and FEWER (registers of a thread who multiplies, or copies; 0: as they are), First,
//       load_weights(c), layers(c, cursor, round) and weights(c, cursor), which call each layer, SCALED (floats in params.sums before
//       what a prepared weight is multiplied by and what takes it back, or -1).
// Layer: P, Q, K (in whole steps), N, PARTS (chunks that are summed side by side), PASSES (of PARTS N columns), SLABS (of a
//        chunk), WEIGHT, BIAS (parameters; -1 without a bias), FIRST, LAST, IN_PLACE (its results lie where its x was), from,
//        to (in a warpgroup's states), bias_at (bytes), STATE (parameter: where in memory its x is wanted; -1: nowhere),
//        chunks_at (bytes: where in params.sums its chunks begin, if they are there), Activation. Of layers that are all as one is, `number` come before.
#pragma once
#include "types/params.cuh"
#include "finish/pointwise.cuh"
#include "kernels/stack/weight_chunks.cuh"
#include "move/ring.cuh"

template <class Pass> struct DenseStreamed {
  using Element = typename Pass::Element;
  using First = typename Pass::First;
  static constexpr int kSize = sizeof(Element), kSlab = 128 / kSize, kStep = 32 / kSize;
  static constexpr bool kInChunks = Pass::IN_CHUNKS;
  static constexpr int kLoaders = kInChunks ? 64 : 128;  // who copy rows
  static constexpr int kConsumers = Pass::GROUPS * 128, kSlotBytes = Pass::SLOT_ROWS * 128;
  static constexpr int kXSlabs = ceil_div(First::K, kSlab);
  static constexpr int kMeeting = Pass::GROUPS + 2;                    // of the producers, behind those of warpgroups
  template <class L> static constexpr int kColumns = L::PARTS * L::N;  // of a pass
  template <class L> using Sums = float[L::PARTS][L::N / 2];
  template <class L>
  static constexpr Dealt kDealt = L::LAST ? Dealt::by_16_bytes : kSize == 4 ? Dealt::by_words : Dealt::in_order;

  const Params& params;
  const int warpgroup, thread, g, t;
  const u32 memory;
  const Ring<Pass::SLOTS, kSlotBytes> ring;
  const Barriers<1> of_x;  // full in chunks only: or that x is there is said with the first chunk
  const u32 states;           // this warpgroup's

  DEVICE DenseStreamed(const Params& given)
      : params(given), warpgroup(uniform(threadIdx.x / 128)), thread(threadIdx.x % 128), g(threadIdx.x % 32 / 4),
        t(threadIdx.x % 4), memory(shared_address(shared_memory)), ring(memory, memory + Pass::barriers_at),
        of_x(ring.full(2 * Pass::SLOTS)),
        states(memory + Pass::states_at + warpgroup * Pass::STATE_BYTES) {}

  // The first sample that a warpgroup has in a round; in the last round the first warpgroup still has some.
  static DEVICE i64 sample_of(int round, int group) {
    return ((i64(round) * Pass::GROUPS + group) * gridDim.x + blockIdx.x) * 64;
  }

  // With the slot before
  struct Cursor : RingCursor<Pass::SLOTS> {
    int last = 0;
    DEVICE Cursor(u32 phase) : RingCursor<Pass::SLOTS>{0, phase} {}
    DEVICE void next() {
      last = this->slot;
      RingCursor<Pass::SLOTS>::next();
    }
  };

  // What a weight is multiplied by, and what takes it back.
  DEVICE float scale(int which) const { return static_cast<const float*>(params.sums)[Pass::SCALED + which]; }

  // The bias, by one warp, while others load those of other layers
  template <class L> DEVICE void load_layer() const {
    if constexpr (L::BIAS >= 0) {
      if (threadIdx.x / 32 != L::BIAS / 2 % (Pass::GROUPS * 4)) return;
      constexpr int kAll = L::PASSES * kColumns<L>, kTogether = 8;  // on their way to a thread
      const Element* bias = static_cast<const Element*>(params.weights[L::BIAS]);
      ROLL for (int first = threadIdx.x % 32; first < kAll; first += kTogether * 32) {
        Element x[kTogether];
        UNROLL for (int i = 0; i < kTogether; ++i) {
          const int q = dealt_row<kSize, kDealt<L>>(first + i * 32);
          x[i] = q < L::Q ? bias[q] : Element{};
        }
        UNROLL for (int i = 0; i < kTogether; ++i) {
          const int n = first + i * 32, at = n / 16 * 16 + n % 8 / 2 * 4 + n / 8 % 2 * 2 + n % 2;  // as in dense.cuh
          if (n < kAll) store_shared(memory + L::bias_at + at * 4, Pass::SCALED < 0 ? widen(x[i]) : widen(x[i]) * scale(0));
        }
      }
    }
  }

  // Producers

  static constexpr int width(int row) { return row % 16 == 0 ? 16 : row % 8 == 0 ? 8 : row % 4 == 0 ? 4 : 2; }
  template <int P> static constexpr int kWide = width(P * kSize);  // of a copy
  static constexpr int lanes(int copies) { return copies > 1 ? 2 * lanes((copies + 1) / 2) : 1; }
  static constexpr int least(int x, int y) { return x < y ? x : y; }

  // HEIGHT rows of a slab, of a matrix whose rows have P elements: `from` is where it begins, `rows` and `columns` are left of
  // the matrix from there on. What lies outside is zero.
  template <Dealt DEALT, int P, int HEIGHT>
  DEVICE void copy_slab(u32 to, const Element* from, i64 rows, int columns) const {
    constexpr int kLanes = lanes(least(128, round_up(P * kSize, 32)) / kWide<P>), kDown = kLoaders / kLanes;
    constexpr int kCount = least(kWide<P> == 2 ? 32 : 16, ceil_div(HEIGHT, kDown)), kTogether = kCount * kDown;
    static_assert(HEIGHT <= kTogether || kTogether % 32 == 0, "rows of what follows are dealt like the first ones");
    const int loader = thread % kLoaders, r = loader / kLanes, at = loader % kLanes * kWide<P>, first_row = dealt_row<kSize, DEALT>(r);
    const bool inside = at / kSize < columns;
    from += i64(first_row) * P + at / kSize, rows -= first_row;
    to += swizzled(r, at / 16) + at % 16;
    ROLL for (int first = 0; first < HEIGHT; first += kTogether) {
      u16 x[kWide<P> == 2 ? kCount : 1];
      UNROLL for (int i = 0; i < kCount; ++i) {
        const int down = i * kDown, row = dealt_row<kSize, DEALT>(down);
        const bool present = inside && row < rows;
        if constexpr (kWide<P> == 2)
          x[i] = present ? from[row * P].bits : u16(0);
        else if (HEIGHT % kTogether == 0 || first + down + r < HEIGHT)
          copy_async<kWide<P>>((to ^ (down & 7) << 4) + down * 128, from + row * P, present);
      }
      if constexpr (kWide<P> == 2)
        UNROLL for (int i = 0; i < kCount; ++i)
          if (HEIGHT % kTogether == 0 || first + i * kDown + r < HEIGHT)
            store_shared((to ^ (i * kDown & 7) << 4) + i * kDown * 128, x[i]);
      from += i64(kTogether) * P, rows -= kTogether, to += kTogether * 128;
    }
  }
  // All x's, by those who copied them
  DEVICE void round_x() const {
    constexpr int kTogether = 4, kBytes = kLoaders * 16;
    ROLL for (int i = 0; i < Pass::GROUPS; ++i) {
      const u32 from = memory + Pass::states_at + i * Pass::STATE_BYTES + thread % kLoaders * 16;
      ROLL for (int at = 0; at < kXSlabs * 8192; at += kTogether * kBytes) {
        u32 x[kTogether][4];
        UNROLL for (int j = 0; j < kTogether; ++j) load_u32x4(from + at + j * kBytes, x[j]);
        UNROLL for (int j = 0; j < kTogether; ++j) {
          UNROLL for (u32& word : x[j]) word = tf32_of(word);
          store_u32x4(from + at + j * kBytes, x[j]);
        }
      }
    }
  }

  // One thread's: chunks that lie in memory as in a slot
  template <class L> DEVICE void stream_chunks(Cursor& cursor, int number) const {
    constexpr int kSlabs = ceil_div(L::K, kSlab), kSlabBytes = L::N * 128;
    constexpr i64 kBytes = i64(L::PASSES) * L::PARTS * kSlabs * kSlabBytes;
    const char* from = static_cast<const char*>(params.sums) + L::chunks_at + number * kBytes;
    ROLL for (int pass = 0; pass < L::PASSES; ++pass)
      ROLL for (int slab = 0; slab < kSlabs; slab += L::SLABS)
        ROLL for (int part = 0; part < L::PARTS; ++part) {
          const int bytes = least(L::SLABS, kSlabs - slab) * kSlabBytes;
          load_run(ring.at(cursor.slot), from, bytes, ring.begin_to_fill(cursor, bytes));
          from += bytes;
          cursor.next();
        }
  }
  template <class L> DEVICE void stream(Cursor& cursor, int number = 0) const {
    static_assert(L::PASSES == 1 || kColumns<L> % kSlab == 0, "passes have slabs of their own");
    if constexpr (kInChunks) {
      stream_chunks<L>(cursor, number);
    } else {
      constexpr int kTensors = L::BIAS < 0 ? 1 : 2;
      const Element* weight = static_cast<const Element*>(params.weights[L::WEIGHT + number * kTensors]);
      ROLL for (int pass = 0; pass < L::PASSES; ++pass)
        ROLL for (int k = 0; k < L::K; k += kSlab * L::SLABS)
          ROLL for (int part = 0; part < L::PARTS; ++part) {
            const int q = pass * kColumns<L> + part * L::N;
            ring.wait_until_empty(cursor);
            ROLL for (int s = 0; s < L::SLABS && k + s * kSlab < L::K; ++s) {
              const int p = k + s * kSlab;
              const u32 to = ring.at(cursor.slot) + s * (L::N * 128);
              copy_slab<kDealt<L>, L::P, L::N>(to, weight + i64(q) * L::P + p, L::Q - q, L::P - p);
            }
            if constexpr (kWide<L::P> > 2)
              arrive_with_copies(ring.full(cursor.slot));
            else
              arrive(ring.full(cursor.slot));
            cursor.next();
          }
    }
  }
  // Once the x before has been read
  DEVICE void load_x(int round) const {
    constexpr int P = First::P;
    of_x.wait_until_empty({0, u32(round & 1 ^ 1)});
    ROLL for (int i = 0; i < Pass::GROUPS; ++i) {
      const i64 sample = sample_of(round, i);
      ROLL for (int s = 0; s < kXSlabs; ++s) {
        const u32 to = memory + Pass::states_at + i * Pass::STATE_BYTES + s * 8192;
        const Element* from = static_cast<const Element*>(params.x) + sample * P + s * kSlab;
        copy_slab<Dealt::in_order, P, 64>(to, from, params.batch - sample, P - s * kSlab);
      }
    }
  }
  DEVICE void produce() const {
    Cursor cursor(1);
    if constexpr (!kInChunks) {
      for (int round = 0; sample_of(round, 0) < params.batch; ++round) {
        load_x(round);
        Pass::weights(*this, cursor);
      }
    } else if (thread >= kLoaders) {
      for (int round = 0; sample_of(round, 0) < params.batch; ++round) {
        load_x(round);
        commit_copies();
        wait_for_copies<0>();
        if constexpr (kSize == 4) {
          sync_group<kLoaders / 32, 16>(kMeeting);
          round_x();
        }
        arrive(of_x.full(0));
      }
    } else if (thread == 0) {
      if constexpr (Pass::CHUNKS_BEFORE) wait_for_kernel_before();
      for (int round = 0; sample_of(round, 0) < params.batch; ++round) Pass::weights(*this, cursor);
    }
  }

  // Consumers

  DEVICE void meet() const { sync_warpgroup(warpgroup); }

  // What sums begin with: the bias, or zeros
  template <class L> DEVICE void begin(Sums<L>& z, u32 bias) const {
    UNROLL for (int part = 0; part < L::PARTS; ++part) {
      UNROLL for (int n = 0; n < L::N / 8; n += 2) {
        u32 words[4] = {};  // of this lane's columns in two tiles of 8
        if constexpr (L::BIAS >= 0) load_u32x4(bias + (part * L::N + n * 8) * 4 + t * 16, words);
        UNROLL for (int i = 0; i < 8; ++i) z[part][n * 4 + i] = __uint_as_float(words[i / 4 * 2 + i % 2]);
      }
      touch(z[part]);
    }
  }
  // The products of a chunk, STEPS of them; `going` are those before.
  template <class L, int STEPS> DEVICE void take(float (&z)[L::N / 2], Cursor& cursor, u64 left, bool going) const {
    const int last = cursor.last;
    ring.wait_until_full(cursor);
    if constexpr (!kInChunks) fence_copy_engine();
    const u64 right = operand(ring.at(cursor.slot));
    cursor.next();
    ask_for_products<STEPS>([&](int s) {
      Wgmma<Element, L::N>::multiply(z, left + (s / 4 * 512 + s % 4 * 2), right + (s / 4 * (L::N * 8) + s % 4 * 2));
    });
    if (going) {
      wait_for_products<1>();
      ring.release(last);
    }
  }
  // Slabs of a layer's x to memory. A warp moves rows that it wrote; lanes lie side by side along them.
  template <class L> DEVICE void save(int slab, int slabs, int round, Element* to) const {
    if constexpr (L::STATE >= 0) {
      if (!to) return;
      constexpr int kBytes = kWide<L::P>, kLanes = least(32, 128 / kBytes), kDown = 32 / kLanes;
      constexpr int kAlong = 128 / (kLanes * kBytes), kTogether = least(16 / kDown, 8);
      int row = thread / 32 * 16 + thread % 32 / kLanes, lane = thread % kLanes;
      stay_here(row, lane);  // or its places are kept through all products
      const i64 sample = sample_of(round, warpgroup) + row;
      const int rows = int(min(i64(16), params.batch - sample));
      ROLL for (int s = slab; s < slab + slabs; ++s)
        ROLL for (int j = 0; j < kAlong; ++j) {
          const int at = (j * kLanes + lane) * kBytes, feature = s * kSlab + at / kSize;
          const u32 from = states + L::from + s * 8192 + swizzled(row, at / 16) + at % 16;
          Element* there = to + sample * L::P + feature;
          UNROLL for (int first = 0; first < 16; first += kTogether * kDown) {
            Words<kBytes> x[kTogether];
            UNROLL for (int i = 0; i < kTogether; ++i) {
              const int down = first + i * kDown;
              x[i] = load_words<kBytes>((from ^ (down & 7) << 4) + down * 128);
            }
            UNROLL for (int i = 0; i < kTogether; ++i) {
              const int down = first + i * kDown;
              if (down < rows && feature < L::P) store_words<kBytes>(there + down * L::P, x[i]);
            }
          }
        }
    }
  }
  // z = x W' + b, and meanwhile x to memory, if `to` is a place for it
  template <class L> DEVICE void multiply(Sums<L>& z, Cursor& cursor, int round, Element* to) const {
    constexpr int kSteps = L::SLABS * 4, kWhole = L::K / kStep / kSteps, kRest = L::K / kStep % kSteps;
    const u64 left = operand(uniform(states) + L::from);  // made anew: all layers' operands would fill the registers
    ROLL for (int c = 0; c < kWhole; ++c) {
      UNROLL for (int part = 0; part < L::PARTS; ++part)
        take<L, kSteps>(z[part], cursor, left + c * (L::SLABS * 512), c > 0 || part > 0);
      save<L>(c * L::SLABS, L::SLABS, round, to);
    }
    if constexpr (kRest > 0) {
      UNROLL for (int part = 0; part < L::PARTS; ++part)
        take<L, kRest>(z[part], cursor, left + kWhole * (L::SLABS * 512), kWhole > 0 || part > 0);
      save<L>(kWhole * L::SLABS, ceil_div(kRest, 4), round, to);
    }
    wait_for_products<0>();
    UNROLL for (int part = 0; part < L::PARTS; ++part) touch(z[part]);
    ring.release(cursor.last);
  }
  // Whether the layer has such features: an activation of 0, which padding has, may be anything.
  template <class L> static DEVICE float finished(float z, int feature) {
    const float y = L::Activation::of(z);
    return L::Q == L::PASSES * kColumns<L> || feature < L::Q ? y : 0.f;
  }
  // Sums as the next layer's x
  template <class L> DEVICE void hand_on(const Sums<L>& z, int pass) const {
    constexpr int kTileBytes = 8 * kSize;  // of 8 features
    const int before = pass * kColumns<L>;
    int row = thread / 32 * 16 + g, lane = t;
    stay_here(row, lane);  // or each layer's places are kept from round to round
    const u32 to = states + L::to + before / kSlab * 8192 + swizzled(row, 0) + lane * 4;
    UNROLL for (int n = 0; n < kColumns<L> / 8; ++n) {
      const float* tile = z[n / (L::N / 8)] + n % (L::N / 8) * 4;
      const int at = n * kTileBytes;
      UNROLL for (int h = 0; h < 2; ++h) {
        const u32 there = to + at / 128 * 8192 + h * 1024;
        if constexpr (kSize == 2) {
          const int feature = before + n * 8 + lane * 2;
          const Pair<Element> pair(finished<L>(tile[h * 2], feature), finished<L>(tile[h * 2 + 1], feature + 1));
          store_shared(there ^ (at % 128), pair.bits);
        } else {
          UNROLL for (int i = 0; i < 2; ++i) {
            const float y = finished<L>(tile[h * 2 + i], before + n * 8 + i * 4 + lane);
            store_shared(there ^ (at % 128 + i * 16), tf32_of(__float_as_uint(y)));
          }
        }
      }
    }
  }
  // Sums to memory
  template <class L> DEVICE void store(const Sums<L>& z, int round, int pass) const {
    constexpr int kEach = 16 / kSize, kTiles = kEach / 2;  // whose columns lie side by side
    constexpr int kWarpBytes = 16 * L::Q * kSize;
    const int before = pass * kColumns<L>;
    const float back = Pass::SCALED < 0 ? 1.f : scale(1);
    const i64 first = sample_of(round, warpgroup) + thread / 32 * 16;
    const u32 results = memory + Pass::results_at + threadIdx.x / 32 * kWarpBytes;
    UNROLL for (int h = 0; h < 2; ++h) {
      const i64 sample = first + g + h * 8;
      if (!Pass::RESULTS && sample >= params.batch) continue;
      Element* to = static_cast<Element*>(params.y) + sample * L::Q + before + t * kEach;
      UNROLL for (int n = 0; n < kColumns<L> / 8; n += kTiles) {
        u32 word[4];
        UNROLL for (int i = 0; i < kTiles; ++i) {
          const float* sums = z[(n + i) / (L::N / 8)] + (n + i) % (L::N / 8) * 4 + h * 2;
          const float a = L::Activation::of(Pass::SCALED < 0 ? sums[0] : sums[0] * back);
          const float b = L::Activation::of(Pass::SCALED < 0 ? sums[1] : sums[1] * back);
          if constexpr (kSize == 2)
            word[i] = Pair<Element>(a, b).bits;
          else
            word[i * 2] = __float_as_uint(a), word[i * 2 + 1] = __float_as_uint(b);
        }
        const int left = L::Q - before - t * kEach - n * 8;
        if constexpr (Pass::RESULTS)
          put_piece<kWide<L::Q>>(results + ((g + h * 8) * L::Q + t * kEach + n * 8) * kSize, left, word);
        else
          store_piece<kWide<L::Q>>(to + n * 8, left, word);
      }
    }
    if constexpr (Pass::RESULTS) {
      static_assert(L::PASSES == 1);
      const int bytes = int(min(i64(16), params.batch - first)) * (L::Q * kSize), lane = threadIdx.x % 32;
      char* to = reinterpret_cast<char*>(static_cast<Element*>(params.y) + first * L::Q);
      __syncwarp();
      UNROLL_BY(4) for (int at = lane * 16; at + 16 <= bytes; at += 512)
        store_words<16>(to + at, load_words<16>(results + at));
      const int at = bytes / 16 * 16 + lane * kSize;
      if (at < bytes) store_words<kSize>(to + at, load_words<kSize>(results + at));
      __syncwarp();
    }
  }
  template <int WIDE> static DEVICE void put_piece(u32 to, int left, const u32 (&word)[4]) {
    constexpr int kEach = WIDE == 2 ? 2 : 4;
    UNROLL for (int i = 0; i < 16 / kEach; ++i) {
      if (i * kEach / kSize >= left) continue;
      if constexpr (kEach == 2)
        store_shared(to + i * 2, u16(word[i / 2] >> i % 2 * 16));
      else
        store_shared(to + i * 4, word[i]);
    }
  }
  // 16 bytes of a row with `left` elements
  template <int WIDE> static DEVICE void store_piece(Element* to, int left, const u32 (&word)[4]) {
    if constexpr (WIDE == 2) {
      UNROLL for (int i = 0; i < 8; ++i)
        if (i < left) store_global(to + i, Element{u16(word[i / 2] >> i % 2 * 16)});
    } else {
      UNROLL for (int i = 0; i < 4; i += WIDE / 4)
        if (i * 4 / kSize < left) store_global<WIDE>(to + i * 4 / kSize, word + i);
    }
  }

  // Where in memory
  template <class L> DEVICE Element* wanted(int number) const {
    if constexpr (L::STATE < 0)
      return nullptr;
    else
      return static_cast<Element*>(const_cast<void*>(params.weights[L::STATE + number]));
  }
  template <class L> DEVICE void layer(Cursor& cursor, int round, int number = 0) const {
    constexpr int kBiasBytes = L::PASSES * kColumns<L> * 4;
    if constexpr (L::FIRST && kInChunks) of_x.wait_until_full({0, u32(round & 1)}), fence_copy_engine();
    ROLL for (int pass = 0; pass < L::PASSES; ++pass) {
      Sums<L> z;
      begin<L>(z, memory + L::bias_at + number * kBiasBytes + pass * (kColumns<L> * 4));
      multiply<L>(z, cursor, round, pass == 0 ? wanted<L>(number) : nullptr);
      if constexpr (L::FIRST)
        if (pass == L::PASSES - 1) of_x.release(0);
      if constexpr (L::LAST) {
        store<L>(z, round, pass);
      } else {
        if constexpr (L::FIRST || L::IN_PLACE) meet();  // all warps have read what was there
        hand_on<L>(z, pass);
      }
    }
    if constexpr (!L::LAST) fence_copy_engine(), meet();  // what was written is there for products of all warps
  }
  // Without samples, in the last round
  DEVICE void pass_by(Cursor& cursor) const {
    ROLL for (int i = 0; i < Pass::CHUNKS; ++i) {
      ring.wait_until_full(cursor);
      ring.release(cursor.slot);
      cursor.next();
    }
  }
  DEVICE void consume() const {
    Pass::load_weights(*this);
    sync_consumers<kConsumers>();
    Cursor cursor(0);
    for (int round = 0; sample_of(round, 0) < params.batch; ++round) {
      if (sample_of(round, warpgroup) < params.batch)
        Pass::layers(*this, cursor, round);
      else
        pass_by(cursor);
    }
  }

  DEVICE void run() const {
    ring.init(kInChunks ? 1 : 128, Pass::GROUPS * 4);
    of_x.init(kLoaders, Pass::GROUPS * 4);
    if constexpr (kInChunks) fence_copy_engine();
    __syncthreads();
    if (threadIdx.x < kConsumers)
      take_registers<Pass::MORE>(), consume();
    else
      give_registers<Pass::FEWER>(), produce();
  }
};
