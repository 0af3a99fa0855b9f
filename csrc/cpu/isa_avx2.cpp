// The CPU kernels for processors with AVX2. The standard headers come first: nothing of theirs may
// be compiled for an instruction set that the machine it runs on may lack.
#include "headers.h"
#if defined(__x86_64__)
#include <immintrin.h>
#define ISA_AVX2
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
namespace factorlayer::cpu::avx2 {
#include "kernels.h"
}
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
