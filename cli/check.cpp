// `cadre check`: implementations against the reference on random data.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <iostream>
#include <memory>

#include "bench/check.h"
#include "cli/shapes.h"
#include "cli/verb.h"

namespace cadre::cli {
namespace {

constexpr double kLive = 0.9;  // share of the rows that experts own; the rest is a poisoned tail

struct Options {
  std::vector<std::string> words;
  std::string file, only;
  bench::Draw draw{.offsets = "uniform", .live = kLive};
};

bench::CheckReport check_and_print(const std::string& problem, const Options& options) {
  const bench::CheckReport r = bench::check(problem, options.draw, options.only);
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

int check_all(const Options& options) {
  if (!options.words.empty() && !options.file.empty())
    throw UsageError("check: PROBLEM and --file are both given; give one of them");
  const auto shapes = !options.words.empty()  ? shapes_of(options.words)
                      : !options.file.empty() ? read_shapes(options.file)
                                              : built_in_shapes();
  size_t failed = 0, alone = 0;
  for (const Shape& shape : shapes) {
    const bench::CheckReport r = check_and_print(shape.problem, options);
    failed += !r.good();
    alone += r.is_reference();
  }
  std::printf("%zu checked, %zu failed", shapes.size(), failed);
  if (alone) std::printf(", %zu have the reference only: nothing to compare it with", alone);
  std::printf("\n");
  return failed ? 1 : 0;
}

constexpr const char* kFooter = R"(
The error is printed as a share of its bound, which is computed for every element from the formats:
gamma(roundings) * sum of |terms| + one step of the output. Codes, scales, offsets and moved rows
must equal the reference bit for bit. Tails are poisoned with NaN and must stay as they are.
Exit code 1: a check failed.

  cadre check
  cadre check grouped_gemm fprop R=512 N=96 K=160 E=8 format=nvfp4
  cadre check "permute permute T=64 top_k=2 R=128 H=64 E=8" "offsets counts R=128 E=8"
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
  app.add_option("--only", options->only, "check this implementation, not the planned one");
  app.footer(kFooter);
  return [options] { return check_all(*options); };
}

}  // namespace cadre::cli
