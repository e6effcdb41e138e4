// `cadre check`: implementations against the reference on random data.
#include <omp.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>

#include "bench/accelerator.h"
#include "bench/check_layer.h"
#include "bench/check_ranks.h"
#include "bench/cost.h"
#include "bench/random_gemm.h"
#include "bench/rank_route.h"
#include "cadre/error.h"
#include "cli/numbers.h"
#include "cli/problem.h"
#include "cli/shapes.h"
#include "cli/verb.h"

namespace cadre::cli {
namespace {

constexpr double kSecondsOfARandomGemm = 0.1;  // of one core
constexpr double kLive = 0.9;  // share of the rows that experts own; the rest is a poisoned tail

struct Options {
  std::vector<std::string> words;
  std::string file, only, device_word = "cpu";
  Device device;
  int random = 0;
  bool digest = false;
  int limit = 1800;
  bench::Draw draw{.offsets = "uniform", .live = kLive};
};

// How many problems were checked, how many failed, and a hash of what all computed.
struct Tally {
  size_t checked = 0, failed = 0;
  bench::Digest digest{};
};

void count(const bench::CheckReport& r, const Options& options, Tally& tally) {
  ++tally.checked;
  tally.failed += !r.good();
  tally.digest.add(r.digest);
  if (!r.good())
    std::printf("FAIL  %s  %s  %s\n", r.fault.c_str(), r.plan.c_str(), r.problem.c_str());
  if (options.digest)
    std::printf("digest %s  %-16s %s\n", r.digest.text().c_str(), r.plan.c_str(),
                r.problem.c_str());
  std::fflush(stdout);
}

bench::CheckReport check_ranks_and_print(const std::string& problem, const Options& options) {
  const bench::RanksReport r =
      bench::check_ranks(problem, options.draw, options.device, options.only);
  if (!r.check.good()) return r.check;
  std::printf("same  bits as %s, %d routings  %s  %s\n", bench::compared_with(r.check.problem),
              r.routings, r.check.plan.c_str(), r.check.problem.c_str());
  if (r.overflows > 0)
    std::printf("      of these %d have rows without room, and are NaN on all ranks as they must\n",
                r.overflows);
  return r.check;
}

bench::CheckReport check_and_print(const std::string& problem, const Options& options) {
  bench::require_within("check", problem, bench::seconds_to_check(problem, options.only),
                        options.limit);
  const Subject subject = subject_of(problem);
  if (subject.is_of_ranks()) return check_ranks_and_print(problem, options);
  if (subject.layer) {
    if (!options.only.empty())
      throw UsageError(text("check: --only is '", options.only,
                            "', must not be given for a layer; its steps are planned one by one [",
                            problem, "]"));
    const bench::CheckReport r = bench::check_layer(problem, options.draw, options.device);
    if (r.good())
      std::printf("same  bits in two runs  %-16s %s\n", r.plan.c_str(), r.problem.c_str());
    return r;
  }
  const bench::CheckReport r = bench::check(problem, options.draw, options.only, options.device);
  if (!r.good()) return r;
  if (r.is_reference())
    std::printf("self  the reference only  %s\n", r.problem.c_str());
  else
    std::printf("good  %.3f of bound  %-16s %s\n", r.error_of_bound, r.plan.c_str(),
                r.problem.c_str());
  return r;
}

bool is_taken(const std::string& problem, const Device& device) {
  const Subject subject = subject_of(problem);
  if (subject.layer) return !subject.layer->explain(problem, device).plan.empty();
  if (subject.operation) return !subject.operation->explain(problem, device).plan.empty();
  try {
    bench::plan_of_ranks(problem, device, {});
  } catch (const Unsupported&) {
    return false;
  }
  return true;
}

// Of a list, a GPU checks what it has implementations for.
bool is_skipped(const std::string& problem, const Options& options) {
  if (!options.words.empty() || options.device.kind == DeviceKind::kCpu) return false;
  if (is_taken(problem, options.device)) return false;
  std::printf("none  no implementation on %s  %s\n", to_string(options.device).c_str(),
              problem.c_str());
  return true;
}

// Problems of grouped_gemm that the device takes, with counts of their own.
std::vector<bench::RandomGemm> draw_random(const Options& options) {
  constexpr int kMostDrawnForOne = 20;
  const auto is_taken = [&](const bench::RandomGemm& g) {
    return !find(g.problem, options.device, options.only).name.empty();
  };
  bench::RandomGemms gemms{unsigned(options.draw.seed)};
  std::vector<bench::RandomGemm> drawn;
  for (int i = 0; i < kMostDrawnForOne * options.random && int(drawn.size()) < options.random; ++i)
    if (bench::RandomGemm g = gemms.next(); is_taken(g)) drawn.push_back(std::move(g));
  if (drawn.empty()) plan(gemms.next().problem, options.device, options.only);  // which says why
  return drawn;
}

// Errors of a run are faults, since one thread's may not end all.
bench::CheckReport check_one(const bench::RandomGemm& g, const Options& options) {
  const std::string problem = to_string(g.problem);
  try {
    bench::Draw draw = g.draw;
    draw.raw_workspace = options.draw.raw_workspace;
    return bench::check(problem, draw, options.only, options.device);
  } catch (const std::exception& error) {
    return {.problem = problem, .fault = error.what()};
  }
}

// Checks random problems, some at a time; prints faults and what was drawn.
Tally check_random(const Options& options) {
  const std::vector<bench::RandomGemm> gemms = draw_random(options);
  std::vector<bench::CheckReport> reports(gemms.size());
#pragma omp parallel for schedule(dynamic)
  for (size_t i = 0; i < gemms.size(); ++i) reports[i] = check_one(gemms[i], options);
  Tally tally;
  for (const bench::CheckReport& r : reports) count(r, options, tally);
  bench::Tally kinds;
  for (const bench::RandomGemm& g : gemms) {
    ++kinds[text("by ", plan(g.problem, options.device, options.only).name)];
    bench::count(kinds, g);
  }
  std::printf("%zu random problems of grouped_gemm checked, %zu failed\n", gemms.size(),
              tally.failed);
  for (const auto& [what, times] : kinds) std::printf("  %6d  %s\n", times, what.c_str());
  tally.failed += int(gemms.size()) < options.random;
  return tally;
}

std::vector<Shape> listed(const Options& options) {
  if (!options.words.empty()) return shapes_of(options.words);
  if (!options.file.empty()) return read_shapes(options.file);
  return options.random ? std::vector<Shape>{} : built_in_shapes();
}

int check_all(Options options) {
  if (!options.words.empty() && !options.file.empty())
    throw UsageError("check: PROBLEM and --file are both given; give one of them");
  const std::vector<Shape> shapes = listed(options);
  prepare_for_ranks(shapes);
  options.device = bench::running_device(options.device_word);
  bench::require_within("check", text("--random ", options.random),
                        options.random * kSecondsOfARandomGemm / omp_get_max_threads(),
                        options.limit);
  Tally tally;
  size_t alone = 0, skipped = 0;
  for (const Shape& shape : shapes) {
    if (at_place(shape, [&] { return is_skipped(shape.problem, options); })) {
      ++skipped;
      continue;
    }
    const bench::CheckReport r =
        at_place(shape, [&] { return check_and_print(shape.problem, options); });
    count(r, options, tally);
    alone += r.is_reference();
  }
  std::printf("%zu checked, %zu failed", tally.checked, tally.failed);
  if (skipped) std::printf(", %zu have no implementation on the device", skipped);
  if (alone) std::printf(", %zu have the reference only: nothing to compare it with", alone);
  std::printf("\n");
  if (options.random) {
    const Tally random = check_random(options);
    tally.checked += random.checked;
    tally.failed += random.failed;
    tally.digest.add(random.digest);
  }
  if (options.digest)
    std::printf("digest %s  of all %zu problems\n", tally.digest.text().c_str(), tally.checked);
  return tally.failed ? 1 : 0;
}

constexpr const char* kFooter = R"(
The error is printed as a share of its bound, which is computed for every element from the formats:
gamma(roundings) * sum of |terms| + one step of the output. Codes, scales, offsets and moved rows
must equal the reference bit for bit. Tails are poisoned with NaN and must stay as they are. With
--device cuda the implementation runs on the GPU, the reference on the CPU; of a list, what the GPU
has no implementation for is reported and left out. --random draws problems of grouped_gemm with
adversarial counts, of those that the device takes. A layer has no reference: its forward and
backward must have the same bits twice. expert_parallel starts a process for each rank, on GPUs a
thread, all on one if there are fewer GPUs than ranks, and compares its bits with those of one rank
that has all tokens, for several routings; with --only collective rows travel by an engine in place
of a window. --digest prints a hash of the computed bits, so that two builds or machines can be
compared. Exit code 1: a check failed, or no implementation takes the problem.

