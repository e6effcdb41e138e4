#include "cadre/wgrad_queue.h"

#include "cadre/error.h"

namespace cadre {

WgradQueue::WgradQueue(int capacity) {
  require(capacity >= 1, "wgrad_queue: capacity is ", capacity, ", must be 1 or more");
  tasks_.resize(size_t(capacity));
}

void WgradQueue::push(const GroupedLinearPlan& plan, const GroupedLinearArgs& args) {
  if (!plan.problem.options.deferred || !plan.problem.wgrad)
    throw InvalidArgument(
        text("wgrad_queue: the plan defers no weight gradient, must be planned with deferred=yes "
             "and wgrad=yes [",
             to_string(plan.problem), "]"));
  require(pending() < capacity(), "wgrad_queue: ", pending(),
          " tasks are pending, must be fewer than ", capacity(), ", the capacity; run one first");
  tasks_[size_t((first_ + pending_) % capacity())] = {&plan, args};
  ++pending_;
}

WgradTask& WgradQueue::front() {
  require(pending() > 0,
          "wgrad_queue: no task is pending, must be 1 or more; backward pushes them");
  return tasks_[size_t(first_)];
}

void WgradQueue::run_next(int64_t version, Workspace workspace, Stream stream) {
  const WgradTask& task = front();
  const int64_t then = task.args.parameters.version;
  require(version == then, "wgrad_queue: version of the parameters is ", version, ", must be ",
          then, " as in backward; they changed while their gradient was pending");
  wgrad(*task.plan, task.args, workspace, stream);
  first_ = (first_ + 1) % capacity();
  --pending_;
}

}  // namespace cadre
