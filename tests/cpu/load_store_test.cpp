#include "cpu/load_store.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

using namespace cadre;

namespace {

TEST(LoadStore, ReadsWhatItWroteAtAnyStrides) {
  for (DType dtype : {DType::kF32, DType::kBf16, DType::kF16}) {
    std::vector<char> bytes(size_t(bytes_for(dtype, 2 * 3 * 4)));
    const TensorView v = view(bytes.data(), dtype, {2, 3, 4}, {1, 8, 2});
    for (int64_t i = 0; i < 2; ++i)
      for (int64_t j = 0; j < 3; ++j)
        for (int64_t k = 0; k < 4; ++k)
          cpu::write(v, {i, j, k}, double(i + 10 * j) + 0.25 * double(k));
    for (int64_t i = 0; i < 2; ++i)
      for (int64_t j = 0; j < 3; ++j)
        for (int64_t k = 0; k < 4; ++k)
          EXPECT_EQ(cpu::read(v, i, j, k), double(i + 10 * j) + 0.25 * double(k)) << name(dtype);
  }
}

TEST(LoadStore, RoundsOnceFromDouble) {
  // Just above the midpoint of 1 and the next bf16: by way of fp32 this would become a tie.
  const double above = 1.0 + std::ldexp(1.0, -8) + std::ldexp(1.0, -40);
  uint16_t code = 0;
  const TensorView v = view(&code, DType::kBf16, {1});
  cpu::write(v, {}, above);
  EXPECT_EQ(cpu::read(v, 0), 1.0 + std::ldexp(1.0, -7));
}

TEST(LoadStore, RowDataFollowsTheRowStride) {
  std::vector<float> data(20);
  const TensorView v = view(data.data(), DType::kF32, {4, 3}, {5, 1});
  EXPECT_EQ(cpu::row_data<formats::Fp32>(v, 2), data.data() + 10);
}

TEST(LoadStore, OtherDtypesAreAnError) {
  try {
    cpu::visit_float(DType::kE4m3, [](auto) {});
    FAIL();
  } catch (const InvalidArgument& e) {
    EXPECT_STREQ(e.what(), "cpu: dtype is e4m3, must be f32, bf16 or f16");
  }
}

}  // namespace
