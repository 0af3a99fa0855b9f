// Accesses to shared memory and memory, and cp.async.
#include "machine.h"

namespace emulator {

void* read(uint32_t from, uint32_t bytes) {
  if (offset_of(from) % bytes) error("a read of %u bytes at %u, not aligned", bytes, offset_of(from));
  if (!is_inside("a read", from, bytes)) return nowhere;
  check_read("a read", from, bytes);
  return memory_at(from);
}
void* write(uint32_t to, uint32_t bytes) {
  if (offset_of(to) % bytes) error("a write of %u bytes at %u, not aligned", bytes, offset_of(to));
  if (!is_inside("a write", to, bytes)) return nowhere;
  check_write("a write", to, bytes);
  return memory_at(to);
}
void read_global(const void* from, uint32_t bytes) { check_global("a read", from, bytes, false); }
// What other blocks may write meanwhile: they go on before it is asked for again.
void read_now(const void* from, uint32_t bytes) {
  constexpr long kMost = 200'000'000;
  static long asked = 0;
  if (++asked > kMost) error("a read, again and again, of what nobody writes"), std::_Exit(1);
  progress();
  pause();
  const u8* const at = static_cast<const u8*>(from);
  for (const Buffer& buffer : buffers)
    if (at >= buffer.begin && at + bytes <= buffer.begin + buffer.bytes) return;
  error("a read of %u bytes outside of the tensors", bytes);
}
void write_global(void* to, uint32_t bytes) { check_global("a write", to, bytes, true); }

void copy(uint32_t to, const void* from, uint32_t bytes, uint32_t read) {
  if (read > bytes) error("a copy of %u bytes that reads %u", bytes, read);
  if (read) check_global("a copy", from, read, false, bytes);
  if (offset_of(to) % bytes) error("a copy of %u bytes to %u, not aligned", bytes, offset_of(to));
  if (!is_inside("a copy", to, bytes)) return;
  check_write("a copy", to, bytes);
  self().copies.push_back({to, bytes, from, read});
  begin_copy(self().copies.back());
}
void commit_copies() {
  self().copy_groups.push_back(std::move(self().copies));
  self().copies.clear();
}
void wait_for_copies(int pending) {
  hesitate();
  land_what_is_due(true, current);
  for (auto& groups = self().copy_groups; int(groups.size()) > pending; groups.pop_front())
    for (const Copy& copy : groups.front()) {
      land(copy);
      for (Cell& cell : cells_at(copy.to, copy.bytes))
        cell.writer = short(current), cell.written = step();
    }
}

void Matrices::load(void* const* of_lanes) {
  const auto lane = [&](int i) { return static_cast<const Matrices*>(of_lanes[i]); };
  for (int i = 0; i < 32; ++i)
    for (int m = 0; m < lane(i)->count; ++m) {
      u16 word[2];
      for (int half = 0; half < 2; ++half) {
        const int near = i / 4, far = i % 4 * 2 + half;
        const bool transposed = lane(i)->transposed;
        memcpy(&word[half], lane(m * 8 + (transposed ? far : near))->at + (transposed ? near : far) * 2, 2);
      }
      lane(i)->x[m] = word[0] | u32(word[1]) << 16;
    }
}
void Matrices::store(void* const* of_lanes) {
  const auto lane = [&](int i) { return static_cast<const Matrices*>(of_lanes[i]); };
  for (int i = 0; i < 8 * lane(0)->count; ++i)
    for (int c = 0; c < 8; ++c) {
      const int near = lane(0)->transposed ? c : i % 8, far = lane(0)->transposed ? i % 8 : c;
      const u16 word = u16(lane(near * 4 + far / 2)->x[i / 8] >> far % 2 * 16);
      memcpy(lane(i)->at + c * 2, &word, 2);
    }
}

}  // namespace emulator
