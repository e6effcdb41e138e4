// Devices as words: "cpu", "cuda:1", "sm_90".
#include "cadre/device.h"

#include <array>
#include <charconv>

#include "cadre/error.h"

namespace cadre {
namespace {

// SMs and opt-in shared memory of the largest GPU of each architecture.
constexpr std::array kTypical = {
    Device{.kind = DeviceKind::kCuda, .index = 0, .sm = 80, .units = 108, .smem_bytes = 163 << 10},
    Device{.kind = DeviceKind::kCuda, .index = 0, .sm = 90, .units = 132, .smem_bytes = 227 << 10},
    Device{.kind = DeviceKind::kCuda, .index = 0, .sm = 100, .units = 148, .smem_bytes = 227 << 10},
};

/// The device that "cuda" or "cuda:<index>" names; `digits` is empty for "cuda".
Device nth_cuda(std::string_view word, std::string_view digits) {
  int index = 0;
  const char* end = digits.data() + digits.size();
  const auto [stop, error] = std::from_chars(digits.data(), end, index);
  require(digits.empty() || (error == std::errc() && stop == end && index >= 0),
          "device: index of '", word, "' is '", digits, "', must be a number, 0 or more");
  const std::vector<Device> devices = cuda_devices();
  require(size_t(index) < devices.size(), "device: '", word, "' is not here, must be one of the ",
          devices.size(),
          " CUDA devices that this build and this machine show; to plan without "
          "one, name an architecture such as sm_90");
  return devices[size_t(index)];
}

}  // namespace

std::string to_string(const Device& device) {
  return device.kind == DeviceKind::kCpu ? "cpu" : text("sm_", device.sm);
}

Device parse_device(std::string_view word) {
  if (word == "cpu") return this_cpu();
  if (word == "cuda") return nth_cuda(word, {});
  if (word.starts_with("cuda:") && word.size() > 5) return nth_cuda(word, word.substr(5));
  for (const Device& device : kTypical)
    if (word == to_string(device)) return device;
  throw InvalidArgument(text("device: name is '", word,
                             "', must be cpu, cuda, cuda:<index>, sm_80, sm_90 or sm_100"));
}

}  // namespace cadre
