// Rows that lie in memory as several tensors side by side, each of some of their features, and are read or written as if they
// were one: x that is never concatenated, and its gradient. Nothing that is moved at once may lie in two of them.
#pragma once
#include "types/params.cuh"

// The first tensor is where x or y would be, the others are a kernel's weights from SECOND on. Of x + begin + offset, as of a
// pointer, begin is where some units begin, and offset is among these.
template <class Element, int SECOND, int... FEATURES> struct Several {
  static constexpr int COUNT = sizeof...(FEATURES), kFeatures = (FEATURES + ...);
  static constexpr int kOwn[] = {FEATURES...};
  const Params& params;
  const void* first;

  static constexpr DEVICE int begin_of(int tensor) {
    int begin = 0;
    for (int i = 0; i < tensor; ++i) begin += kOwn[i];
    return begin;
  }

  struct From {
    const Params* params;
    const void* first;
    i64 row;
    int feature;
    DEVICE Element* operator+(i64 offset) const {
      const u32 at = u32(feature) + u32(offset), rows = at / kFeatures, here = at - rows * kFeatures;
      const void* tensor = first;
      int own = kOwn[0], begin = 0;
      UNROLL for (int i = 1; i < COUNT; ++i) {
        const bool behind = here >= u32(begin_of(i));
        tensor = behind ? params->weights[SECOND + i - 1] : tensor;
        own = behind ? kOwn[i] : own, begin = behind ? begin_of(i) : begin;
      }
      return static_cast<Element*>(const_cast<void*>(tensor)) + (row + rows) * own + (int(here) - begin);
    }
    DEVICE From behind(i64 offset) const {
      const i64 at = feature + offset, rows = at / kFeatures;
      return {params, first, row + rows, int(at - rows * kFeatures)};
    }
  };
  DEVICE From operator+(i64 begin) const {
    const i64 row = begin / kFeatures;
    return {&params, first, row, int(begin - row * kFeatures)};
  }
};

// Where units begin that are so many elements further.
template <class Element> DEVICE const Element* further(const Element* from, i64 offset) { return from + offset; }
template <class From> DEVICE From further(const From& from, i64 offset) { return from.behind(offset); }

// Where something lies, if it is there; else some place.
template <class Element> DEVICE const Element* at_or_begin(const Element* from, i64 offset, bool there) {
  return there ? from + offset : from;
}
template <class From> DEVICE auto at_or_begin(const From& from, i64 offset, bool there) { return from + (there ? offset : 0); }

// A kernel's x and y: pointers, or the tensors that they are, if Source and Sink are not void.
template <class Source, class Element> DEVICE auto source_of(const Params& params) {
  if constexpr (is_void<Source>)
    return static_cast<const Element*>(params.x);
  else
    return Source{params, params.x};
}
template <class Sink, class Element> DEVICE auto sink_of(const Params& params) {
  if constexpr (is_void<Sink>)
    return static_cast<Element*>(params.y);
  else
    return Sink{params, params.y};
}
