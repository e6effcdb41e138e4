#include "bench/host_time.h"

#include "bench/layer_case.h"
#include "bench/mirror.h"
#include "bench/visit.h"

namespace cadre::bench {
namespace {

/// Where the arguments of a case lie when it runs: on the host, or in a copy on the device.
class Place {
 public:
  Place(const Buffers& buffers, const Device& device) : accelerator_(open_accelerator(device)) {
    if (accelerator_) mirror_ = std::make_unique<Mirror>(buffers, *accelerator_);
  }

  template <class Args>
  Args moved(const Args& args) const {
    return mirror_ ? mirror_->moved(args) : args;
  }
  Stream stream() const { return accelerator_ ? accelerator_->stream() : Stream{}; }
  void finish() const {
    if (accelerator_) accelerator_->us_between_marks();
  }

 private:
  std::unique_ptr<Accelerator> accelerator_;
  std::unique_ptr<Mirror> mirror_;
};

template <class Call>
Quantiles time_calls(const Place& place, const HostTimeOptions& options, Call&& call) {
  std::vector<double> us;
  for (int batch = -1; batch < options.batches; ++batch) {  // the first one warms up
    for (int i = 0; i < options.batch; ++i) {
      const double took = time_us(call);
      if (batch >= 0) us.push_back(took);
    }
    place.finish();
  }
  return quantiles(std::move(us));
}

template <class Problem>
std::vector<HostTime> times_of_operation(const Problem& problem, const HostTimeOptions& options) {
  const auto chosen = plan(problem, options.device);
  const auto c = make_case(problem, options.draw);
  const Workspace scratch = c.buffers->workspace(chosen.workspace_bytes);
  const Place place(*c.buffers, options.device);
  const auto args = place.moved(c.args);
  const Workspace workspace = place.moved(scratch);
  const Quantiles us =
      time_calls(place, options, [&] { run(chosen, args, workspace, place.stream()); });
  return {
      {to_string(problem), std::string(chosen.name), "run", us, options.batches * options.batch}};
}

template <class Problem>
std::vector<HostTime> times_of_layer(const Problem& problem, const HostTimeOptions& options) {
  const auto c = make_layer_case(problem, options.device, options.draw);
  const Place place(*c.buffers, options.device);
  const auto args = place.moved(c.args);
  const Workspace workspace = place.moved(c.workspace);
  const Stream stream = place.stream();
  std::vector<HostTime> times;
  const auto add = [&](const char* call, const Quantiles& us) {
    times.push_back(
        {to_string(problem), std::string(c.plan.name), call, us, options.batches * options.batch});
  };
  add("forward", time_calls(place, options, [&] { forward(c.plan, args, workspace, stream); }));
  add("backward", time_calls(place, options, [&] { backward(c.plan, args, workspace, stream); }));
  return times;
}

}  // namespace

std::vector<HostTime> host_times(std::string_view problem, const HostTimeOptions& options) {
  if (operation_of(problem) == "grouped_linear")
    return times_of_layer(parse_grouped_linear_problem(problem), options);
  if (operation_of(problem) == "grouped_mlp")
    return times_of_layer(parse_grouped_mlp_problem(problem), options);
  if (operation_of(problem) == "moe") return times_of_layer(parse_moe_problem(problem), options);
  return visit_problem(problem, [&](const auto& p) { return times_of_operation(p, options); });
}

}  // namespace cadre::bench
