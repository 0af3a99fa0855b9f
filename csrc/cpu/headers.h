// What the kernels need, included before an instruction set is selected: see isa_avx512.cpp.
#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "../chain.h"
#include "cpu.h"
#include "layer/team.h"
