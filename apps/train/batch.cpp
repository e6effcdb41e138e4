#include "apps/train/batch.h"

namespace cadre::train {

Batch::Batch(Engine& engine, const Settings& settings, int64_t rows)
    : engine_(engine),
      rows_(rows),
      windows_at_(settings.blocks * 2 * int64_t{sizeof(uint64_t)}),
      targets_at_(windows_at_ + rows * settings.window),
      host_((targets_at_ + rows + 7) / 8),
      sent_(engine, std::ssize(host_) * int64_t{sizeof(uint64_t)}) {}

std::span<uint64_t> Batch::rng() { return std::span(host_).first(windows_at_ / 8); }

std::span<uint8_t> Batch::windows() {
  auto* bytes = reinterpret_cast<uint8_t*>(host_.data());
  return {bytes + windows_at_, bytes + targets_at_};
}

std::span<uint8_t> Batch::targets() {
  auto* bytes = reinterpret_cast<uint8_t*>(host_.data());
  return {bytes + targets_at_, static_cast<size_t>(rows_)};
}

void Batch::send() { engine_.upload(sent_.data(), host_.data(), sent_.bytes()); }

}  // namespace cadre::train
