// `cadre bench`: correctness first, then times beside peers.
#include <omp.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>

#include "bench/accelerator.h"
#include "bench/check_ranks.h"
#include "bench/cost.h"
#include "bench/measure.h"
#include "bench/measure_ranks.h"
#include "bench/rank_route.h"
#include "cadre/error.h"
#include "cadre/expert_parallel.h"
#include "cli/numbers.h"
#include "cli/problem.h"
#include "cli/record.h"
#include "cli/shapes.h"
#include "cli/verb.h"

namespace cadre::cli {
namespace {

struct Options {
  std::vector<std::string> words;
  std::vector<std::string> distributions = {"uniform"};
  std::string file, json;
  bench::MeasureOptions measure;
  std::string device = "cpu";
  int threads = 0;
  bool host_time = false;
  int limit = 1800;
};

// Rates of a GPU are printed in the unit that has fewer digits.
struct Unit {
  const char* name;
  double flops_in_ns;
};
Unit unit_of(const Device& device) {
  return device.kind == DeviceKind::kCpu ? Unit{"GFLOP/s", 1} : Unit{"TFLOP/s", 1000};
}

void print(const bench::Measurement& m, const std::string& routing, const Unit& unit) {
  std::printf("%s  offsets=%s%s%s\n", m.problem.c_str(), routing.c_str(),
              m.call.empty() ? "" : "  ", m.call.c_str());
  if (!m.check.good()) {
    std::printf("  WRONG, so not timed: %s  %s\n", m.check.fault.c_str(), m.plan.c_str());
    return;
  }
  std::printf("  %-14s %12s %12s %12s %10s %8s  %s\n", m.plan.c_str(), "median us", "p10", "p90",
              m.flops > 0 ? unit.name : "", "GB/s", "our speed");
  for (const bench::Timing& t : m.timings) {
    const double ns = t.us.median * 1000;
    std::printf("  %-14s %12.1f %12.1f %12.1f ", t.name.c_str(), t.us.median, t.us.p10, t.us.p90);
    const bool is_twin = t.name.starts_with("cadre ");  // of other formats: not the same work
    if (m.flops > 0 && !is_twin)
      std::printf("%10.1f ", m.flops / ns / unit.flops_in_ns);
    else
      std::printf("%10s ", "");
    if (is_twin)
      std::printf("%8s", "");
    else
      std::printf("%8.1f", m.bytes / ns);
    if (t.name != "cadre") std::printf("  %.2f of it: %s", t.speed, t.what.c_str());
    std::printf("\n");
    if (t.sm_mhz > 0)
      std::printf("  %-14s %.0f MHz, %.0f W, %.4g J a launch\n", "", t.sm_mhz, t.watts, t.joules);
  }
  if (m.is_of_ranks)
    std::printf("  %.0f bytes delivered, %.0f of them crossed; bits of %s, with T = %lld\n",
                m.delivered_bytes, m.crossed_bytes, bench::compared_with(m.problem),
                static_cast<long long>(m.checked_rows));
  else if (!m.call.empty())
    std::printf("  same bits in two runs\n");
  else if (m.check.is_reference())
    std::printf("  this is the reference itself: nothing to compare it with\n");
  else if (m.checked_elements)
    std::printf("  error %.3f of bound, in %lld elements\n", m.check.error_of_bound,
                static_cast<long long>(m.checked_elements));
  else
    std::printf("  error %.3f of bound, with R = %lld\n", m.check.error_of_bound,
                static_cast<long long>(m.checked_rows));
  if (!m.absent_peers.empty()) std::printf("  %s\n", m.absent_peers.c_str());
}

std::vector<Shape> wanted(const Options& options) {
  if (options.words.empty() == options.file.empty())
    throw UsageError(
        "bench: give either a PROBLEM or --file, such as 'cadre bench grouped_gemm "
        "fprop R=2048 N=512 K=512 E=8'");
  return options.file.empty() ? shapes_of(options.words) : read_shapes(options.file);
}

// Calls `work(shape, distribution)` for every case.
template <class Work>
void for_each_case(Options& options, const std::vector<Shape>& shapes, Work&& work) {
  for (const Shape& shape : shapes)
    for (const std::string& distribution : options.distributions) {
      options.measure.draw.offsets = distribution;
      at_place(shape, [&] { work(shape, distribution); });
    }
}

template <class AnyCase>
void write(std::ofstream& file, const std::vector<AnyCase>& cases, const Options& options) {
  if (!file.is_open()) return;
  write_record("bench", options.json, file, record(cases, machine(options.measure.device)));
}

/// What times of the host do not hear.
void require_host_options(const CLI::App& app) {
  for (const char* name : {"--only", "--beside", "--repeat", "--load"})
    if (app.count(name) > 0)
      throw UsageError(text("bench: ", name, " is given, must not be with --host-time"));
}

int time_host(const Options& options, const std::vector<Shape>& shapes) {
  if (options.distributions.size() > 1)
    throw UsageError(text("bench: --offsets are ", options.distributions.size(),
                          ", must be one with --host-time"));
  std::ofstream file;
  if (!options.json.empty()) file = open_record("bench", options.json);
  bench::HostTimeOptions how{.device = options.measure.device, .draw = options.measure.draw};
  how.draw.offsets = options.distributions.front();
  for (const Shape& shape : shapes)
    at_place(shape, [&] {
      bench::require_within("bench", shape.problem,
                            bench::seconds_to_time_host(shape.problem, how.device), options.limit);
    });
  std::vector<HostCase> cases;
  for (const Shape& shape : shapes)
    for (const bench::HostTime& t :
         at_place(shape, [&] { return bench::host_times(shape.problem, how); })) {
      if (cases.empty()) std::printf("%10s %10s  call\n", "median us", "p90");
      std::printf("%10.2f %10.2f  %-9s %-24s %s\n", t.us.median, t.us.p90, t.call.c_str(),
                  t.plan.c_str(), t.problem.c_str());
      std::fflush(stdout);
      cases.push_back({t, shape.layer});
      write(file, cases, options);
    }
  return 0;
}

void require_measurable_ranks(const std::string& problem, const bench::MeasureOptions& options) {
  if (!options.beside.empty())
    throw UsageError(text("bench: --beside is '", options.beside,
                          "', must not be given for ranks; they run beside a copy [", problem,
                          "]"));
  bench::plan_of_ranks(problem, options.device, options.only);
}

/// Times of other sizes would be compared with ours. A gathered problem has sizes that one without
/// has not.
void require_same_sizes(const std::string& problem, const std::string& beside) {
  std::istringstream words(beside);
  for (std::string word; words >> word;)
    for (const char* size : {"R", "N", "K", "T", "H", "F", "C", "E", "top_k", "shared_F"})
      if (word.substr(0, word.find('=')) == size &&
          (' ' + problem).find(text(' ', size, '=')) != problem.npos)
        throw UsageError(text("bench: --beside is '", beside, "', must not have ", size,
                              "; a problem runs beside one of its sizes"));
}

void require_measurable(const std::string& problem, const bench::MeasureOptions& options) {
  const Subject subject = subject_of(problem);
  if (subject.is_of_ranks()) return require_measurable_ranks(problem, options);
  require_same_sizes(problem, options.beside);
  if (!subject.layer) return bench::require_measurable(problem, options);
  if (!options.only.empty())
    throw UsageError(text("bench: --only is '", options.only,
                          "', must not be given for a layer; its plan takes a route [", problem,
                          "]"));
  const auto require_plan = [&](const std::string& words) {
    const LayerExplanation e = subject.layer->explain(words, options.device);
    if (e.plan.empty()) throw Unsupported(e.refusals);
  };
  require_plan(problem);
  if (!options.beside.empty()) require_plan(bench::with_words(problem, options.beside));
}

std::vector<bench::Measurement> measure(const std::string& problem,
                                        const bench::MeasureOptions& options) {
  const Subject subject = subject_of(problem);
  if (subject.is_of_ranks()) return bench::measure_ranks(problem, options);
  if (subject.layer) return bench::measure_layer(problem, options);
  return {bench::measure(problem, options)};
}

int measure_all(Options options) {
  const std::vector<Shape> shapes = wanted(options);
  if (options.threads > 0) omp_set_num_threads(options.threads);
  prepare_for_ranks(shapes);
  const Device device = options.measure.device = bench::running_device(options.device);
  if (options.host_time) return time_host(options, shapes);
  for_each_case(options, shapes, [&](const Shape& shape, const std::string&) {
    require_measurable(shape.problem, options.measure);
    bench::require_within("bench", shape.problem,
                          bench::seconds_to_measure(shape.problem, options.measure), options.limit);
  });
  std::ofstream file;
  if (!options.json.empty()) file = open_record("bench", options.json);
  std::vector<Case> cases;
  bool good = true;
  for_each_case(options, shapes, [&](const Shape& shape, const std::string& distribution) {
    for (const bench::Measurement& m : measure(shape.problem, options.measure)) {
      cases.push_back({m, distribution, shape.layer});
      print(m, distribution, unit_of(device));
      std::fflush(stdout);
      good = good && m.check.good();
      write(file, cases,
            options);  // after each, so that whoever stops this keeps what was measured
    }
  });
  return good ? 0 : 1;
}

constexpr const char* kFooter = R"(
Every implementation is checked against the reference first, on as many rows as the reference can do
in about a second; on a GPU a grouped_gemm of plain formats is checked as it is timed, in some of
its elements. Launches of ours and of the peers alternate on the same data: grouped_gemm runs beside
one dense product of equal work (oneDNN, cuBLAS) and on a GPU beside one cuBLAS product an expert in
a graph, everything else beside a copy of as many bytes. On a GPU times are those of the device.
A layer runs beside its own products without activations: forward of the layer with nothing to learn
beside its fprops, a step (forward and backward) beside all of them; two runs must have equal bits.
A layer that learns nothing has no step.
With cache_weights=yes that forward finds the weights quantised, and what is timed besides are four
steps, of which the first quantises them.
expert_parallel starts a process for each rank, and times dispatch and collect beside a copy, until
the last rank is through; on GPUs beside the same from a CUDA graph, too. --only collective times
the route by an engine: of memory that the processes share, of NCCL between GPUs. Delivered bytes
are rows where they belong, crossed ones those of them that come from another rank.
"our speed" is the median over launches of (the peer's time / our time). Exit code 1: a wrong
result, or no implementation takes the problem.

  cadre bench grouped_gemm fprop R=4096 N=1024 K=512 E=16 --offsets uniform,zipf:1.2
  cadre bench expert_parallel T=2048 top_k=4 H=1024 E=8 ranks=2 R=16384 --offsets uniform,gamma:1
  cadre bench expert_parallel T=256 top_k=2 H=512 E=8 ranks=2 block=512 --only collective
  cadre bench --file bench/shapes/h200_grouped_gemm.txt --device cuda
  cadre bench --file bench/shapes/host_time.txt --device cuda --host-time
  cadre bench --file bench/shapes/cpu_gemm.txt --json bench/results/my-machine-gemm.json)";

}  // namespace

Action declare_bench(CLI::App& app) {
  const auto options = std::make_shared<Options>();
  app.add_option("PROBLEM", options->words, "one problem, or several in quotes");
  app.add_option("--file", options->file, "a file with one problem a line; `# layer` behind it");
  app.add_option("--offsets", options->distributions,
                 "how rows fall to experts: uniform, zipf:S, gamma:S, onehot, or a file of counts")
      ->delimiter(',')
      ->allow_extra_args(false)  // or it would take the problem behind it
      ->capture_default_str();
  app.add_option("--json", options->json, "write a record of all cases to this file");
  app.add_option("--device", options->device, "cpu, cuda or cuda:1")->capture_default_str();
  app.add_option("--repeat", options->measure.contest.repeat, "launches of each contestant")
      ->check(CLI::Range(1, 1000000))
      ->capture_default_str();
  options->measure.contest.load_s = 2;
  app.add_option(
         "--load", options->measure.contest.load_s,
         "of a GPU: seconds of launches before a case is timed, half as many for the joules "
         "of each contestant; 0: neither")
      ->check(CLI::Range(0.0, 600.0))
      ->capture_default_str();
  app.add_option("--limit", options->limit,
                 "seconds that a case may take, by an estimate from its size; 0: any")
      ->check(CLI::Range(0, 1000000))
      ->capture_default_str();
  app.add_option("--threads", options->threads, "threads to use; 0: as many as OpenMP would")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();
  app.add_option("--seed", options->measure.draw.seed, "of the random data")
      ->transform(a_seed())
      ->capture_default_str();
  app.add_option("--only", options->measure.only, "time this implementation, not the planned one");
  app.add_option("--beside", options->measure.beside,
                 "words such as 'format=bf16': the same problem with them runs as a peer");
  app.add_flag(
      "--host-time", options->host_time,
      "time what the host needs to enqueue a call, of grouped_linear, grouped_mlp and moe too");
  app.footer(kFooter);
  return [&app, options] {
    if (options->host_time) require_host_options(app);
    return measure_all(*options);
  };
}

}  // namespace cadre::cli
