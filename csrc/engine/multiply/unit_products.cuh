// The products of a backward pass of two tied contractions of 16 bits, up to 64 x 64, on sm_90a, of one unit X [p0, p1] and
// G [q0, q1] by a warpgroup:
//
//     dT = A' G,  T = X B',  dA' += T G',  dB += dT' X,  dX = dT B
//
// Each matrix is one slab, which the matrix unit reads with k or with m and n contiguous; T alone is an operand in registers.
// Of a sum of products, TERMS in a pass, each term has an A and a B, with sums of its own; their dX's are added up.
#pragma once
#include "multiply/slabs.cuh"
#include "multiply/splits.cuh"

template <class Pass> struct UnitProducts : Slabs<typename Pass::Element, 64> {
  using Element = typename Pass::Element;
  using Base = Slabs<Element, 64>;
  using Base::place, Base::kSlab;
  static constexpr int P0 = Pass::P0, P1 = Pass::P1, Q0 = Pass::Q0, Q1 = Pass::Q1;
  static constexpr int kP0 = round_up(P0, 16), kP1 = round_up(P1, 16), kQ0 = round_up(Q0, 16), kQ1 = round_up(Q1, 16);
  static constexpr int kConsumers = Pass::GROUPS * 128, TERMS = Pass::TERMS;
  static_assert(P0 <= 64 && P1 <= 64 && Q0 <= 64 && Q1 <= 64 && P1 % 8 == 0 && Q1 % 8 == 0);
  static constexpr bool kScalesA = Pass::FACTOR_A < 0 && is_same<Element, f16>;
  static constexpr bool kScalesB = Pass::FACTOR_B < 0 && is_same<Element, f16>;
  using SumsA = float[kQ0 / 2];
  using SumsB = float[kP1 / 2];

  const Params& params;
  Lane lane;
  const int warpgroup;
  int first;  // the warp's first row
  const u32 a, b;
  int d_t;

  // A's lie at `weights`, B's and each group's dT behind them.
  DEVICE UnitProducts(const Params& given, u32 weights)
      : params(given), warpgroup(uniform(threadIdx.x / 128)), first(threadIdx.x / 32 % 4 * 16), a(weights), b(a + TERMS * kSlab),
        d_t(b + TERMS * kSlab + warpgroup * kSlab) {}

  // By those who multiply
  DEVICE void load_weights(float normal_a, float normal_b) const {
    UNROLL for (int term = 0; term < TERMS; ++term) {
      Base::template load_weight<Pass::FACTOR_A, Q0, P0, kConsumers>(
          params, a + term * kSlab, Pass::TERM + term,
          [&](int q, int p) { return normal_a * Pass::weight_a(params, q, p, term); });
      Base::template load_weight<Pass::FACTOR_B, Q1, P1, kConsumers>(
          params, b + term * kSlab, Pass::TERM + term,
          [&](int q, int p) { return normal_b * Pass::weight_b(params, q, p, term); });
    }
    wait_for_copies<0>();
    fence_copy_engine();
    sync_consumers<kConsumers>();
  }

  // By scale_a and scale_b sums are as large as they should be. Before dT is written again, the group has to have met.
  DEVICE void visit(u32 x, u32 g, float scale_a, float scale_b, SumsA (&d_a)[TERMS], SumsB (&d_b)[TERMS], SumsB& d_x) const {
    UNROLL for (int term = 0; term < TERMS; ++term) {
      if (term) sync_warpgroup(warpgroup);  // the term before has read dT
      visit(a + term * kSlab, b + term * kSlab, x, g, scale_a, scale_b, d_a[term], d_b[term], d_x, term > 0);
    }
    if constexpr (kScalesB) scale_sums(d_x, scale_b);
  }
  DEVICE void visit(u32 a, u32 b, u32 x, u32 g, float scale_a, float scale_b, SumsA& d_a, SumsB& d_b, SumsB& d_x, bool more) const {
    u32 t[kQ1 / 16][4];
    if constexpr (TERMS > 1) {  // registers hold the sums of all terms, and one product's beside them
      {
        float sums[kQ1 / 2];
        make_products<kQ0 / 16>(sums, [&](int s) {
          Wgmma<Element, kQ1>::multiply_turned(sums, by_column(a, 0, s), by_column(g, 0, s), s > 0);
        });
        Base::template put<P0, Q1>(d_t, sums, first, lane, 1.f);
        fence_copy_engine();
      }
      float sums[kQ1 / 2];
      make_products<kP1 / 16>(sums, [&](int s) { Wgmma<Element, kQ1>::multiply(sums, by_k(x, 0, s), by_k(b, 0, s), s > 0); });
      Base::template as_left<Q1>(t, sums, lane, {1.f, 1.f});
    } else {
      float of_d_t[kQ1 / 2], of_t[kQ1 / 2];
      ask_for_products<kQ0 / 16>([&](int s) {
        Wgmma<Element, kQ1>::multiply_turned(of_d_t, by_column(a, 0, s), by_column(g, 0, s), s > 0);
      });
      UNROLL for (int s = 0; s < kP1 / 16; ++s)
        Wgmma<Element, kQ1>::multiply(of_t, by_k(x, 0, s), by_k(b, 0, s), s > 0);
      commit_products();
      wait_for_products<1>();
      touch(of_d_t);
      if constexpr (kScalesA) scale_sums(of_d_t, scale_a);
      Base::template put<P0, Q1>(d_t, of_d_t, first, lane, 1.f);
      fence_copy_engine();
      wait_for_products<0>();
      touch(of_t);
      if constexpr (kScalesB) scale_sums(of_t, scale_b);
      Base::template as_left<Q1>(t, of_t, lane, {1.f, 1.f});
    }
    ask_for_products<kQ1 / 16>([&](int s) { Wgmma<Element, kQ0>::multiply(d_a, t[s], by_k(g, 0, s)); });
    sync_warpgroup(warpgroup);  // all of dT is there
    UNROLL for (int s = 0; s < kQ1 / 16; ++s)
      Wgmma<Element, kP1>::multiply_right_turned(d_x, by_k(d_t, 0, s), by_column(b, 0, s), more || s > 0);
    UNROLL for (int s = 0; s < kP0 / 16; ++s)
      Wgmma<Element, kP1>::multiply_turned(d_b, by_column(d_t, 0, s), by_column(x, 0, s));
    commit_products();
    wait_for_products<0>();
    touch(d_a), touch(d_b), touch(d_x);
  }
};
