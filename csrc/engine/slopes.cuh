// The gradient of what an activation is given, where no product makes that at the same time: y = f'(x) grad_y, element by
// element. What fills a thread's EACH pieces of 16 bytes, of either, is on its way at once.
//
// Pass:  Element, Gradient (of(x, g) is f'(x) g), GRAD_Y (the parameter that it is), FEATURES, THREADS, EACH
#pragma once
#include "params.cuh"
#include "pointwise.cuh"

template <class Pass> struct Slopes {
  using Element = typename Pass::Element;
  static constexpr int kPiece = 16 / sizeof(Element), EACH = Pass::EACH;
  struct __align__(16) Piece { Element x[kPiece]; };

  const Params& params;
  DEVICE Slopes(const Params& given) : params(given) {}

  static DEVICE Element of(Element x, Element g) { return narrow<Element>(Pass::Gradient::of(widen(x), widen(g))); }

  DEVICE void run() const {
    const i64 count = params.batch * Pass::FEATURES;
    const i64 first = (i64(blockIdx.x) * (EACH * Pass::THREADS) + threadIdx.x) * kPiece;
    const Element *x = static_cast<const Element*>(params.x) + first;
    const Element *grad = static_cast<const Element*>(params.weights[Pass::GRAD_Y]) + first;
    Element* y = static_cast<Element*>(params.y) + first;
    u32 of_x[EACH][4], of_grad[EACH][4];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int at = i * Pass::THREADS * kPiece;
      load_global(x + at, of_x[i], first + at + kPiece <= count);
      load_global(grad + at, of_grad[i], first + at + kPiece <= count);
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int at = i * Pass::THREADS * kPiece;
      if (first + at + kPiece <= count) {
        const auto *from = reinterpret_cast<const Element*>(of_x[i]), *behind = reinterpret_cast<const Element*>(of_grad[i]);
        Piece made;
#pragma unroll
        for (int e = 0; e < kPiece; ++e) made.x[e] = of(from[e], behind[e]);
        store_global<16>(y + at, reinterpret_cast<const u32*>(&made));
      } else {
        for (int e = at; first + e < count; ++e) store_global(y + e, of(x[e], grad[e]));
      }
    }
  }
};
