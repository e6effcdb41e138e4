// Every GPU implementation of grouped_gemm against the CPU's reference, on random problems: values
// within their bounds, tails and canaries, equal bits of two runs, rows with and without gaps.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <exception>

#include "bench/check.h"
#include "bench/random_gemm.h"
#include "cadre/error.h"
#include "cadre/operations.h"

namespace cadre {
namespace {

constexpr int kWanted = CADRE_RANDOM_PROBLEMS;  // to run
constexpr int kWantedOfPass = kWanted / 6;      // of them, of each pass
constexpr int kMostDrawn = 30000;
constexpr size_t kMostShown = 10;  // faults

std::vector<std::string_view> implementations(const Device& device) {
  for (const OperationInfo& operation : operation_list())
    if (operation.name == "grouped_gemm") return operation.implementations(device);
  return {};
}

bool takes(const GroupedGemmProblem& p, const Device& device, std::string_view implementation) {
  try {
    return plan(p, device, implementation).name == implementation;
  } catch (const Unsupported&) {
    return false;
  }
}

// A problem with the implementations that take it.
struct Task {
  bench::RandomGemm gemm;
  std::vector<std::string_view> names;
};

std::vector<Task> draw_tasks(const Device& device, const std::vector<std::string_view>& names) {
  std::vector<Task> tasks;
  bench::RandomGemms gemms(20261121);
  for (int drawn = 0; drawn < kMostDrawn && int(tasks.size()) < kWanted; ++drawn) {
    Task task{gemms.next(), {}};
    for (const std::string_view name : names)
      if (takes(task.gemm.problem, device, name)) task.names.push_back(name);
    if (!task.names.empty()) tasks.push_back(std::move(task));
  }
  return tasks;
}

// What is wrong; empty if nothing is.
std::string fault_of(const Task& task, std::string_view name, const Device& device) {
  const std::string problem = to_string(task.gemm.problem);
  try {
    const bench::CheckReport report = bench::check(problem, task.gemm.draw, name, device);
    return report.good() ? "" : text(report.fault, " by ", name, " [", problem, "]");
  } catch (const std::exception& error) {
    return text(error.what(), " thrown by ", name, " [", problem, "]");
  }
}

TEST(GroupedGemmOnDevice, EveryImplementationAgreesWithTheReference) {
  if (cuda_devices().empty()) GTEST_SKIP() << "no GPU here";
  const Device device = cuda_devices()[0];
  const std::vector<std::string_view> names = implementations(device);
  if (names.empty()) GTEST_SKIP() << "no implementation on the GPU yet";
  const std::vector<Task> tasks = draw_tasks(device, names);
  std::vector<std::string> faults;
#pragma omp parallel for schedule(dynamic)
  for (size_t i = 0; i < tasks.size(); ++i)
    for (const std::string_view name : tasks[i].names) {
      const std::string fault = fault_of(tasks[i], name, device);
#pragma omp critical
      if (!fault.empty()) faults.push_back(fault);
    }
  bench::Tally kinds, runs;
  for (const Task& task : tasks) {
    bench::count(kinds, task.gemm);
    for (const std::string_view name : task.names) ++runs[std::string(name)];
  }
  std::printf("%zu problems\n", tasks.size());
  for (const bench::Tally& tally : {runs, kinds})
    for (const auto& [what, times] : tally) std::printf("  %5d  %s\n", times, what.c_str());
  EXPECT_GE(int(tasks.size()), kWanted);
  for (const char* pass : {"fprop", "dgrad", "wgrad"})
    EXPECT_GE(kinds[pass], kWantedOfPass) << pass;
  EXPECT_EQ(faults.size(), 0u);
  for (size_t i = 0; i < std::min(kMostShown, faults.size()); ++i) ADD_FAILURE() << faults[i];
}

}  // namespace
}  // namespace cadre
