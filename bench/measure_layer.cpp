// A layer as a whole beside its own products.
#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "bench/compare.h"
#include "bench/digest.h"
#include "bench/element.h"
#include "bench/layer_case.h"
#include "bench/measure.h"
#include "cadre/error.h"

namespace cadre::bench {
namespace {

// The same layer with nothing to learn.
GroupedLinearProblem frozen(GroupedLinearProblem p) {
  p.dgrad = p.wgrad = p.dbias = p.given_dy_along_k = false;
  return p;
}
GroupedMlpProblem frozen(GroupedMlpProblem p) {
  p.dgrad = p.wgrad1 = p.wgrad2 = p.dbias = p.dprob = false;
  return p;
}
MoeProblem frozen(MoeProblem p) {
  p.dgrad = p.dlogits = p.wgrad1 = p.wgrad2 = p.dbias = false;
  return p;
}
SequentialProblem frozen(SequentialProblem p) {
  bool first = true;  // those behind it say dgrad=yes, so that neighbours fuse as in a step
  for (RowOp& op : p.ops) {
    auto* linear = std::get_if<GroupedLinearProblem>(&op);
    if (linear == nullptr) continue;
    *linear = frozen(*linear);
    linear->dgrad = !std::exchange(first, false);
  }
  return p;
}

// The products of a layer, in the order in which they run, without activations and rows that are
// gathered: what a kernel does for these is the layer's time, not theirs.
struct Product {
  GroupedGemmProblem problem;
  std::string_view by;        // the implementation, where it is taken by its name alone
  bool has_all_rows = false;  // its one expert does, whatever the layer's counts
};
using Products = std::vector<Product>;
void add_products(const GroupedLinearPlan& plan, Products& all) {
  for (const LayerStep& step : plan.steps)
    if (const auto* product = std::get_if<GroupedGemmPlan>(&step.plan)) {
      all.push_back({without_gather(product->problem), {}});
      all.back().problem.activation.reset();
      if (find(all.back().problem, plan.device).name.empty()) all.back().by = product->name;
    }
}
void add_products(const GroupedMlpPlan& plan, Products& all) {
  add_products(plan.fc1, all);
  add_products(plan.fc2, all);
}
void add_products(const MoePlan& plan, Products& all) {
  add_products(plan.mlp, all);
  const size_t routed = all.size();
  add_products(plan.shared, all);
  for (size_t i = routed; i < all.size(); ++i) all[i].has_all_rows = true;
}
void add_products(const ActivationStep&, Products&) {}
void add_products(const SequentialPlan& plan, Products& all) {
  for (const RowPart& part : plan.row)
    std::visit([&](const auto& own) { add_products(own, all); }, part.plan);
}

// Where a case runs: on the host, or in a copy on the device.
template <class AnyCase>
struct Placed {
  AnyCase data;
  std::unique_ptr<Mirror> mirror{};

