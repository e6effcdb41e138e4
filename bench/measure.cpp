#include "bench/measure.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <sstream>

#include "bench/device_peer.h"
#include "bench/mirror.h"
#include "bench/peer.h"
#include "bench/sample.h"
#include "bench/visit.h"

namespace cadre::bench {
namespace {

// Bytes that the copies of a case exceed, and how many there are at most.
struct Rotation {
  double bytes;
  int64_t copies;
};
constexpr Rotation kOnCpu{64 << 20, 8}, kOnAccelerator{192 << 20, 32};
constexpr double kLiveInCheck = 0.9;
constexpr int64_t kSampled = 4096;  // elements that are checked of what is timed

// A case with the contestants that run on its data: ours first.
template <class AnyCase>
struct Arena {
  AnyCase data;
  std::unique_ptr<Mirror> mirror;  // null on the CPU
  std::vector<Peer> contestants;
  std::string absent;
  std::unique_ptr<AnyCase> twin{};  // the same problem with other words
  std::unique_ptr<Mirror> twin_mirror{};
  std::unique_ptr<AnyCase> product{};  // the same problem without gather and activation
  std::unique_ptr<Mirror> composed_mirror{}, product_mirror{};
};

// A run on a case, or on its mirror, which is made then.
template <class AnyPlan, class AnyCase>
std::function<void()> run_on(const AnyPlan& chosen, const AnyCase& c, Accelerator* accelerator,
                             std::unique_ptr<Mirror>& mirror) {
  auto args = c.args;
  Workspace scratch = c.buffers->workspace(chosen.workspace_bytes);
  Stream stream{};
  if (accelerator) {
    mirror = std::make_unique<Mirror>(*c.buffers, *accelerator);
    args = mirror->moved(args);
    scratch = mirror->moved(scratch);
    stream = accelerator->stream();
  }
  return [=] { run(chosen, args, scratch, stream); };
}

template <class AnyPlan, class AnyCase>
void add_ours(const AnyPlan& chosen, Arena<AnyCase>& arena, Accelerator* accelerator) {
  arena.contestants.push_back(
      {"cadre", std::string(chosen.name), run_on(chosen, arena.data, accelerator, arena.mirror)});
}

// What `beside` makes of a problem, planned.
template <class Problem>
Plan<Problem> twin_plan(const Problem& problem, const MeasureOptions& options) {
  Problem twin = problem;
  visit_problem(with_words(to_string(problem), options.beside), [&](const auto& other) {
    if constexpr (std::is_same_v<std::decay_t<decltype(other)>, Problem>) twin = other;
  });
  return plan(twin, options.device);
}

template <class Problem, class AnyCase>
void add_twin(const Problem& problem, const MeasureOptions& options, Arena<AnyCase>& arena,
              Accelerator* accelerator) {
  if (options.beside.empty()) return;
  const auto chosen = twin_plan(problem, options);
  arena.twin = std::make_unique<AnyCase>(make_case(chosen.problem, options.draw));
  arena.contestants.push_back({"cadre " + options.beside,
                               text(chosen.name, " on '", chosen.problem, "'"),
                               run_on(chosen, *arena.twin, accelerator, arena.twin_mirror)});
}

// Beside an activation that quantises what it computes: one after the other. Beside a product that
// gathers rows or has an activation: likewise, and the product alone, as beside one that scatters.
template <class Problem, class AnyCase>
void add_composed(const Problem& problem, const MeasureOptions& options, Arena<AnyCase>& arena,
                  Accelerator* accelerator) {
  if constexpr (std::is_same_v<Problem, ActivationProblem>) {
    if (!is_composed(problem) || !accelerator) return;
    arena.contestants.push_back({"composed", "activation and quantise, one by one",
                                 run_on(plan(problem, options.device, "composed"), arena.data,
                                        accelerator, arena.composed_mirror)});
  }
  if constexpr (std::is_same_v<Problem, GroupedGemmProblem>) {
    const bool gathers = problem.gather != Gather::kNo;
    if (!(is_composed(problem) || gathers || problem.scatter) || !accelerator) return;
    if (!problem.scatter)
      arena.contestants.push_back(
          {"composed",
           gathers ? "rows copied, then the product" : "product and activation, one by one",
           run_on(plan(problem, options.device, "composed"), arena.data, accelerator,
                  arena.composed_mirror)});
    Problem plain = without_gather(problem);
    plain.activation.reset();
    const auto product = plan(plain, options.device);
    arena.product = std::make_unique<AnyCase>(make_case(plain, options.draw));
    arena.contestants.push_back(
        {"product", text(product.name, " on '", plain, "'"),
         run_on(product, *arena.product, accelerator, arena.product_mirror)});
  }
}

// Peers may write the output of the case, so what ours makes of it is checked before.
template <class AnyCase>
void add_peers(Arena<AnyCase>& arena, Accelerator* accelerator) {
  DevicePeers others;
  if (accelerator)
    others = device_peers(arena.data, *arena.mirror, *accelerator);
  else
    others.list = peers(arena.data);
  for (Peer& peer : others.list) arena.contestants.push_back(std::move(peer));
  arena.absent = others.absent;
}

template <class Problem>
auto make_arenas(const Plan<Problem>& chosen, const Draw& draw, Accelerator* accelerator) {
  using AnyCase = decltype(make_case(chosen.problem, draw));
  const Rotation& rotation = accelerator ? kOnAccelerator : kOnCpu;
  std::vector<Arena<AnyCase>> arenas;
  int64_t copies = 1;
  for (int64_t i = 0; i < copies; ++i) {
    arenas.push_back({make_case(chosen.problem, draw), {}, {}, {}});
    copies =
        std::clamp(int64_t(std::ceil(rotation.bytes / double(arenas[0].data.buffers->bytes()))),
                   int64_t(1), rotation.copies);
    add_ours(chosen, arenas.back(), accelerator);
  }
  return arenas;
}

template <class Problem>
bool is_sampled(const Problem& problem, const MeasureOptions& options) {
  if constexpr (std::is_same_v<Problem, GroupedGemmProblem>)
    return options.device.kind != DeviceKind::kCpu && can_sample(problem);
  return false;
}

// Checks the data that will be timed, in some elements.
template <class AnyCase>
void check_sample(const Arena<AnyCase>& arena, uint64_t seed, Measurement& m) {
  if constexpr (std::is_same_v<AnyCase, GroupedGemmCase>) {
    const Sample sample = draw_sample(arena.data, kSampled, seed);
    arena.contestants[0].run();
    arena.mirror->fetch(arena.data.outputs[0].view.data);
    const Difference d = compare(arena.data, sample);
    m.check = {
        .problem = m.problem, .plan = m.plan, .error_of_bound = d.of_bound, .fault = d.where};
    m.checked_rows = arena.data.problem.rows;
    m.checked_elements = int64_t(sample.elements.size());
  }
}

// Checks a smaller problem, in every element.
template <class Problem>
void check_small(Problem small, const MeasureOptions& options, Measurement& m) {
  m.checked_rows = shrink(small);
  Draw draw = options.draw;
  draw.live = kLiveInCheck;
  draw.counts_are_weights = true;
  m.check = check(to_string(small), draw, m.plan, options.device);
}

template <class Problem>
Measurement measure_problem(const Problem& problem, const MeasureOptions& options) {
  const auto chosen = plan(problem, options.device, options.only);
  const auto accelerator = open_accelerator(options.device);
  Measurement m;
  m.problem = to_string(problem);
  m.plan = std::string(chosen.name);
  const bool sampled = is_sampled(problem, options);
  if (!sampled) check_small(problem, options, m);
  if (!m.check.good()) return m;
  auto arenas = make_arenas(chosen, options.draw, accelerator.get());
  if (sampled) check_sample(arenas[0], options.draw.seed, m);
  if (!m.check.good()) return m;
  for (auto& arena : arenas) {
    add_twin(problem, options, arena, accelerator.get());
    add_composed(problem, options, arena, accelerator.get());
    add_peers(arena, accelerator.get());
  }
  const Work done = work(arenas[0].data);
  m.flops = done.flops;
  m.bytes = done.bytes;
  m.absent_peers = arenas[0].absent;
  std::vector<std::vector<Peer>> copies;
  copies.reserve(arenas.size());
  for (const auto& arena : arenas) copies.push_back(arena.contestants);
  m.timings = contest(copies, options.contest, accelerator.get());
  for (const auto& arena : arenas) {
    if (arena.mirror) arena.mirror->fetch_canaries();
    if (!arena.data.buffers->canaries_live())
      m.check.fault = "memory beside a buffer was written while timing";
  }
  return m;
}

}  // namespace

std::string with_words(const std::string& problem, const std::string& words) {
  const auto name_of = [](const std::string& word) { return word.substr(0, word.find('=')); };
  std::istringstream all(problem), others(words);
  const std::vector<std::string> replaced{std::istream_iterator<std::string>(others), {}};
  std::string result;
  for (std::string word; all >> word;) {
    const bool stays =
        std::none_of(replaced.begin(), replaced.end(),
                     [&](const std::string& other) { return name_of(other) == name_of(word); });
    if (stays) result += word + " ";
  }
  return result + words;
}

void require_measurable(std::string_view problem, const MeasureOptions& options) {
  visit_problem(problem, [&](const auto& p) {
    plan(p, options.device, options.only);
    if (!options.beside.empty()) twin_plan(p, options);
    parse_distribution(options.draw.offsets, experts_of(p), options.draw.seed);
  });
}

Measurement measure(std::string_view problem, const MeasureOptions& options) {
  return visit_problem(problem, [&](const auto& p) { return measure_problem(p, options); });
}

}  // namespace cadre::bench
