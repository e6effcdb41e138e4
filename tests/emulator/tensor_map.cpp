#include "tests/emulator/tensor_map.h"

#include <cstring>

#include "cuda/device/barrier.h"

namespace cadre::emulator {
namespace {

constexpr uint32_t kMagic = 0x7e45'0a17;

/// Calls work(address in device memory or null, byte of the box) with every element of a box.
template <class Work>
void for_elements(const MapData& m, const Coordinates& at, Work&& work) {
  int byte = 0;
  for (uint32_t row = 0; row < uint32_t(m.bytes() / m.row_bytes()); ++row)
    for (uint32_t x = 0; x < m.box[0]; ++x, byte += int(m.element_bytes)) {
      uint64_t address = m.base;
      bool inside = true;
      uint32_t rest = row;
      for (size_t d = 0; d < 5; ++d) {
        const int64_t c = int64_t(at[d]) + (d == 0 ? x : rest % m.box[d]);
        if (d > 0) rest /= m.box[d];
        inside = inside && c >= 0 && uint64_t(c) < m.extent[d];
        address += uint64_t(c) * (d == 0 ? m.element_bytes : m.step[d - 1]);
      }
      work(inside ? reinterpret_cast<uint8_t*>(address) : nullptr, byte);
    }
}

/// The place of a byte of a box in shared memory, in the swizzle of as many bytes as its rows have.
int swizzled(const MapData& m, uint32_t first, int byte) {
  const auto at = first + uint32_t(byte);
  return int(at ^ (at >> 7 & uint32_t(m.row_bytes() / 16 - 1)) << 4) - int(first);
}

void read_box(const MapData& m, const Coordinates& at, uint32_t first, uint8_t* to) {
  for_elements(m, at, [&](const uint8_t* from, int byte) {
    uint8_t* place = to + swizzled(m, first, byte);
    if (from == nullptr)
      std::memset(place, 0, m.element_bytes);
    else
      std::memcpy(place, from, m.element_bytes);
  });
}

void write_box(const MapData& m, const Coordinates& at, const uint8_t* plain, bool adds) {
  for_elements(m, at, [&](uint8_t* to, int byte) {
    if (to == nullptr) return;
    float old, more;
    std::memcpy(&more, plain + byte, std::min<size_t>(4, m.element_bytes));
    if (adds) std::memcpy(&old, to, 4), more += old;
    std::memcpy(to, &more, m.element_bytes);
  });
}

void check_box(const MapData& m, uint32_t offset) {
  expect(m.magic == kMagic, "a tensor map was never encoded");
  expect(m.row_bytes() == m.swizzle, "a box has rows of as many bytes as its swizzle");
  expect(offset % 128 == 0, "a box in shared memory begins at a multiple of 128 bytes");
}

/// Copies that happen at any later moment, one for each block that a load is for.
void start_copies(void* to, uint32_t bytes, const Delivery& whom,
                  const std::function<void(uint8_t*)>& copy) {
  for (int rank = 0; rank < 16; ++rank) {
    if ((whom.blocks >> rank & 1) == 0) continue;
    auto* place = static_cast<uint8_t*>(in_block(to, rank));
    auto* barrier = static_cast<uint64_t*>(in_block(whom.barrier, rank));
    later([=] {
      copy(place);
      cuda::deliver(*barrier, bytes);
    });
  }
  may_switch();
}

}  // namespace

MapData data_of(const CUtensorMap& map) {
  MapData data;
  static_assert(sizeof(data) <= sizeof(map));
  std::memcpy(static_cast<void*>(&data), &map, sizeof(data));
  return data;
}

CUtensorMap map_of(const MapData& data) {
  CUtensorMap map{};
  MapData signed_data = data;
  signed_data.magic = kMagic;
  std::memcpy(&map, &signed_data, sizeof(data));
  return map;
}

void start_load(void* to, const CUtensorMap& map, const Coordinates& at, const Delivery& whom) {
  const MapData m = data_of(map);
  const uint32_t offset = shared_offset(to);
  check_box(m, offset);
  start_copies(to, uint32_t(m.bytes()), whom,
               [=](uint8_t* place) { read_box(m, at, offset, place); });
}

void start_bulk_load(void* to, const void* from, uint32_t bytes, const Delivery& whom) {
  expect((shared_offset(to) | reinterpret_cast<uintptr_t>(from) | bytes) % 16 == 0,
         "a bulk copy begins at multiples of 16 bytes and has as many");
  start_copies(to, bytes, whom, [=](uint8_t* place) { std::memcpy(place, from, bytes); });
}

void start_store(const CUtensorMap& map, const Coordinates& at, const void* from, bool adds) {
  const MapData m = data_of(map);
  const uint32_t offset = shared_offset(from);
  check_box(m, offset);
  expect(!adds || m.is_float != 0, "only fp32 is added in memory");
  Thread& t = self();
  if (!t.open_stores) t.open_stores = std::make_shared<StoreGroup>();
  const std::shared_ptr<StoreGroup> group = t.open_stores;
  ++group->reading, ++group->writing;
  const auto* shared = static_cast<const uint8_t*>(from);
  later([=] {
    std::vector<uint8_t> plain(size_t(m.bytes()));
    for (int i = 0; i < m.bytes(); ++i) plain[size_t(i)] = shared[swizzled(m, offset, i)];
    --group->reading;
    notify(group.get());
    later([=] {
      write_box(m, at, plain.data(), adds);
      --group->writing;
      notify(group.get());
    });
  });
  may_switch();
}

void tma_commit() {
  Thread& t = self();
  if (!t.open_stores) t.open_stores = std::make_shared<StoreGroup>();
  t.store_groups.push_back(std::move(t.open_stores));
  t.open_stores = nullptr;
}

void tma_wait(int left, bool written) {
  Thread& t = self();
  while (!t.store_groups.empty() && t.store_groups.front()->writing == 0)
    t.store_groups.pop_front();
  for (size_t g = 0; g + size_t(left) < t.store_groups.size(); ++g) {
    const std::shared_ptr<StoreGroup> group = t.store_groups[g];
    wait_until(group.get(), "its stores",
               [&] { return group->reading == 0 && (!written || group->writing == 0); });
  }
}

}  // namespace cadre::emulator