  Placed(AnyCase made, Accelerator* accelerator) : data(std::move(made)) {
    if (accelerator) mirror = std::make_unique<Mirror>(*data.buffers, *accelerator);
  }
  template <class Args>
  Args moved(const Args& args) const {
    return mirror ? mirror->moved(args) : args;
  }
  auto args() {
    if (mirror) return bench::moved(*mirror, data);
    return data.args;
  }
  void fetch(const void* place) const {
    if (mirror) mirror->fetch(place);
  }
};

// What is timed. Of weights that are quantised once for several calls, the first of `times` steps
// quantises them, and a forward finds them quantised.
struct TimedRuns {
  const char* name;
  bool is_step = false;
  int times = 1;
};

template <class AnyCase>
std::function<void()> run_of(const std::shared_ptr<Placed<AnyCase>>& placed, const TimedRuns& timed,
                             Stream stream) {
  const auto args = placed->args();
  const Workspace workspace = placed->moved(placed->data.workspace);
  const auto once = [=](bool refresh) {
    const auto& plan = placed->data.plan;
    auto own = args;
    own.refresh_weights = refresh;
    forward(plan, own, workspace, stream);
    if (!timed.is_step) return;
    backward(plan, own, workspace, stream);
    if (defers(plan.problem)) wgrad(plan, own, workspace, stream);
  };
  if (!timed.is_step) once(true);
  return [=] {
    for (int i = 0; i < timed.times; ++i) once(timed.is_step && i == 0);
  };
}

// All products one behind the other, on data of their own with the layer's counts.
Peer products(const Products& problems, const Draw& draw, const Device& device,
              Accelerator* accelerator, Work& total) {
  std::vector<std::function<void()>> runs;
  for (const auto& [problem, by, has_all_rows] : problems) {
    const auto chosen = plan(problem, device, by);
    Draw own_draw = draw;
    if (has_all_rows) own_draw.counts = {problem.rows};
    auto data = make_case(problem, own_draw);
    const Work one = work(data);
    total.flops += one.flops;
    total.bytes += one.bytes;
    const Workspace scratch = data.buffers->workspace(chosen.workspace_bytes);
    const auto placed = std::make_shared<Placed<GroupedGemmCase>>(std::move(data), accelerator);
    const Stream stream = accelerator ? accelerator->stream() : Stream{};
    runs.emplace_back([=, args = placed->moved(placed->data.args), own = placed->moved(scratch)] {
      static_cast<void>(placed);  // whose memory it is
      run(chosen, args, own, stream);
    });
  }
  return {"products", text("the layer's grouped GEMMs alone, without activations, ", runs.size()),
          [runs] {
            for (const auto& run : runs) run();
          }};
}

Peer repeated(Peer peer, int times) {
  peer.run = [run = std::move(peer.run), times] {
    for (int i = 0; i < times; ++i) run();
  };
  return peer;
}

// What depends on no earlier run.
template <class AnyCase>
std::vector<Output> written(const AnyCase& c, bool is_step) {
  std::vector<Output> all;
  for (const LayerOutput& out : c.outputs)
    if (out.anew && (is_step || out.name == "y")) all.push_back(out);
  return all;
}

// Looks at some of the live elements; a fault where one is no number.
std::string fault_in(const Output& out) {
  constexpr int64_t kLooks = 1 << 20;
  const int64_t all = out.view.shape[0];
  const int64_t count = all == 0 ? 0 : elements(out.view) / all * out.live;
  for (int64_t i = 0; i < count; i += 1 + count / kLooks)
    if (!std::isfinite(load(out.view, offset_of(out.view, i))))
      return text(out.name, " is no number at element ", i);
  return {};
}

// Both runs on the data that will be timed.
template <class AnyCase>
CheckReport check_twice(const Placed<AnyCase>& placed, const TimedRuns& timed,
                        const std::function<void()>& run) {
  constexpr int64_t kDigested = 1 << 20;  // bytes of an output
  CheckReport report;
  const std::vector<Output> outputs = written(placed.data, timed.is_step);
  std::vector<std::vector<std::byte>> first;
  run();
  for (const Output& out : outputs) {
    placed.fetch(out.view.data);
    first.push_back(snapshot(out));
    report.digest.add(first.back().data(), std::min(kDigested, int64_t(first.back().size())));
    if (report.good()) report.fault = fault_in(out);
  }
  run();
  for (size_t i = 0; i < outputs.size() && report.good() && placed.data.plan.exact; ++i) {
    placed.fetch(outputs[i].view.data);
    if (snapshot(outputs[i]) != first[i])
      report.fault = text(outputs[i].name, ": a second run has other bits");
  }
  return report;
}

// The rows of each expert, which a layer of experts finds by its logits.
template <class AnyCase>
std::vector<int64_t> counts_of(const Placed<AnyCase>& placed, const std::function<void()>& run) {
  Offsets offsets;
  if constexpr (std::is_same_v<AnyCase, MoeCase>)
    offsets = {placed.data.args.offsets, placed.data.plan.problem.experts};
  else
    offsets = placed.data.args.offsets;
  run();
  placed.fetch(offsets.data);
  std::vector<int64_t> counts;
  counts.reserve(size_t(offsets.experts));
  for (int e = 0; e < offsets.experts; ++e) counts.push_back(offsets.data[e + 1] - offsets.data[e]);
  return counts;
}

template <class Problem>
auto place(const Problem& problem, const MeasureOptions& options, Accelerator* accelerator) {
  using AnyCase = decltype(make_layer_case(problem, options.device, options.draw));
  return std::make_shared<Placed<AnyCase>>(make_layer_case(problem, options.device, options.draw),
                                           accelerator);
}

// A layer, what runs beside it and the layer's own products, all on data of their own.
template <class AnyCase>
struct Contestants {
  std::string problem, twin_problem;
  std::unique_ptr<Accelerator> accelerator;
  std::shared_ptr<Placed<AnyCase>> layer{}, twin{};
  Peer products{};
  Work work{};  // of the products

