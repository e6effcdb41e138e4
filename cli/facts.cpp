// `cadre facts`: what a GPU can do, measured.
#include <CLI/CLI.hpp>
#include <fstream>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "bench/facts.h"
#include "cadre/error.h"
#include "cli/record.h"
#include "cli/table.h"
#include "cli/verb.h"

namespace cadre::cli {
namespace {

struct Options {
  std::string device = "cuda", json;
  int ranks = 1;
};

/// What two GPUs of this machine do with each other: that device, and the next.
std::vector<bench::Fact> link_facts(const Device& device) {
  const std::vector<Device>& all = cuda_devices();
  if (all.size() < 2)
    throw UsageError(text("facts: ranks is 2, must be 1; this machine has ", all.size(), " GPU"));
  const size_t next = (size_t(device.index) + 1) % all.size();
  return bench::measure_link_facts(device, all[next]);
}

int tell_facts(const Options& options) {
  const Device device = bench::running_gpu(options.device);
  std::ofstream file;
  if (!options.json.empty()) file = open_record("facts", options.json);
  const std::vector<bench::Fact> facts =
      options.ranks == 2 ? link_facts(device) : bench::measure_facts(device);
  Table table({"fact", "value", "unit", ""});
  for (const bench::Fact& f : facts) table.add({f.name, text(f.value), f.unit, f.how});
  table.print(std::cout);
  const std::string where = (options.ranks == 2 ? "2 x " : "") + machine(device);
  if (file.is_open()) write_record("facts", options.json, file, record(facts, where));
  return 0;
}

}  // namespace

Action declare_facts(CLI::App& app) {
  const auto options = std::make_shared<Options>();
  app.add_option("--device", options->device, "cuda or cuda:1")->capture_default_str();
  app.add_option("--ranks", options->ranks, "2: what crosses between two GPUs")
      ->check(CLI::IsMember({1, 2}))
      ->capture_default_str();
  app.add_option("--json", options->json, "write a record of all facts to this file");
  app.footer(
      "\nBandwidths, the rate of dense products and the cost of launches, as the kernels of this\n"
      "library use them. docs/facts.md has those of the recorded GPUs.\n\n"
      "  cadre facts --device cuda --json facts.json\n"
      "  cadre facts --ranks 2");
  return [options] { return tell_facts(*options); };
}

}  // namespace cadre::cli
