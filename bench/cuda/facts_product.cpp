// The rate of dense products.
#include "bench/cuda/cublas.h"
#include "bench/cuda/facts.h"
#include "cadre/error.h"

namespace cadre::bench {
namespace {

struct Product {
  Cublas::Sizes sizes;
  const char* name;
};
constexpr Product kProducts[] = {
    {{8192, 8192, 8192}, "square of 8192"},  {{16384, 28672, 4096}, "mixtral8x7b fc1"},
    {{65536, 4096, 7168}, "dsv3_ep8 fc1"},   {{65536, 1536, 2048}, "qwen3_30b fc1"},
    {{32768, 5760, 2880}, "gptoss120b fc1"},
};

}  // namespace

void add_product_facts(Accelerator& accelerator, std::vector<Fact>& list) {
  const auto stream = static_cast<cudaStream_t>(accelerator.stream().handle);
  const auto cublas = Cublas::open(stream);
  if (!cublas) return;
  for (const Product& p : kProducts) {
    const auto [m, n, k] = p.sizes;
    const DeviceMemory a(accelerator, 2 * m * k), b(accelerator, 2 * n * k),
        out(accelerator, 2 * m * n);
    fill_random_bf16(a.as<void>(), m * k, stream);
    fill_random_bf16(b.as<void>(), n * k, stream);
    const double us = device_us(accelerator, [&] {
      cublas->multiply(p.sizes, {a.as<void>(), DType::kBf16, k, false},
                       {b.as<void>(), DType::kBf16, k, true},
                       {out.as<void>(), DType::kBf16, n, false}, 0);
    });
    list.push_back({text("dense bf16 product, ", p.name),
                    2.0 * double(m) * double(n) * double(k) / us / 1e6, "TFLOP/s",
                    text("cuBLAS, ", m, " x ", n, " x ", k, ", random numbers")});
  }
}

}  // namespace cadre::bench
