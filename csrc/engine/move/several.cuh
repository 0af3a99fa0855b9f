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

  // Where the row in which some units begin is in each tensor, less what stands before that in a row of all: a feature's place
  // is as far behind it in whichever tensor it is.
  struct From {
    Element* rows[COUNT];
    int feature;
    DEVICE Element* operator+(i64 offset) const {
      const u32 at = u32(feature) + u32(offset), further = at / kFeatures, here = at - further * kFeatures;
      Element* row = rows[0];
      int own = kOwn[0];
      UNROLL for (int i = 1; i < COUNT; ++i) {
        const bool behind = here >= u32(begin_of(i));
        row = behind ? rows[i] : row, own = behind ? kOwn[i] : own;
      }
      return row + (further * own + here);
    }
    DEVICE From behind(i64 offset) const {
      const i64 at = feature + offset, further = at / kFeatures;
      From from;
      UNROLL for (int i = 0; i < COUNT; ++i) from.rows[i] = rows[i] + further * kOwn[i];
      from.feature = int(at - further * kFeatures);
      return from;
    }
  };
  // A feature of a row, by itself
  DEVICE Element* at(i64 row, int feature) const {
    const void* tensor = first;
    int own = kOwn[0], begin = 0;
    UNROLL for (int i = 1; i < COUNT; ++i) {
      const bool behind = feature >= begin_of(i);
      tensor = behind ? params.weights[SECOND + i - 1] : tensor;
      own = behind ? kOwn[i] : own, begin = behind ? begin_of(i) : begin;
    }
    return static_cast<Element*>(const_cast<void*>(tensor)) + row * own + (feature - begin);
  }
  DEVICE From operator+(i64 begin) const {
    From from;
    UNROLL for (int i = 0; i < COUNT; ++i)
      from.rows[i] = static_cast<Element*>(const_cast<void*>(i ? params.weights[SECOND + i - 1] : first)) - begin_of(i);
    from.feature = 0;
    return from.behind(begin);
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
