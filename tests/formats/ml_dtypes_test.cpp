// Our conversions against those of ml_dtypes, as recorded in ml_dtypes_vectors.txt: an
// implementation that none of us wrote. ml_dtypes_vectors_test.py says what is in it.
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <sstream>

#include "formats/e8m0.h"
#include "formats/list.h"

using namespace cadre;
using namespace cadre::formats;

namespace {

struct Vector {
  std::string line, what, format, in, out;
};

std::vector<Vector> read_vectors() {
  std::ifstream file(CADRE_VECTORS);
  std::vector<Vector> all;
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with('#')) continue;
    Vector v{.line = line, .what = {}, .format = {}, .in = {}, .out = {}};
    std::istringstream(line) >> v.what >> v.format >> v.in >> v.out;
    all.push_back(v);
  }
  return all;
}

uint32_t hex(const std::string& word) { return uint32_t(std::stoul(word, nullptr, 16)); }

template <class Float>
void expect_decode(const Vector& v) {
  const float got = Float::decode(typename Float::Code(hex(v.in)));
  if (v.out == "nan") {
    EXPECT_TRUE(is_nan(got)) << v.line;
  } else {
    EXPECT_EQ(bits_of(got), hex(v.out)) << v.line;
  }
}

template <class Float>
void expect_encode(const Vector& v) {
  if constexpr (std::is_same_v<Float, E8m0>) {  // a power of two: nothing to round
    EXPECT_EQ(E8m0::encode_up(float_of(hex(v.in))), hex(v.out)) << v.line;
    EXPECT_EQ(E8m0::encode_floor(float_of(hex(v.in)), 0), hex(v.out)) << v.line;
  } else {
    EXPECT_EQ(Float::encode(float_of(hex(v.in))), hex(v.out)) << v.line;
  }
}

TEST(MlDtypes, AgreesOnEveryRecordedConversion) {
  std::map<std::string, int> seen;
  for (const Vector& v : read_vectors()) {
    const bool known = visit(TypeList<E4m3, E5m2, E2m1, Bf16, Fp16, E8m0>{}, parse_dtype(v.format),
                             [&]<class Float>() {
                               if (v.what == "decode") expect_decode<Float>(v);
                               if (v.what == "encode") expect_encode<Float>(v);
                               ++seen[v.what + " " + v.format];
                             });
    ASSERT_TRUE(known && (v.what == "decode" || v.what == "encode")) << v.line;
  }
  // All codes of the small formats, and no format forgotten.
  EXPECT_EQ(seen["decode e4m3"], 256);
  EXPECT_EQ(seen["decode e5m2"], 256);
  EXPECT_EQ(seen["decode e2m1"], 16);
  EXPECT_EQ(seen["decode e8m0"], 256);
  EXPECT_EQ(seen["encode e8m0"], 255);
  for (const char* format : {"e4m3", "e5m2", "e2m1", "bf16", "f16"})
    EXPECT_GT(seen[std::string("encode ") + format], 80) << format;
}

}  // namespace
