// Tiles of a weight times few samples that a block takes one after the other: a FewRows or FewColumns has one in registers, with
// the next one's chunks on their way.
#pragma once
#include "multiply/mma.cuh"

constexpr int kMostOfFew = 64;  // samples, of passes that have as many as that at once
// Chunks of a weight that a thread has at once in registers, and of states: as many as divide the former
constexpr DEVICE int few_held(int chunks, int most) { return chunks > most ? round_up(chunks, 2) : chunks; }
constexpr DEVICE int few_ahead(int held, int most) {
  int ahead = most < held ? most : held;
  while (held % ahead) --ahead;
  return ahead;
}
// All chunks of a tile, and of as many samples as it has at once. What comes next, if there is more, is asked for as soon as its
// registers are free: of another tile's weight, and of its states or further samples', where to_weight() and to_states() go.
template <class Tile, class ToWeight, class ToStates>
DEVICE void few_sum(Tile& tile, typename Tile::Sums& y, bool more_weight, const ToWeight& to_weight, bool more,
                    const ToStates& to_states) {
  constexpr int kHeld = Tile::kHeld, kAhead = Tile::kAhead, kRounds = Tile::kRounds;
  ROLL for (int round = 0; round < kRounds; ++round) {
    const bool last = kRounds == 1 || round + 1 == kRounds;
    if (last && more_weight) to_weight();
    UNROLL for (int i = 0; i < kHeld; ++i) {
      tile.multiply(y, i, i % kAhead);
      const int at = round * kHeld + i;
      if (!last || more_weight) tile.ask_weight(i, last ? i : at + kHeld);
      if (last && more && i + kAhead == kHeld) to_states();
      if (last && i + kAhead >= kHeld) {
        if (more) tile.ask(i % kAhead, i + kAhead - kHeld);
      } else {
        tile.ask(i % kAhead, at + kAhead);
      }
    }
  }
}

// The first chunks of both
template <class Tile> DEVICE void few_weight(Tile& tile) { UNROLL for (int i = 0; i < Tile::kHeld; ++i) tile.ask_weight(i, i); }
template <class Tile> DEVICE void few_states(Tile& tile) { UNROLL for (int i = 0; i < Tile::kAhead; ++i) tile.ask(i, i); }
// All units of a block, so many samples of a tile each: tiles are every `stride`-th from `tile` on, samples every `step`-th from
// `first` on. to_weight(tile) and to_states(tile, first) are where the next ones begin, store(tile, first) what becomes of sums.
// Without MORE a block has one tile, and its code none for another.
template <bool MORE, class Tile, class ToWeight, class ToStates, class Store>
DEVICE void few_units(Tile& tiles, int tile, int stride, int all, int first, int step, int batch, const ToWeight& to_weight,
                      const ToStates& to_states, const typename Tile::Totals& totals, const Store& store) {
  const int begin = first;
  bool begun = false;
  ROLL while (tile < all) {
    const bool same = !Tile::kAllSamples && first + step < batch;
    const int next = same ? tile : MORE ? tile + stride : all, next_first = same ? first + step : begin;
    const bool more = same || (MORE && next < all), more_weight = Tile::kRounds > 1 ? more : MORE && more && !same;
    typename Tile::Sums y;
    tiles.at(first, batch);
    few_sum(
        tiles, y, more_weight, [&] { to_weight(next); }, more, [&] { to_states(next, next_first); });
    if (begun) __syncthreads();
    tiles.put(totals, y);
    __syncthreads();
    store(tile, first);
    tile = next, first = next_first, begun = true;
  }
}
