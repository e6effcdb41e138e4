#include "bench/check.h"

#include <algorithm>

#include "bench/compare.h"
#include "bench/mirror.h"
#include "bench/visit.h"

namespace cadre::bench {
namespace {

// Layout of the second round: extra elements between rows, and bytes before the first.
struct Gaps {
  int64_t row_gap, shift_bytes;
};

// On the CPU rows keep the alignment of their elements alone, on a GPU also what TMA requires.
template <class Problem>
Gaps gaps(const Problem&, const Device& device) {
  return {device.kind == DeviceKind::kCpu ? 5 : 16, 0};
}

// No more alignment than the problem promises. Where TMA cannot load the rows anyway, some of them
// start at a multiple of 16 bytes and others do not.
Gaps gaps(const GroupedGemmProblem& p, const Device& device) {
  if (p.align < 16) return {5 * std::max<int64_t>(1, p.align / 2), p.align};
  if (p.n % 8 != 0 || p.k % 8 != 0) return {5, 0};
  return gaps<GroupedGemmProblem>(p, device);
}

template <class AnyPlan, class AnyCase>
void run_case(const AnyPlan& chosen, AnyCase& c) {
  run(chosen, c.args, c.buffers->workspace(chosen.workspace_bytes), Stream{});
}

// On an accelerator over a copy of the case, if there is one. The workspace is poisoned like every
// buffer; a raw one is memory that nobody has written.
template <class AnyPlan, class AnyCase>
void run_case(const AnyPlan& chosen, AnyCase& c, Accelerator* accelerator, bool raw_workspace) {
  if (accelerator == nullptr) return run_case(chosen, c);
  const int64_t bytes = chosen.workspace_bytes;
  const Workspace poisoned = raw_workspace ? Workspace{} : c.buffers->workspace(bytes);
  const Mirror mirror(*c.buffers, *accelerator);
  const DeviceMemory raw(*accelerator, raw_workspace ? bytes : 0);
  run(chosen, mirror.moved(c.args),
      raw_workspace ? Workspace{raw.data(), bytes} : mirror.moved(poisoned), accelerator->stream());
  mirror.fetch();
}

template <class AnyCase>
void compare_outputs(const AnyCase& got, const AnyCase& want, const std::vector<Magnitude>& sizes,
                     const std::vector<std::vector<std::byte>>& before, CheckReport& report) {
  for (size_t i = 0; i < got.outputs.size(); ++i) {
    const Difference d = compare(got.outputs[i], want.outputs[i], sizes[i], before[i]);
    report.error_of_bound = std::max(report.error_of_bound, d.of_bound);
    if (!d.good() && report.good()) report.fault = d.where;
  }
  if (report.good() && !got.buffers->canaries_live())
    report.fault = "memory beside a buffer was written";
}

template <class AnyCase>
void compare_bits(const AnyCase& first, const AnyCase& second, CheckReport& report) {
  for (size_t i = 0; i < first.outputs.size() && report.good(); ++i)
    if (snapshot(first.outputs[i]) != snapshot(second.outputs[i]))
      report.fault = first.outputs[i].name + " has other bits in a second run";
}

// What the outputs must be, within their bounds: those of the CPU's reference. What is fused is so
// bit for bit: as one after the other on the same device; and what is scattered, as the product.
template <class Problem>
void run_reference(Case<Problem>& c, const Draw& draw, const Device& device,
                   Accelerator* accelerator) {
  if constexpr (std::is_same_v<Problem, GroupedGemmProblem>)
    if (c.problem.scatter) {
      auto rows = make_case(without_gather(c.problem), draw);
      run_case(plan(rows.problem, device), rows, accelerator, false);
      return scatter_rows(rows, c);
    }
  if (!is_composed(c.problem)) return run_case(plan(c.problem, this_cpu(), "cpu_reference"), c);
  run_case(plan(c.problem, device, "composed"), c, accelerator, false);
}

template <class Problem>
void permute_first(Case<Problem>&) {}

template <class AnyPlan>
void check_draw(const AnyPlan& chosen, const Draw& draw, Accelerator* accelerator,
                CheckReport& report) {
  const auto& problem = chosen.problem;
  auto want = make_case(problem, draw);
  permute_first(want);
  std::vector<Magnitude> sizes = magnitudes(want);
  for (Magnitude& size : sizes) size.roundings += roundings_of_adder(chosen.fraction_bits);
  std::vector<std::vector<std::byte>> before;
  for (const Output& out : want.outputs) before.push_back(snapshot(out));
  run_reference(want, draw, chosen.device, accelerator);
  auto got = make_case(problem, draw);
  run_case(chosen, got, accelerator, draw.raw_workspace);
  compare_outputs(got, want, sizes, before, report);
  for (const Output& out : got.outputs) report.digest.add(out);
  if (!report.good() || !chosen.exact) return;
  auto again = make_case(problem, draw);
  run_case(chosen, again, accelerator, draw.raw_workspace);
  compare_bits(got, again, report);
}

template <class Problem>
CheckReport check_problem(const Problem& problem, Draw draw, std::string_view only,
                          const Device& device) {
  const auto chosen = plan(problem, device, only);
  parse_distribution(draw.offsets, experts_of(problem), draw.seed);  // though nothing may be drawn
  const auto accelerator = open_accelerator(device);
  CheckReport report{.problem = to_string(problem), .plan = std::string(chosen.name)};
  for (const Gaps& round : {Gaps{}, gaps(problem, device)}) {
    draw.row_gap = round.row_gap;
    draw.shift_bytes = round.shift_bytes;
    if (report.good()) check_draw(chosen, draw, accelerator.get(), report);
  }
  return report;
}

}  // namespace

CheckReport check(std::string_view problem, const Draw& draw, std::string_view only,
                  const Device& device) {
  return visit_problem(problem,
                       [&](const auto& p) { return check_problem(p, draw, only, device); });
}

}  // namespace cadre::bench
