#include "cuda/device/wgmma.h"

#include "tests/judge/adder_of_codes.h"

namespace cadre::cuda {
namespace {

constexpr int kRows = 64, kDepthBytes = 32;
static_assert(kDepthBytes == test::kCodesOfAnAdd);

int element_bytes(DType dtype) { return dtype == DType::kBf16 || dtype == DType::kF16 ? 2 : 1; }
int depth_of(DType dtype) { return kDepthBytes / element_bytes(dtype); }

float decode(DType dtype, uint16_t code) {
  if (dtype == DType::kE4m3) return formats::E4m3::decode(uint8_t(code));
  if (dtype == DType::kE5m2) return formats::E5m2::decode(uint8_t(code));
  return dtype == DType::kBf16 ? formats::Bf16::decode(code) : formats::Fp16::decode(code);
}

/// row += a b, of a few products whose sum in double has no order that shows, as that of hardware
/// has none. It looks at locals of multiply() alone, and takes most of its time.
[[gnu::no_sanitize("address", "undefined")]] void add_scaled(double* __restrict__ row,
                                                             const float* __restrict__ b, float a,
                                                             int width) {
  for (int n = 0; n < width; ++n) row[n] += double(a * b[n]);
}

/// The accumulator of row m and column n, in the threads' order: see Wgmma in
/// src/cuda/device/wgmma.h.
float& accumulator(const emulator::WarpgroupProduct& p, int m, int n) {
  const int thread = m / 16 * 32 + m % 8 * 4 + n % 8 / 2;
  return p.sums[size_t(thread)][n / 8 * 4 + m % 16 / 8 * 2 + n % 2];
}

/// The first operand [64, 16], of bf16, that the threads hold: two columns a register, of row t / 4
/// of a warp's sixteen, of the row eight below, and the same of the columns eight on.
std::vector<float> operand_of_registers(const emulator::WarpgroupProduct& p) {
  constexpr int kDepth = 16;
  std::vector<float> values(size_t(kRows * kDepth));
  for (int m = 0; m < kRows; ++m)
    for (int k = 0; k < kDepth; ++k) {
      const int thread = m / 16 * 32 + m % 8 * 4 + k % 8 / 2;
      const uint32_t both = p.registers[size_t(thread)][k / 8 * 2 + m % 16 / 8];
      values[size_t(m * kDepth + k)] =
          formats::Bf16::decode(uint16_t(k % 2 == 0 ? both : both >> 16));
    }
  return values;
}

/// Accumulators [64, width] of 16-bit operands.
void multiply(const emulator::WarpgroupProduct& p, const ProductShape& shape, bool adds,
              const uint8_t* shared) {
  const int depth = depth_of(shape.a);
  const std::vector<float> a = p.registers[0] != nullptr
                                   ? operand_of_registers(p)
                                   : operand(p.a, shape.k_major_a, kRows, shape.a, shared);
  const std::vector<float> b = operand(p.b, shape.k_major_b, shape.width, shape.b, shared);
  std::vector<float> columns(size_t(shape.width * depth));  // b, rows of `width`
  for (int n = 0; n < shape.width; ++n)
    for (int k = 0; k < depth; ++k) columns[size_t(k * shape.width + n)] = b[size_t(n * depth + k)];
  std::vector<double> row(size_t(shape.width));
  for (int m = 0; m < kRows; ++m) {
    std::fill(row.begin(), row.end(), 0.0);
    for (int k = 0; k < depth; ++k)
      add_scaled(row.data(), columns.data() + k * shape.width, a[size_t(m * depth + k)],
                 shape.width);
    for (int n = 0; n < shape.width; ++n) {
      float& sum = accumulator(p, m, n);
      const auto of_step = float(row[size_t(n)]);
      sum = adds ? sum + of_step : of_step;
    }
  }
}

/// The same of 8-bit codes.
void multiply_codes(const emulator::WarpgroupProduct& p, const ProductShape& shape, bool adds,
                    const uint8_t* shared) {
  const std::vector<float> a = operand(p.a, true, kRows, shape.a, shared);
  const std::vector<float> b = operand(p.b, true, shape.width, shape.b, shared);
  for (int m = 0; m < kRows; ++m)
    for (int n = 0; n < shape.width; ++n) {
      float& sum = accumulator(p, m, n);
      sum = test::add_products_of_codes(&a[size_t(m) * kDepthBytes], &b[size_t(n) * kDepthBytes],
                                        adds ? sum : 0.0f);
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

/// A thread's part of a product.
struct Part {
  float* sums;
  const uint32_t* registers;
  uint64_t a, b;
};
void hand_in(const ProductShape& shape, const Part& mine, bool adds) {
  emulator::may_switch();
  emulator::Thread& t = emulator::self();
  emulator::Warpgroup& group = t.warpgroup();
  const auto place = size_t(t.products++ - group.done);
  if (place >= group.open.size()) {
    const uint8_t* shared = t.block->shared;
    group.open.push_back({});
    group.open.back().a = mine.a, group.open.back().b = mine.b;
    group.open.back().run = [=](const emulator::WarpgroupProduct& p) {
      (element_bytes(shape.a) == 1 ? multiply_codes : multiply)(p, shape, adds, shared);
    };
  }
  emulator::WarpgroupProduct& product = group.open[place];
  emulator::expect(product.a == mine.a && product.b == mine.b,
                   "a warpgroup does not agree on a product");
  const auto thread = size_t(t.number % emulator::kWarpgroup);
  product.sums[thread] = mine.sums, product.registers[thread] = mine.registers;
  if (++product.come < emulator::kWarpgroup || place != 0 || group.has_task) return;
  group.has_task = true;
  emulator::later([&group] { run_next(group); });
}

}  // namespace

std::vector<float> operand(uint64_t descriptor, bool k_major, int count, DType dtype,
                           const uint8_t* shared) {
  const auto field = [&](int from) { return uint32_t(descriptor >> from & 0x3fff) << 4; };
  const uint32_t first = field(0), panel = field(16), eight_rows = field(32);
  const int depth = depth_of(dtype), bytes = element_bytes(dtype);
  std::vector<float> values(size_t(count * depth));
  for (int i = 0; i < count; ++i)
    for (int k = 0; k < depth; ++k) {
      const int row = k_major ? i : k, inner = k_major ? k : i % 64;
      uint32_t at =
          first + uint32_t(row / 8) * eight_rows + uint32_t(row % 8 * 128 + inner * bytes);
      if (!k_major) at += uint32_t(i / 64) * panel;
      at ^= (at >> 7 & 7) << 4;
      uint16_t code = 0;
      std::memcpy(&code, shared + at, size_t(bytes));
      values[size_t(i * depth + k)] = decode(dtype, code);
    }
  return values;
}

void issue_wgmma(const ProductShape& shape, float* sums, uint64_t a, uint64_t b, bool adds) {
  hand_in(shape, {sums, nullptr, a, b}, adds);
}

void issue_wgmma_of_registers(int width, float* sums, const uint32_t* a, uint64_t b, bool adds) {
  hand_in({width, DType::kBf16, DType::kBf16, true, true}, {sums, a, 0, b}, adds);
}

}  // namespace cadre::cuda
