// Bandwidths of ordinary loads and of copies.
#include "bench/cuda/check.h"
#include "bench/cuda/facts.h"

namespace cadre::bench {
namespace {

constexpr int kThreads = 512, kBlocksPerSm = 4;
constexpr int64_t kLarge = int64_t(4) << 30, kCached = int64_t(24) << 20;
constexpr int kSharedWords = 2048;  // of 16 bytes

__device__ uint32_t scrambled(uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return uint32_t(x >> 33);
}

__global__ void fill_kernel(uint16_t* data, int64_t count) {
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    const float value = float(int32_t(scrambled(uint64_t(i) + 1) << 1)) * 0x1p-31f;
    data[i] = uint16_t(__float_as_uint(value) >> 16);
  }
}

__device__ uint4 folded(uint4 a, uint4 b) { return {a.x ^ b.x, a.y ^ b.y, a.z ^ b.z, a.w ^ b.w}; }
__device__ void keep(const uint4& sum, uint4* out) {
  if ((sum.x & sum.y & sum.z & sum.w) == 0x12345678u) *out = sum;
}

// Reads `count` words of 16 bytes `passes` times, with four loads in flight a thread.
__global__ void __launch_bounds__(kThreads)
    read_kernel(const uint4* data, int64_t count, int passes, uint4* out) {
  const int64_t step = int64_t(gridDim.x) * kThreads;
  uint4 sum{};
  for (int pass = 0; pass < passes; ++pass)
    for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i + 3 * step < count;
         i += 4 * step) {
      uint4 some[4];
      for (int j = 0; j < 4; ++j) some[j] = __ldcg(data + i + j * step);
      for (int j = 0; j < 4; ++j) sum = folded(sum, some[j]);
    }
  keep(sum, out);
}

__global__ void __launch_bounds__(kThreads) shared_kernel(int passes, uint4* out) {
  __shared__ uint4 words[kSharedWords];
  for (int i = int(threadIdx.x); i < kSharedWords; i += kThreads) words[i] = {uint32_t(i), 1, 2, 3};
  __syncthreads();
  uint4 sum{};
  for (int pass = 0; pass < passes; ++pass)  // each from another place, so that all are done
#pragma unroll
    for (int i = 0; i < kSharedWords; i += kThreads)
      sum = folded(sum, words[(i + pass + int(threadIdx.x)) % kSharedWords]);
  keep(sum, out);
}

double gb_s(double bytes, double us) { return bytes / us / 1e3; }

void add_read(const FactRun& run, const char* name, const DeviceMemory& data, int64_t bytes,
              int passes) {
  const int blocks = run.device.units * kBlocksPerSm;
  // The loop leaves out what is no multiple of four steps.
  const int64_t four = int64_t(4) * blocks * kThreads, words = bytes / 16 / four * four;
  const double us = device_us(run.accelerator, [&] {
    read_kernel<<<blocks, kThreads, 0, run.stream()>>>(data.as<uint4>(), words, passes,
                                                       data.as<uint4>());
    check_cuda(cudaGetLastError(), "launch a read");
  });
  run.add(name, gb_s(16.0 * double(words) * passes, us), "GB/s",
          text(passes, " times ", words * 16, " bytes by 16-byte loads; bytes read"));
}

}  // namespace

void fill_random_bf16(void* data, int64_t count, cudaStream_t stream) {
  fill_kernel<<<1024, 256, 0, stream>>>(static_cast<uint16_t*>(data), count);
  check_cuda(cudaGetLastError(), "launch a fill");
}

void add_memory_facts(const FactRun& run) {
  const DeviceMemory from(run.accelerator, kLarge), to(run.accelerator, kLarge);
  fill_random_bf16(from.as<void>(), kLarge / 2, run.stream());
  const double us = device_us(
      run.accelerator, [&] { run.accelerator.copy(to.as<void>(), from.as<void>(), kLarge); });
  run.add("copy", gb_s(2.0 * double(kLarge), us), "GB/s",
          text("cudaMemcpyAsync of ", kLarge, " bytes; bytes read and written"));
  add_read(run, "read", from, kLarge, 1);
  add_read(run, "read of L2", from, kCached, 64);
  const int blocks = run.device.units * kBlocksPerSm, passes = 4096;
  const double shared_us = device_us(run.accelerator, [&] {
    shared_kernel<<<blocks, kThreads, 0, run.stream()>>>(passes, to.as<uint4>());
    check_cuda(cudaGetLastError(), "launch a read of shared memory");
  });
  run.add("read of shared memory", gb_s(16.0 * kSharedWords * passes * blocks, shared_us), "GB/s",
          "all SMs together, 16 bytes a thread; bytes read");
}

}  // namespace cadre::bench
