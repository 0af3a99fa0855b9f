// A plan: how a chain runs on one GPU, as passes over chunks of samples. plan/plan.py writes it as text, which
// is what the table of plans takes and what an exported package embeds:
//
//     factorlayer plan 1
//     chunk <samples at a time; 0: all>
//     scratch <bytes for each sample in buffer s0> <in s1> <bytes in s2, however many samples there are>
//         <maybe for each sample in s3> … <in s7>                                                      (all on one line)
//     pass <in: x|s0…s7|@a weight|none, maybe with +s0…+s7@a weight> <out: y|w|s0…s7|@a weight> <threads> <shared bytes>
//         <units per sample> <units per block> <blocks per SM at most; 0: no limit> <grid y> <architecture> <kernel>
//         <bytes of source>                                                                            (all on one line)
//     <source, and a newline>
//     map <x, or a weight's number> <tf32|u16> <five sizes> <bytes from one to the next, behind the first size>
//         <five sizes of a box>                                                                        (all on one line)
//     pass …
//
// A kernel with maps, of which each has a line, has them as a second parameter: how the copy engine finds boxes of a tensor,
// floats rounded on their way, or 16 bits as they are. The third size is that for one sample, if the tensor is x or a weight
// that has samples, as a gradient has: "1*".
//
// A pass may have another buffer in the place of a weight, "+s1@3", and may write the states that it reads, or add up s2,
// where they lie. One that reads nothing but weights, "none", prepares them in s2, and needs to run
// only once for weights that stay as they are. A unit is what a block works on; a launch has as many blocks as its
// samples have units, or fewer that each loop.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace factorlayer {

struct TensorMap {
  int weight;  // or -1: x
  bool has_samples, is_tf32;
  int64_t sizes[5], strides[4], box[5];
};

constexpr size_t MOST_MAPS = 3;
constexpr int MOST_SCRATCH = 8;  // buffers, of which SUMS is for any number of samples
constexpr int SUMS = 2;
constexpr size_t MOST_PASSES = 256;
constexpr int64_t MOST_SOURCE = int64_t(1) << 24;  // bytes: ours have a hundredth
constexpr int MOST_NAME = 100;                     // letters

struct Pass {
  // outside: x as input, y as output; second: w, another output; s0: the first buffer of scratch, and others by their numbers
  enum Buffer { outside, second, none, weight, s0, end = s0 + MOST_SCRATCH };
  Buffer in, out, beside;  // weight: it reads weight `place`, or writes `out_place`; beside: what is in that of `beside_place`, or none
  int place, out_place, beside_place;
  int64_t threads, shared_bytes, units_per_sample, units_per_block, blocks_per_processor, grid_y;
  std::string architecture, kernel, source;
  int64_t cluster;  // blocks of one, along y
  std::vector<TensorMap> maps;
  bool together;  // whether all blocks of a launch have to be on the GPU at once, as they wait for one another
  bool apart;  // whether blocks have multiprocessors of their own, where there are as many
  bool waits;  // for the kernel before it in the stream, by itself, so that its blocks may start before that has ended
};

struct Plan {
  int64_t chunk;
  int64_t scratch[MOST_SCRATCH];
  int64_t prepared;  // bytes of weights in s2, or 0
  std::vector<Pass> passes;
};

// What compiler and driver take for names: of a kernel, letters, digits and "_"; of an architecture, sm_90 or sm_90a.
bool is_kernel_name(const std::string& word);
bool is_architecture(const std::string& word);

// Its words and numbers are read strictly; its sources are what they are, and whoever gives the plan is trusted with them
// (docs/trust.md). Throws std::invalid_argument, which names the line.
Plan parse_plan(const std::string& text);

}  // namespace factorlayer