  Stream stream() const { return accelerator ? accelerator->stream() : Stream{}; }
};

template <class Problem>
auto contestants_of(const Problem& problem, const Problem* twin, const MeasureOptions& options) {
  using AnyCase = decltype(make_layer_case(problem, options.device, options.draw));
  Contestants<AnyCase> all{to_string(problem), twin ? to_string(*twin) : "",
                           open_accelerator(options.device)};
  all.layer = place(problem, options, all.accelerator.get());
  if (twin) all.twin = place(*twin, options, all.accelerator.get());
  Draw draw = options.draw;
  draw.counts = counts_of(*all.layer, run_of(all.layer, {"forward"}, all.stream()));
  Products own;
  add_products(all.layer->data.plan, own);
  all.products = products(own, draw, options.device, all.accelerator.get(), all.work);
  return all;
}

template <class AnyCase>
Measurement measure_call(const TimedRuns& timed, const Contestants<AnyCase>& all,
                         const MeasureOptions& options) {
  const auto& data = all.layer->data;
  const std::function<void()> run = run_of(all.layer, timed, all.stream());
  Measurement m;
  m.problem = all.problem;
  m.plan = std::string(data.plan.name);
  m.call = timed.name;
  for (const KeptPart& part : kept(data.plan)) m.kept_bytes += part.bytes;
  const LayerMemory& memory = data.plan.memory;
  m.workspace_bytes = std::max(memory.forward_workspace_bytes, memory.backward_workspace_bytes);
  m.check = check_twice(*all.layer, timed, run);
  if (!m.check.good()) return m;
  std::vector<Peer> contestants{{"cadre", m.plan, run}, repeated(all.products, timed.times)};
  if (all.twin)
    contestants.push_back({"cadre " + options.beside,
                           text(all.twin->data.plan.name, " on '", all.twin_problem, "'"),
                           run_of(all.twin, timed, all.stream())});
  m.flops = timed.times * all.work.flops;
  m.bytes = timed.times * all.work.bytes;
  m.timings = contest({contestants}, options.contest, all.accelerator.get());
  if (all.layer->mirror) all.layer->mirror->fetch_canaries();
  if (!data.buffers->canaries_live())
    m.check.fault = "memory beside a buffer was written while timing";
  return m;
}

// Micro-batches that share weights, as in steps of training.
constexpr int kMicroBatches = 4;

}  // namespace

std::vector<Measurement> measure_layer(std::string_view problem, const MeasureOptions& options) {
  return visit_layer(problem, [&](const auto& p) -> std::vector<Measurement> {
    using Problem = std::decay_t<decltype(p)>;
    std::optional<Problem> twin, frozen_twin;
    if (!options.beside.empty())
      visit_layer(with_words(to_string(p), options.beside), [&](const auto& other) {
        if constexpr (std::is_same_v<std::decay_t<decltype(other)>, Problem>)
          twin = other, frozen_twin = frozen(other);
      });
    const Problem* beside = frozen_twin ? &*frozen_twin : nullptr;
    std::vector<Measurement> all{
        measure_call({"forward"}, contestants_of(frozen(p), beside, options), options)};
    if (!learns(plan(p, options.device))) return all;
    const auto learning = contestants_of(p, twin ? &*twin : nullptr, options);
    all.push_back(measure_call({"step", true}, learning, options));
    if (caches_weights(p))
      all.push_back(measure_call({"4 steps", true, kMicroBatches}, learning, options));
    return all;
  });
}

}  // namespace cadre::bench
