#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "cadre/device.h"
#include "cuda/check.h"

namespace cadre {
namespace {

TEST(CudaDevice, EveryDeviceOfTheDriverIsListed) {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
  const std::vector<Device> got = cuda_devices();
  ASSERT_EQ(got.size(), size_t(count));
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp want;
    ASSERT_EQ(cudaGetDeviceProperties(&want, i), cudaSuccess);
    EXPECT_EQ(got[size_t(i)],
              (Device{DeviceKind::kCuda, i, want.major * 10 + want.minor, want.multiProcessorCount,
                      int64_t(want.sharedMemPerBlockOptin)}));
  }
}

TEST(CudaDevice, FailureCodesBecomeDeviceErrors) {
  EXPECT_NO_THROW(cuda::check(cudaSuccess, "do nothing"));
  try {
    cuda::check(cudaErrorInvalidDevice, "count the CUDA devices");
    FAIL() << "no error";
  } catch (const DeviceError& error) {
    EXPECT_STREQ(error.what(),
                 "cuda: cannot count the CUDA devices: cudaErrorInvalidDevice, "
                 "invalid device ordinal");
  }
}

TEST(CudaDevice, OnlyAMissingDriverOrDeviceMeansNone) {
  for (const cudaError_t code : {cudaErrorNoDevice, cudaErrorInsufficientDriver})
    EXPECT_TRUE(cuda::means_no_device(code));
  for (const cudaError_t code :
       {cudaSuccess, cudaErrorSystemDriverMismatch, cudaErrorDevicesUnavailable,
        cudaErrorMemoryAllocation, cudaErrorInitializationError})
    EXPECT_FALSE(cuda::means_no_device(code));
}

}  // namespace
}  // namespace cadre
