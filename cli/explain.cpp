// `cadre explain PROBLEM`: the plan of a problem on a device, and why others refused.
#include <CLI/CLI.hpp>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "cadre/device.h"
#include "cadre/error.h"
#include "cadre/expert_parallel.h"
#include "cli/problem.h"
#include "cli/verb.h"

namespace cadre::cli {
namespace {

struct Options {
  std::vector<std::string> words;
  std::string device = "cpu", only;
  bool json = false;
};

using Json = nlohmann::ordered_json;

constexpr const char* kExact = "yes: same bits on every run, whatever else is in the batch";
constexpr const char* kNotExact = "no: bits may differ between runs";
constexpr const char* kNone = "none: no implementation takes it";

void print(const Explanation& e, const Device& device) {
  std::cout << "problem    " << e.problem << "\ndevice     " << to_string(device) << "\nplan       "
            << (e.plan.empty() ? kNone : e.plan) << "\n";
  if (!e.plan.empty())
    std::cout << "workspace  " << e.workspace_bytes << " bytes\nexact      "
              << (e.exact ? kExact : kNotExact) << "\n";
  for (const Refusal& r : e.refusals) std::cout << "refused    " << r.name << ": " << r.why << "\n";
}

void print_json(const Explanation& e, const Device& device) {
  Json refusals = Json::array();
  for (const Refusal& r : e.refusals) refusals.push_back({{"name", r.name}, {"why", r.why}});
  Json all = {{"problem", e.problem}, {"device", to_string(device)}, {"plan", nullptr}};
  if (!e.plan.empty()) {
    all["plan"] = e.plan;
    all["workspace_bytes"] = e.workspace_bytes;
    all["exact"] = e.exact;
  }
  all["refusals"] = refusals;
  std::cout << all.dump(2) << "\n";
}

void print(const LayerExplanation& e, const Device& device) {
  std::cout << "problem    " << e.problem << "\ndevice     " << to_string(device) << "\nplan       "
            << (e.plan.empty() ? kNone : e.plan) << "\n";
  if (e.plan.empty())
    std::cout << "refused    " << e.refusals << "\n";
  else
    std::cout << "exact      " << (e.exact ? kExact : kNotExact) << "\n\n" << e.steps;
}

Json memory(const LayerMemory& m) {
  return {{"forward_workspace_bytes", m.forward_workspace_bytes},
          {"backward_workspace_bytes", m.backward_workspace_bytes},
          {"wgrad_workspace_bytes", m.wgrad_workspace_bytes},
          {"saved_bytes", m.saved_bytes},
          {"pending_bytes", m.pending_bytes},
          {"weight_cache_bytes", m.weight_cache_bytes}};
}

void print_json(const LayerExplanation& e, const Device& device) {
  Json all = {{"problem", e.problem}, {"device", to_string(device)}, {"plan", nullptr}};
  if (e.plan.empty()) {
    all["refusals"] = e.refusals;
  } else {
    all["plan"] = e.plan;
    all["exact"] = e.exact;
    all["memory"] = memory(e.memory);
    all["kept_bytes_per_row"] = e.kept_bytes_per_row;
    all["steps"] = e.steps;
  }
  std::cout << all.dump(2) << "\n";
}

Json window(const WindowLayout& w) {
  return {{"experts", w.experts},     {"prob", w.prob}, {"tokens", w.tokens}, {"scales", w.scales},
          {"drow_prob", w.drow_prob}, {"rows", w.rows}, {"bytes", w.bytes}};
}

int explain_ranks(const std::string& problem, const Options& options) {
  const Device device = parse_device(options.device);
  const auto parsed = parse_expert_parallel_problem(problem);
  Json all = {{"problem", to_string(parsed)}, {"device", to_string(device)}, {"plan", nullptr}};
  std::string lines, refusals;
  try {
    const ExpertParallelPlan chosen = plan(parsed, device, options.only);
    all["plan"] = chosen.name;
    all["exact"] = chosen.exact;
    all["workspace_bytes"] = chosen.workspace_bytes;
    all["window"] = window(chosen.window);
    lines = text("plan       ", chosen.name, "\nexact      ", chosen.exact ? kExact : kNotExact,
                 "\n\n", explain(chosen));
  } catch (const Unsupported& refusal) {
    refusals = refusal.what();
    all["refusals"] = refusals;
    lines = text("plan       ", kNone, "\nrefused    ", refusals, "\n");
  }
  if (options.json)
    std::cout << all.dump(2) << "\n";
  else
    std::cout << "problem    " << to_string(parsed) << "\ndevice     " << to_string(device) << "\n"
              << lines;
  return refusals.empty() ? 0 : 1;
}

// Returns the exit code.
template <class Info>
int explain(const Info& info, const std::string& problem, const Options& options) {
  const Device device = parse_device(options.device);
  const auto e = info.explain(problem, device);
  if (options.json)
    print_json(e, device);
  else
    print(e, device);
  return e.plan.empty() ? 1 : 0;
}

}  // namespace

Action declare_explain(CLI::App& app) {
  const auto options = std::make_shared<Options>();
  app.add_option("PROBLEM", options->words, "such as: grouped_gemm fprop R=64 N=32 K=16 E=4")
      ->required();
  app.add_option("--device", options->device, "cpu, cuda, cuda:1, or sm_80, sm_90, sm_100")
      ->capture_default_str();
  app.add_option("--only", options->only, "of expert_parallel: this route, not the planned one");
  app.add_flag("--json", options->json, "print JSON");
  app.footer("\nExit code 1: no implementation takes the problem on that device.");
  return [options] {
    const std::string problem = joined(options->words);
    const Subject subject = subject_of(problem);
    if (subject.is_of_ranks()) return explain_ranks(problem, *options);
    if (!options->only.empty())
      throw UsageError(text("explain: --only is '", options->only,
                            "', must be left out; it is for expert_parallel [", problem, "]"));
    return subject.layer ? explain(*subject.layer, problem, *options)
                         : explain(*subject.operation, problem, *options);
  };
}

}  // namespace cadre::cli
