// The GPU as one thread of a kernel sees it: what instructions.cuh beside this is made of. Threads are fibers, and take
// turns where they wait. Every function that touches shared memory checks that it may.
#pragma once
#include <cstdint>

namespace emulator {

constexpr uint32_t kBase = 1024;  // where a block's shared memory begins

// Where an access lies, checked: inside shared memory, aligned, and after what it depends on.
void* read(uint32_t from, uint32_t bytes);
void* write(uint32_t to, uint32_t bytes);
void read_global(const void* from, uint32_t bytes);
void read_now(const void* from, uint32_t bytes);
// Who counts, or finds how far others have counted, comes after those who have counted before.
void come_after_counts(const void* counter, bool counts);
void write_global(void* to, uint32_t bytes);  // each byte once

// cp.async: lands when it is waited for, and nothing but NaN is there before. Zeros for bytes that are not `read`.
void copy(uint32_t to, const void* from, uint32_t bytes, uint32_t read);
void commit_copies();
void wait_for_copies(int pending);

void init_barrier(uint32_t barrier, int arrivals);
void arrive(uint32_t barrier, uint32_t expected_bytes = 0);
void arrive_with_copies(uint32_t barrier);
void wait(uint32_t barrier, uint32_t phase);

void load_run(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier, uint32_t blocks = 0);
void send_run(uint32_t to, uint32_t from, uint32_t bytes, uint32_t barrier);
void send_words(uint32_t to, const uint32_t* words, uint32_t count, uint32_t barrier);
// A tensor of floats, or of 16 bits as they are, and boxes of it. `blocks` of a cluster get the box; with no bit set it is this one.
struct TensorMap {
  const void* tensor;
  bool is_tf32;
  int64_t sizes[5], strides[4], box[5];
};
void bring_box(uint32_t to, const TensorMap& map, const int (&at)[5], uint32_t barrier, uint32_t blocks);
void store_run(void* to, uint32_t from, uint32_t bytes);
void wait_for_stores();
void fence();

uint32_t in_block(uint32_t address, int rank);
uint32_t in_other_block(uint32_t address);
void arrive_at_cluster();
void wait_at_cluster();
void sync_cluster();
bool sync_block(int barrier, int threads, bool here = false);  // whether any was
void sync_warp();

// What the lanes of a warp do at once: the last one to come does it for all, given what each of them brought.
void together(const char* what, void* mine, void (*act)(void* const* of_lanes));

// ldmatrix and stmatrix: lane 8 m + r names row r of matrix m; a lane holds two neighbours of row lane / 4, or of that
// column. What these and the products below do is compiled once, and faster than kernels are.
struct Matrices {
  uint32_t* x;
  unsigned char* at;
  int count;
  bool transposed;
  static void load(void* const* of_lanes);
  static void store(void* const* of_lanes);
};
// mma.sync: Y[16, 8] += A[16, K] B[K, 8] of what the lanes hold: EACH neighbouring k's in a register.
template <class R, int K, int EACH> struct Product {
  R *y, a[4 * EACH], b[2 * EACH];
  static void make(void* const* of_lanes);
};

float float_of_f16(uint16_t bits);
uint16_t f16_of(float x);
uint16_t bf16_of(float x);
inline uint32_t truncated_to_tf32(uint32_t bits) { return bits & ~0x1fffu; }

// wgmma: A from registers, or, if there are none, from the slab that `a` describes.
enum class Kind { bf16, f16, tf32 };
void open_products();
void multiply(Kind kind, int n, float* sums, const uint32_t* registers, uint64_t a, uint64_t b, bool add,
              bool left_turned, bool turned);
void commit_products();
void wait_for_products(int pending);

}  // namespace emulator
