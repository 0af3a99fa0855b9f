// Both weights of a Monarch layer, rounded to what they are multiplied as, in the order in which monarch_back.cuh's blocks read
// them. kernels/monarch/monarch_backward.py writes the constants:
//
// Pass:  Math, Element, FIRST and SECOND (the parameters that weights are), K, P, L, S, RHO, THREADS
#pragma once
#include "multiply/mma.cuh"
#include "kernels/monarch/monarch_order.cuh"
#include "types/params.cuh"

template <class Pass> struct MonarchWeights {
  using Element = typename Pass::Element;
  using Order = MonarchOrder<Pass>;
  static constexpr int K = Pass::K, P = Pass::P, L = Pass::L, S = Pass::S, RHO = Pass::RHO, kPiece = Order::kPiece;
  static constexpr int kSize = Order::kSize;

  const Params& params;
  DEVICE MonarchWeights(const Params& given) : params(given) {}

  DEVICE Element weight(int which, i64 at) const {
    const Element x = static_cast<const Element*>(params.weights[which])[at];
    if constexpr (kSize == 4) return Pass::Math::rounded(x);
    else return x;
  }
  DEVICE void put(i64 at, const Element (&x)[kPiece]) const {
    store_words<16>(static_cast<char*>(params.sums) + at, *reinterpret_cast<const Words<16>*>(x));
  }
  // Pieces, neighbouring numbers or p's by neighbouring threads
  DEVICE void run() const {
    const int all = gridDim.y * Pass::THREADS, thread = blockIdx.y * Pass::THREADS + threadIdx.x;
    constexpr int kSeconds = Order::kParts * L * Order::kSlabs * 8 * 64;
    ROLL for (int j = thread; j < kSeconds; j += all) {
      const int n = j % 64, piece = j / 64 % (Order::kSlabs * 8), l = j / (Order::kSlabs * 512) % L;
      const int part = j / (Order::kSlabs * 512 * L), number = part * 64 + Order::number_of(n, l % 4);
      alignas(16) Element x[kPiece] = {};
      UNROLL for (int i = 0; i < kPiece; ++i)
        if (piece < Order::kRun) x[i] = weight(Pass::SECOND, (i64(l) * S + Order::s_at(piece * kPiece + i)) * (K * RHO) + number);
      put((i64(part) * L + l) * Order::kSecondBytes + piece / 8 * 8192 + swizzled(n, piece % 8), x);
    }
    constexpr int kOfRow = 16 / kPiece, kFirsts = Order::kParts * (L / 4) * Order::kUnits * kOfRow * P;
    ROLL for (int j = thread; j < kFirsts; j += all) {
      const int p = j % P, piece = j / P % kOfRow, unit = j / (P * kOfRow) % Order::kUnits;
      const int four = j / (P * kOfRow * Order::kUnits) % (L / 4), part = j / (P * kOfRow * Order::kUnits * (L / 4));
      alignas(16) Element x[kPiece];
      UNROLL for (int i = 0; i < kPiece; ++i) {
        const int c = piece * kPiece + i, number = (part * Order::kUnits + unit) * 4 + Order::number_at(c);
        x[i] = weight(Pass::FIRST, (i64(number) * L + four * 4 + Order::l_at(unit % 4, c)) * P + p);
      }
      put(Order::kFirstAt + (i64(part) * (L / 4) + four) * Order::kFirstBytes +
              ((unit * P + p) * kOfRow + Order::piece_of_first(p, piece)) * 16, x);
    }
  }
};
