// The gradient of what an activation is given, where no product makes that at the same time, element by element: of x and
// grad_y, or of grad_y, then x, and the activation's result. What fills a thread's EACH pieces of 16 bytes, of either, is on
// its way at once.
//
// Pass:  Element, Gradient (of both), BESIDE (the parameter that the second is), FEATURES, THREADS, EACH
#pragma once
#include "types/params.cuh"
#include "finish/pointwise.cuh"

template <class Pass> struct Slopes {
  using Element = typename Pass::Element;
  static constexpr int kPiece = 16 / sizeof(Element), EACH = Pass::EACH;
  struct __align__(16) Piece { Element x[kPiece]; };

  const Params& params;
  DEVICE Slopes(const Params& given) : params(given) {}

  static DEVICE Element of(Element x, Element beside) {
    return narrow<Element>(Pass::Gradient::of(widen(x), widen(beside)));
  }

  DEVICE void run() const {
    const i64 count = params.batch * Pass::FEATURES;
    const i64 first = (i64(blockIdx.x) * (EACH * Pass::THREADS) + threadIdx.x) * kPiece;
    const Element *x = static_cast<const Element*>(params.x) + first;
    const Element* beside = static_cast<const Element*>(params.weights[Pass::BESIDE]) + first;
    Element* y = static_cast<Element*>(params.y) + first;
    u32 of_x[EACH][4], of_beside[EACH][4];
    UNROLL for (int i = 0; i < EACH; ++i) {
      const int at = i * Pass::THREADS * kPiece;
      load_global(x + at, of_x[i], first + at + kPiece <= count);
      load_global(beside + at, of_beside[i], first + at + kPiece <= count);
    }
    UNROLL for (int i = 0; i < EACH; ++i) {
      const int at = i * Pass::THREADS * kPiece;
      if (first + at + kPiece <= count) {
        const auto *from = reinterpret_cast<const Element*>(of_x[i]), *other = reinterpret_cast<const Element*>(of_beside[i]);
        Piece made;
        UNROLL for (int e = 0; e < kPiece; ++e) made.x[e] = of(from[e], other[e]);
        store_global<16>(y + at, reinterpret_cast<const u32*>(&made));
      } else {
        for (int e = at; first + e < count; ++e) store_global(y + e, of(x[e], beside[e]));
      }
    }
  }
};
