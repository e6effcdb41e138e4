// What `cadre explain` does with any words: parse, plan and print, for several devices. A plan has
// sizes that can be counted, and its problem, as it prints, has the same plan.
#include <cctype>
#include <cmath>
#include <string>
#include <string_view>

#include "cadre/expert_parallel.h"
#include "cadre/layers.h"
#include "cadre/operations.h"
#include "cli/problem.h"
#include "cli/verb.h"
#include "tests/fuzz/fuzz.h"

using namespace cadre;
using fuzz::accepted;
using fuzz::expect;

namespace {

/// More than the largest tensor's 2^44 elements of eight bytes take, some times over.
constexpr int64_t kMostBytes = int64_t{1} << 56;

void expect_size(int64_t bytes, const std::string& problem) {
  expect(bytes >= 0 && bytes < kMostBytes, bytes, " bytes for ", problem);
}

void expect_sizes(const Explanation& e) { expect_size(e.workspace_bytes, e.problem); }
void expect_sizes(const LayerExplanation& e) {
  const LayerMemory& m = e.memory;
  for (const int64_t bytes :
       {m.forward_workspace_bytes, m.backward_workspace_bytes, m.wgrad_workspace_bytes,
        m.saved_bytes, m.pending_bytes, m.weight_cache_bytes})
    expect_size(bytes, e.problem);
  expect(std::isfinite(e.kept_bytes_per_row) && e.kept_bytes_per_row >= 0, e.kept_bytes_per_row,
         " for ", e.problem);
  for (size_t at = e.steps.find(" -"); at != e.steps.npos; at = e.steps.find(" -", at + 1))
    expect(!std::isdigit(static_cast<unsigned char>(e.steps[at + 2])), e.steps);
}

bool same(const Explanation& a, const Explanation& b) {
  return a.problem == b.problem && a.plan == b.plan && a.workspace_bytes == b.workspace_bytes;
}
bool same(const LayerExplanation& a, const LayerExplanation& b) {
  return a.problem == b.problem && a.plan == b.plan && a.steps == b.steps;
}

template <class Info>
void look_at(const Info& info, std::string_view words, const Device& device) {
  decltype(info.explain(words, device)) first, second;
  if (!accepted([&] { first = info.explain(words, device); })) return;
  expect(!first.plan.empty() || !first.refusals.empty(), "no plan and no reason: ", words);
  expect_sizes(first);
  const bool planned = accepted([&] { second = info.explain(first.problem, device); });
  expect(planned && same(first, second), words, " and ", first.problem, " have other plans");
}

/// Problems of ranks, of which `cadre explain` prints the plan itself.
void look_at_ranks(std::string_view words, const Device& device) {
  const auto planned = [&](std::string_view problem) {
    return plan(parse_expert_parallel_problem(problem), device);
  };
  ExpertParallelPlan first, second;
  if (!accepted([&] { first = planned(words); })) return;
  const std::string printed = to_string(first.problem);
  expect(!explain(first).empty(), "nothing to say of ", words);
  for (const int64_t bytes : {first.workspace_bytes, first.window.bytes})
    expect_size(bytes, printed);
  const bool again = accepted([&] { second = planned(printed); });
  expect(again && explain(first) == explain(second), words, " and ", printed, " have other plans");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Device devices[] = {parse_device("cpu"), parse_device("sm_80"),
                                   parse_device("sm_90"), parse_device("sm_100")};
  const std::string_view words(reinterpret_cast<const char*>(data), size);
  cli::Subject subject;
  try {
    subject = cli::subject_of(words);
  } catch (const cli::UsageError&) {
    return 0;
  }
  for (const Device& device : devices) {
    if (subject.is_of_ranks()) {
      look_at_ranks(words, device);
      continue;
    }
    subject.layer ? look_at(*subject.layer, words, device)
                  : look_at(*subject.operation, words, device);
  }
  return 0;
}
