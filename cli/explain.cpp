// `cadre explain PROBLEM`: the plan of a problem on a device, and why others refused.
#include <CLI/CLI.hpp>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "cadre/device.h"
#include "cli/problem.h"
#include "cli/verb.h"

namespace cadre::cli {
namespace {

struct Options {
  std::vector<std::string> words;
  std::string device = "cpu";
  bool json = false;
};

void print(const Explanation& e, const Device& device) {
  std::cout << "problem    " << e.problem << "\ndevice     " << to_string(device) << "\n";
  if (e.plan.empty()) {
    std::cout << "plan       none: no implementation takes it\n";
  } else {
    std::cout << "plan       " << e.plan << "\nworkspace  " << e.workspace_bytes
              << " bytes\nexact      "
              << (e.exact ? "yes: same bits on every run, whatever else is in the batch"
                          : "no: bits may differ between runs")
              << "\n";
  }
  for (const Refusal& r : e.refusals) std::cout << "refused    " << r.name << ": " << r.why << "\n";
}

void print_json(const Explanation& e, const Device& device) {
  nlohmann::ordered_json refusals = nlohmann::ordered_json::array();
  for (const Refusal& r : e.refusals) refusals.push_back({{"name", r.name}, {"why", r.why}});
  nlohmann::ordered_json all = {{"problem", e.problem}, {"device", to_string(device)}};
  if (e.plan.empty()) {
    all["plan"] = nullptr;
  } else {
    all["plan"] = e.plan;
    all["workspace_bytes"] = e.workspace_bytes;
    all["exact"] = e.exact;
  }
  all["refusals"] = refusals;
  std::cout << all.dump(2) << "\n";
}

}  // namespace

Action declare_explain(CLI::App& app) {
  const auto options = std::make_shared<Options>();
  app.add_option("PROBLEM", options->words, "such as: grouped_gemm fprop R=64 N=32 K=16 E=4")
      ->required();
  app.add_option("--device", options->device, "cpu, cuda, cuda:1, or sm_80, sm_90, sm_100")
      ->capture_default_str();
  app.add_flag("--json", options->json, "print JSON");
  app.footer("\nExit code 1: no implementation takes the problem on that device.");
  return [options] {
    const std::string problem = joined(options->words);
    const Device device = parse_device(options->device);
    const Explanation e = operation_of(problem).explain(problem, device);
    (options->json ? print_json : print)(e, device);
    return e.plan.empty() ? 1 : 0;
  };
}

}  // namespace cadre::cli
