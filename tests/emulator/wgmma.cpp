#include "cuda/device/wgmma.h"

namespace cadre::cuda {
namespace {

constexpr int kRows = 64, kDepth = 16;

float decode(DType dtype, uint16_t code) {
  return dtype == DType::kBf16 ? formats::Bf16::decode(code) : formats::Fp16::decode(code);
}

/// row += a b. It looks at locals of multiply() alone, and takes most of its time.
[[gnu::no_sanitize("address", "undefined")]] void add_scaled(float* __restrict__ row,
                                                             const float* __restrict__ b, float a,
                                                             int width) {
  for (int n = 0; n < width; ++n) row[n] += a * b[n];
}

/// Accumulators [64, width] in the threads' order: see Wgmma in src/cuda/device/wgmma.h.
void multiply(const emulator::WarpgroupProduct& p, const ProductShape& shape, bool adds,
              const uint8_t* shared) {
  const std::vector<float> a = operand(p.a, shape.k_major_a, kRows, shape.dtype, shared);
  const std::vector<float> b = operand(p.b, shape.k_major_b, shape.width, shape.dtype, shared);
  std::vector<float> columns(size_t(shape.width) * kDepth);  // b, sixteen rows of `width`
  for (int n = 0; n < shape.width; ++n)
    for (int k = 0; k < kDepth; ++k)
      columns[size_t(k * shape.width + n)] = b[size_t(n * kDepth + k)];
  std::vector<float> row(size_t(shape.width));
  for (int m = 0; m < kRows; ++m) {
    std::fill(row.begin(), row.end(), 0.0f);
    for (int k = 0; k < kDepth; ++k)
      add_scaled(row.data(), columns.data() + k * shape.width, a[size_t(m * kDepth + k)],
                 shape.width);
    for (int n = 0; n < shape.width; ++n) {
      const int thread = m / 16 * 32 + m % 8 * 4 + n % 8 / 2;
      float& sum = p.sums[size_t(thread)][n / 8 * 4 + m % 16 / 8 * 2 + n % 2];
      sum = adds ? sum + row[size_t(n)] : row[size_t(n)];
    }
  }
}

void run_next(emulator::Warpgroup& group) {
  const emulator::WarpgroupProduct product = std::move(group.open.front());
  group.open.pop_front();
  product.run(product);
  ++group.done;
  emulator::notify(&group);
  group.has_task = !group.open.empty() && group.open.front().come == emulator::kWarpgroup;
  if (group.has_task) emulator::later([&group] { run_next(group); });
}

}  // namespace

std::vector<float> operand(uint64_t descriptor, bool k_major, int count, DType dtype,
                           const uint8_t* shared) {
  const auto field = [&](int from) { return uint32_t(descriptor >> from & 0x3fff) << 4; };
  const uint32_t first = field(0), panel = field(16), eight_rows = field(32);
  std::vector<float> values(size_t(count) * kDepth);
  for (int i = 0; i < count; ++i)
    for (int k = 0; k < kDepth; ++k) {
      const int row = k_major ? i : k, inner = k_major ? k : i % 64;
      uint32_t at = first + uint32_t(row / 8) * eight_rows + uint32_t(row % 8 * 128 + inner * 2);
      if (!k_major) at += uint32_t(i / 64) * panel;
      at ^= (at >> 7 & 7) << 4;
      uint16_t code;
      std::memcpy(&code, shared + at, 2);
      values[size_t(i * kDepth + k)] = decode(dtype, code);
    }
  return values;
}

void issue_wgmma(const ProductShape& shape, float* sums, uint64_t a, uint64_t b, bool adds) {
  emulator::may_switch();
  emulator::Thread& t = emulator::self();
  emulator::Warpgroup& group = t.warpgroup();
  const auto place = size_t(t.products++ - group.done);
  if (place >= group.open.size()) {
    const uint8_t* shared = t.block->shared;
    group.open.push_back({});
    group.open.back().a = a, group.open.back().b = b;
    group.open.back().run = [=](const emulator::WarpgroupProduct& p) {
      multiply(p, shape, adds, shared);
    };
  }
  emulator::WarpgroupProduct& product = group.open[place];
  emulator::expect(product.a == a && product.b == b, "a warpgroup does not agree on a product");
  product.sums[size_t(t.number % emulator::kWarpgroup)] = sums;
  if (++product.come < emulator::kWarpgroup || place != 0 || group.has_task) return;
  group.has_task = true;
  emulator::later([&group] { run_next(group); });
}

}  // namespace cadre::cuda