  cadre check
  cadre check grouped_gemm fprop R=512 N=96 K=160 E=8 format=nvfp4
  cadre check "permute permute T=64 top_k=2 R=128 H=64 E=8" "offsets counts R=128 E=8"
  cadre check expert_parallel T=64 top_k=2 H=96 E=4 ranks=3 R=384 dtype=bf16
  cadre check expert_parallel T=64 top_k=2 H=96 E=4 ranks=3 block=128 --only collective
  cadre check --device cuda
  cadre check --file bench/shapes/layers.txt --digest
  cadre check --file bench/shapes/check.txt --random 300 --seed 5 --device cuda
  cadre check --file bench/shapes/check.txt --offsets zipf:1.2 --seed 7)";

}  // namespace

Action declare_check(CLI::App& app) {
  const auto options = std::make_shared<Options>();
  app.add_option("PROBLEM", options->words, "problems; without any, a list of every operation");
  app.add_option("--file", options->file, "a file with one problem a line");
  app.add_option("--seed", options->draw.seed, "of the random data")
      ->transform(a_seed())
      ->capture_default_str();
  app.add_option("--offsets", options->draw.offsets,
                 "how rows fall to experts: uniform, zipf:S, gamma:S, onehot, or a file of counts")
      ->capture_default_str();
  app.add_option("--device", options->device_word, "cpu, cuda or cuda:1")->capture_default_str();
  app.add_option("--random", options->random, "that many random problems of grouped_gemm besides")
      ->check(CLI::Range(0, 1000000))
      ->capture_default_str();
  app.add_option("--limit", options->limit,
                 "seconds that a problem may take, by an estimate from its size; 0: any")
      ->check(CLI::Range(0, 1000000))
      ->capture_default_str();
  app.add_flag("--digest", options->digest,
               "print a hash of the bits that every problem computed, and one of all");
  app.add_flag("--raw-workspace", options->draw.raw_workspace,
               "leave the workspace of a GPU as allocated, for initcheck of compute-sanitizer");
  app.add_option("--only", options->only, "check this implementation, not the planned one");
  app.footer(kFooter);
  return [options] { return check_all(*options); };
}

}  // namespace cadre::cli
