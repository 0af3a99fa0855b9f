// The CPU kernels for any processor, in 128-bit vectors.
#include "headers.h"

namespace factorlayer::cpu::generic {
#include "kernels.h"
}
