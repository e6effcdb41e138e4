#include "cadre/device.h"

#include <gtest/gtest.h>
#include <omp.h>

#include "cadre/error.h"

namespace cadre {
namespace {

std::string error_of(std::string_view word) {
  try {
    parse_device(word);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "no error";
}

TEST(Device, ThisCpuCountsTheThreadsOfOpenMp) {
  const int threads = omp_get_max_threads();
  omp_set_num_threads(3);
  const Device got = this_cpu();
  omp_set_num_threads(threads);
  EXPECT_EQ(got, (Device{DeviceKind::kCpu, 0, 0, 3, 0}));
  EXPECT_EQ(to_string(got), "cpu");
}

TEST(Device, WithoutTheNumberThatAColonSaysIsNone) {
  EXPECT_EQ(error_of("cuda:"),
            "device: name is 'cuda:', must be cpu, cuda, cuda:<index>, sm_80, sm_90 or sm_100");
}

TEST(Device, ArchitecturesPlanWithoutAGpu) {
  for (const int sm : {80, 90, 100}) {
    const std::string word = text("sm_", sm);
    const Device got = parse_device(word);
    EXPECT_EQ(to_string(got), word);
    EXPECT_EQ(got.kind, DeviceKind::kCuda);
    EXPECT_EQ(got.sm, sm);
    EXPECT_GE(got.units, 108);
  }
  EXPECT_EQ(parse_device("sm_90").smem_bytes, 232448);  // what Hopper's programming guide states
  EXPECT_EQ(parse_device("sm_80").smem_bytes, 166912);
}

TEST(Device, WordsNameTheDevicesOfThisMachine) {
  EXPECT_EQ(parse_device("cpu"), this_cpu());
  const std::vector<Device> devices = cuda_devices();
  for (size_t i = 0; i < devices.size(); ++i) EXPECT_EQ(parse_device(text("cuda:", i)), devices[i]);
  const std::string beyond = text("cuda:", devices.size());
  EXPECT_EQ(error_of(beyond),
            text("device: '", beyond, "' is not here, must be one of the ", devices.size(),
                 " CUDA devices that this build and this machine show; to plan without one, name "
                 "an architecture such as sm_90"));
}

TEST(Device, ErrorsNameTheWords) {
  EXPECT_EQ(error_of("gpu"),
            "device: name is 'gpu', must be cpu, cuda, cuda:<index>, sm_80, sm_90 or sm_100");
  for (const std::string_view digits : {"-1", "x", "1x", " 1", "99999999999999"})
    EXPECT_EQ(error_of(text("cuda:", digits)), text("device: index of 'cuda:", digits, "' is '",
                                                    digits, "', must be a number, 0 or more"));
  EXPECT_NE(error_of("cuda:"), "no error");
  EXPECT_NE(error_of(""), "no error");
}

}  // namespace
}  // namespace cadre
