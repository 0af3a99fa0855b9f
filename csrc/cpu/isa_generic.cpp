// The CPU kernels for any processor, in 128-bit vectors. Of x86_64 they serve only processors without AVX2, of before
// 2013: the build does not take a minute to optimize them for those.
#include "headers.h"
#if defined(__x86_64__) && !defined(__clang__)
#pragma GCC optimize("O1")
#endif

namespace factorlayer::cpu::generic {
#include "kernels.h"
}
