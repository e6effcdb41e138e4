// The arithmetic of the formats gives equal bits on the GPU and on the host.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <vector>

#include "cadre/device.h"
#include "cuda/check.h"
#include "cuda/device/small_float.h"
#include "formats/hadamard.h"
#include "formats/list.h"
#include "formats/philox.h"

namespace cadre {
namespace {

using formats::bits_of;
using formats::float_of;

// Input i of a test: a bijection of 32-bit words, so that 2^22 of them spread over all floats.
CADRE_HD constexpr uint32_t input(uint32_t i) { return i * 0x9E37'79B1u; }

template <class Element>
struct Encode {
  CADRE_HD static uint32_t of(uint32_t x) { return bits_of(float(Element::encode(float_of(x)))); }
};

template <class Element>
struct Decode {
  CADRE_HD static uint32_t of(uint32_t x) {
    return bits_of(Element::decode(typename Element::Code(x >> (32 - bits))));
  }
  static constexpr int bits = sizeof(typename Element::Code) * 8;
};

template <class Element>
struct EncodeStochastic {
  CADRE_HD static uint32_t of(uint32_t x) {
    return Element::encode_stochastic(float_of(x), input(x) >> 16);
  }
};

// Scale, multiplier and one code of a block whose amax is the input.
template <class Format, class Element, bool kOption>
struct BlockOf {
  CADRE_HD static uint32_t of(uint32_t x) {
    const formats::ScaleOptions options{.power_of_two = kOption, .floor = kOption};
    const float amax = float_of(x & formats::kMagnitudeBits);
    const auto expert = Format::template expert_scale<Element>(formats::mul(amax, 3.7f), options);
    const auto block = Format::template block_scale<Element>(amax, expert, options);
    const uint32_t code = Element::encode(formats::mul(amax, formats::mul(0.3f, block.multiplier)));
    return bits_of(float(block.code)) * 31u + bits_of(block.multiplier) * 17u +
           bits_of(expert.scale) * 13u + code;
  }
};

// Of every second mantissa, times a power of two.
template <uint32_t kOdd, uint32_t kExponent>
struct Reciprocal {
  CADRE_HD static uint32_t of(uint32_t x) {
    const uint32_t mantissa = (x & 0x3f'ffffu) << 1 | kOdd;
    return bits_of(formats::reciprocal(float_of((127u + kExponent) << 23 | mantissa)));
  }
};

// Eight numbers of very different sizes, and of bf16, whose halves between two codes are ties. They
// are products, as in the kernels: of a NaN always a quiet one.
CADRE_HD inline void eight_numbers(uint32_t x, float (&numbers)[8]) {
  for (uint32_t k = 0; k < 8; ++k)
    numbers[k] = float_of(k % 2 == 0 ? input(x + k) : input(x + k) & 0xffff'0000u);
  numbers[7] = float_of((x & 0x80ff'0000u) | 0x3f80'0000u);
  for (float& number : numbers) number = formats::mul(number, 0.5f);
}
CADRE_HD inline uint32_t word_of(uint64_t word) { return uint32_t(word) ^ uint32_t(word >> 32); }

template <class Element>
struct EncodeEight {
  CADRE_HD static uint32_t of(uint32_t x) {
    float numbers[8];
    eight_numbers(x, numbers);
    return word_of(cuda::EightCodes<Element>::of(numbers).word);
  }
};

// Numbers that are close to what random bits decide, and the bits, every second time in the upper
// half of a word.
struct RandomEight {
  float numbers[8];
  cuda::RandomHalf random[8];

  CADRE_HD explicit RandomEight(uint32_t x) : numbers{} {
    eight_numbers(x, numbers);
    for (uint32_t k = 0; k < 8; ++k) {
      random[k] = {input(x ^ k << 28), int((x + k) % 2)};
      if (k >= 4) continue;
      const uint32_t code = (x >> 3 * k) % 7;
      const float low = formats::E2m1::decode(uint8_t(code));
      const float step = formats::add(formats::E2m1::decode(uint8_t(code + 1)), -low);
      const float threshold = formats::mul(formats::add(float(bits(k)), 0.5f), 0x1p-16f);
      const float near = formats::fma(threshold, step, low);
      numbers[k] = float_of((bits_of(near) + (x >> 20) % 3 - 1) | (x & 0x8000'0000u));
    }
  }
  CADRE_HD uint32_t bits(uint32_t k) const {
    return random[k].word >> 16 * random[k].upper & 0xffffu;
  }
};

struct EncodeEightStochastic {
  CADRE_HD static uint32_t of(uint32_t x) {
    const RandomEight eight(x);
    return cuda::EightCodes<formats::E2m1>::of(eight.numbers, eight.random).word;
  }
};

template <class Element>
struct DecodeEight {
  CADRE_HD static uint32_t of(uint32_t x) {
    using Word = typename cuda::EightCodes<Element>::Word;
    float numbers[8];
    cuda::decode_codes(cuda::EightCodes<Element>{Word(x * 0x9E37'79B9'7F4A'7C15u)}, numbers);
    uint32_t sum = 0;
    for (const float number : numbers)  // GPUs do not keep the sign of a NaN
      sum = sum * 31u + (formats::is_nan(number) ? formats::kNanBits : bits_of(number));
    return sum;
  }
};

struct Philox {
  CADRE_HD static uint32_t of(uint32_t x) {
    const formats::StochasticBits bits{.seed = x * 0x1'0000'0001ull, .offset = x, .role = {}};
    return formats::StochasticBits::pick(bits.draw(x >> 24, x & 0xffu, x >> 8), x >> 8);
  }
};

struct Hadamard {
  CADRE_HD static uint32_t of(uint32_t x) {
    float v[16];
    for (uint32_t i = 0; i < 16; ++i)  // magnitudes within 2^16 of each other, so that sums round
      v[i] = float_of((input(x + i) & 0x87ff'ffffu) | 0x3800'0000u);
    formats::Hadamard16::apply(v);
    uint32_t sum = 0;
    for (const float value : v) sum = sum * 31u + bits_of(value);
    return sum;
  }
};

template <class Function>
__global__ void evaluate(uint32_t* out, uint32_t count) {
  const uint32_t step = gridDim.x * blockDim.x;
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step)
    out[i] = Function::of(input(i));
}

// Needs no GPU.
TEST(EightCodes, AreThoseOfTheFormats) {
  for_each(TypeList<formats::E4m3, formats::E5m2, formats::E2m1>{}, [&]<class Element>() {
    using Codes = cuda::EightCodes<Element>;
    for (uint32_t i = 0; i < 1u << 18; ++i) {
      float numbers[8], back[8];
      eight_numbers(input(i), numbers);
      const Codes codes = Codes::of(numbers);
      cuda::decode_codes(codes, back);
      for (int k = 0; k < 8; ++k) {
        const uint8_t code = Element::encode(numbers[k]);
        ASSERT_EQ(codes.get(k), code) << numbers[k];
        ASSERT_EQ(bits_of(back[k]), bits_of(Element::decode(code))) << int(code);
      }
    }
  });
}

TEST(EightCodes, AreThoseOfTheFormatsWithTheSameRandomBits) {
  for (uint32_t i = 0; i < 1u << 20; ++i) {
    const RandomEight eight(input(i));
    const auto codes = cuda::EightCodes<formats::E2m1>::of(eight.numbers, eight.random);
    for (uint32_t k = 0; k < 8; ++k)
      ASSERT_EQ(codes.get(int(k)),
                formats::E2m1::encode_stochastic(eight.numbers[k], eight.bits(k)))
          << eight.numbers[k] << " " << eight.bits(k);
  }
}

class FormatsOnDevice : public testing::Test {
 protected:
  void SetUp() override {
    if (cuda_devices().empty()) GTEST_SKIP() << "no GPU here";
    cuda::check(cudaMalloc(&out_, kCount * sizeof(uint32_t)), "allocate");
  }
  void TearDown() override { cudaFree(out_); }

  template <class Function>
  void agrees(const char* what) {
    std::vector<uint32_t> got(kCount);
    cuda::check(cudaMemset(out_, 0xa5, kCount * sizeof(uint32_t)), "poison");
    evaluate<Function><<<264, 256>>>(out_, kCount);
    cuda::check(cudaGetLastError(), "launch");
    cuda::check(cudaMemcpy(got.data(), out_, kCount * sizeof(uint32_t), cudaMemcpyDeviceToHost),
                "copy");
    uint32_t wrong = 0, first = 0;
    for (uint32_t i = kCount; i-- > 0;)
      if (got[i] != Function::of(input(i))) ++wrong, first = input(i);
    EXPECT_EQ(wrong, 0u) << what << ": of " << kCount << ", the first is 0x" << std::hex << first;
  }

  static constexpr uint32_t kCount = 1u << 22;
  uint32_t* out_ = nullptr;
};

TEST_F(FormatsOnDevice, ElementsDecodeEncodeAndRoundStochastically) {
  for_each(formats::Elements{}, [&]<class Element>() {
    const std::string what(name(Element::kDType));
    agrees<Encode<Element>>((what + " encode").c_str());
    agrees<Decode<Element>>((what + " decode").c_str());
    if constexpr (sizeof(typename Element::Code) == 1)
      agrees<EncodeStochastic<Element>>((what + " stochastic").c_str());
  });
  for_each(TypeList<formats::E4m3, formats::E5m2, formats::E2m1>{}, [&]<class Element>() {
    const std::string what(name(Element::kDType));
    agrees<EncodeEight<Element>>((what + " encode eight").c_str());
    agrees<DecodeEight<Element>>((what + " decode eight").c_str());
  });
  agrees<EncodeEightStochastic>("e2m1 encode eight stochastic");
  agrees<Decode<formats::E8m0>>("e8m0 decode");
}

TEST_F(FormatsOnDevice, ScalesAndMultipliers) {
  for_each(formats::All{}, [&]<class Format>() {
    if constexpr (!Format::kIsPlain) {
      using Element =
          std::conditional_t<Format::kInfo.element == DType::kE2m1, formats::E2m1, formats::E4m3>;
      agrees<BlockOf<Format, Element, false>>(Format::kInfo.name.data());
      agrees<BlockOf<Format, Element, true>>(Format::kInfo.name.data());
      if constexpr (Format::kInfo.takes_e5m2)
        agrees<BlockOf<Format, formats::E5m2, true>>(Format::kInfo.name.data());
    }
  });
}

TEST_F(FormatsOnDevice, Reciprocals) {
  agrees<Reciprocal<0, 0>>("reciprocal");
  agrees<Reciprocal<1, 0>>("reciprocal");
  agrees<Reciprocal<0, 1>>("reciprocal");
  agrees<Reciprocal<1, 1>>("reciprocal");
  agrees<Reciprocal<0, 3>>("reciprocal");
  agrees<Reciprocal<1, 3>>("reciprocal");
  agrees<Reciprocal<1, 124>>("reciprocal");
  agrees<Reciprocal<0, -1u>>("reciprocal");
  agrees<Reciprocal<1, -1u>>("reciprocal");
  agrees<Reciprocal<0, -125u>>("reciprocal");
  agrees<Reciprocal<1, -125u>>("reciprocal");
}

TEST_F(FormatsOnDevice, HadamardAndPhilox) {
  agrees<Hadamard>("hadamard");
  agrees<Philox>("philox");
}

}  // namespace
}  // namespace cadre
