// `cadre check`: implementations against the reference on random data.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <iostream>
#include <memory>

#include "bench/accelerator.h"
#include "bench/check.h"
#include "cadre/error.h"
#include "cli/problem.h"
#include "cli/shapes.h"
#include "cli/verb.h"

namespace cadre::cli {
namespace {

constexpr double kLive = 0.9;  // share of the rows that experts own; the rest is a poisoned tail

struct Options {
  std::vector<std::string> words;
  std::string file, only, device_word = "cpu";
  Device device;
  bench::Draw draw{.offsets = "uniform", .live = kLive};
};

bench::CheckReport check_and_print(const std::string& problem, const Options& options) {
  const bench::CheckReport r = bench::check(problem, options.draw, options.only, options.device);
  if (!r.good())
    std::printf("FAIL  %s  %s  %s\n", r.fault.c_str(), r.plan.c_str(), r.problem.c_str());
  else if (r.is_reference())
    std::printf("self  the reference only  %s\n", r.problem.c_str());
  else
    std::printf("good  %.3f of bound  %-16s %s\n", r.error_of_bound, r.plan.c_str(),
                r.problem.c_str());
  std::fflush(stdout);
  return r;
}

// Of a list, a GPU is asked for what it takes.
bool is_skipped(const std::string& problem, const Options& options) {
  if (!options.words.empty() || options.device.kind == DeviceKind::kCpu) return false;
  const Subject subject = subject_of(problem);
  if (!subject.operation || !subject.operation->explain(problem, options.device).plan.empty())
    return false;
  std::printf("none  no implementation on %s  %s\n", to_string(options.device).c_str(),
              problem.c_str());
  return true;
}

int check_all(Options options) {
  if (!options.words.empty() && !options.file.empty())
    throw UsageError("check: PROBLEM and --file are both given; give one of them");
  const auto shapes = !options.words.empty()  ? shapes_of(options.words)
                      : !options.file.empty() ? read_shapes(options.file)
                                              : built_in_shapes();
  options.device = bench::running_device(options.device_word);
  size_t failed = 0, alone = 0, skipped = 0;
  for (const Shape& shape : shapes) {
    if (is_skipped(shape.problem, options)) {
      ++skipped;
      continue;
    }
    const bench::CheckReport r = check_and_print(shape.problem, options);
    failed += !r.good();
    alone += r.is_reference();
  }
  std::printf("%zu checked, %zu failed", shapes.size() - skipped, failed);
  if (skipped) std::printf(", %zu have no implementation on the device", skipped);
  if (alone) std::printf(", %zu have the reference only: nothing to compare it with", alone);
  std::printf("\n");
  return failed ? 1 : 0;
}

constexpr const char* kFooter = R"(
The error is printed as a share of its bound, which is computed for every element from the formats:
gamma(roundings) * sum of |terms| + one step of the output. Codes, scales, offsets and moved rows
must equal the reference bit for bit. Tails are poisoned with NaN and must stay as they are. With
--device cuda the implementation runs on the GPU, the reference on the CPU; of a list, what the GPU
has no implementation for is told and left out. Exit code 1: a check failed.

  cadre check
  cadre check grouped_gemm fprop R=512 N=96 K=160 E=8 format=nvfp4
  cadre check "permute permute T=64 top_k=2 R=128 H=64 E=8" "offsets counts R=128 E=8"
  cadre check --device cuda
  cadre check --file bench/shapes/check.txt --offsets zipf:1.2 --seed 7)";

}  // namespace

Action declare_check(CLI::App& app) {
  const auto options = std::make_shared<Options>();
  app.add_option("PROBLEM", options->words, "problems; without any, a list of every operation");
  app.add_option("--file", options->file, "a file with one problem a line");
  app.add_option("--seed", options->draw.seed, "of the random data")->capture_default_str();
  app.add_option("--offsets", options->draw.offsets,
                 "how rows fall to experts: uniform, zipf:S, onehot, or a file of counts")
      ->capture_default_str();
  app.add_option("--device", options->device_word, "cpu, cuda or cuda:1")->capture_default_str();
  app.add_option("--only", options->only, "check this implementation, not the planned one");
  app.footer(kFooter);
  return [options] { return check_all(*options); };
}

}  // namespace cadre::cli
