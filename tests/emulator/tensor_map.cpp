#include "tests/emulator/tensor_map.h"

#include <cstring>

#include "cuda/device/barrier.h"

namespace cadre::emulator {
namespace {

constexpr uint32_t kMagic = 0x7e45'0a17;
constexpr int kRowBytes = 128;

/// Calls work(address in device memory or null, byte of the box) with every element of a box.
template <class Work>
void for_elements(const MapData& m, const Coordinates& at, Work&& work) {
  int byte = 0;
  for (uint32_t w = 0; w < m.box[3]; ++w)
    for (uint32_t z = 0; z < m.box[2]; ++z)
      for (uint32_t y = 0; y < m.box[1]; ++y)
        for (uint32_t x = 0; x < m.box[0]; ++x, byte += int(m.element_bytes)) {
          const uint32_t step[4] = {x, y, z, w};
          uint64_t address = m.base;
          bool inside = true;
          for (size_t d = 0; d < 4; ++d) {
            const int64_t c = int64_t(at[d]) + step[d];
            inside = inside && c >= 0 && uint64_t(c) < m.extent[d];
            address += uint64_t(c) * (d == 0 ? m.element_bytes : m.step[d - 1]);
          }
          work(inside ? reinterpret_cast<uint8_t*>(address) : nullptr, byte);
        }
}

/// The place of a byte of a box in shared memory, in the swizzle of 128 bytes.
int swizzled(uint32_t first, int byte) {
  const auto at = first + uint32_t(byte);
  return int(at ^ (at >> 7 & 7) << 4) - int(first);
}

void read_box(const MapData& m, const Coordinates& at, uint32_t first, uint8_t* to) {
  for_elements(m, at, [&](const uint8_t* from, int byte) {
    uint8_t* place = to + swizzled(first, byte);
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
  expect(int(m.box[0] * m.element_bytes) == kRowBytes, "a box has rows of 128 bytes");
  expect(offset % kRowBytes == 0, "a box in shared memory begins at a multiple of 128 bytes");
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
  for (int rank = 0; rank < 16; ++rank) {
    if ((whom.blocks >> rank & 1) == 0) continue;
    auto* place = static_cast<uint8_t*>(in_block(to, rank));
    auto* barrier = static_cast<uint64_t*>(in_block(whom.barrier, rank));
    later([=] {
      read_box(m, at, offset, place);
      cuda::deliver(*barrier, uint32_t(m.bytes()));
    });
  }
  may_switch();
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
    for (int i = 0; i < m.bytes(); ++i) plain[size_t(i)] = shared[swizzled(offset, i)];
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
