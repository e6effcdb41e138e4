#pragma once
#include <cstdint>
#include <vector>

#include "cadre/grouped_linear.h"

#pragma GCC visibility push(default)
namespace cadre {

/// One deferred weight gradient. The plan and every buffer that the arguments name live until it
/// has run; x, dy, saved and pending stay unchanged. Where dw has moved since, say so in `args`.
struct WgradTask {
  const GroupedLinearPlan* plan = nullptr;
  GroupedLinearArgs args{};
};

/// Weight gradients that backward left for later, in the order in which they came. All memory is
/// taken at construction. One queue belongs to one thread.
class WgradQueue {
 public:
  explicit WgradQueue(int capacity);

  int capacity() const { return int(tasks_.size()); }
  int pending() const { return tasks_.empty() ? 0 : pending_; }  ///< 0 of what was moved from

  /// Errors    InvalidArgument if the queue is full, or if the plan is not deferred.
  void push(const GroupedLinearPlan&, const GroupedLinearArgs&);

  /// The task that runs next, to give its gradients another place.
  /// Errors    InvalidArgument if the queue is empty.
  WgradTask& front();

  /// Runs the oldest task and drops it. `version` is the parameters' version now.
  /// Errors    InvalidArgument if the queue is empty, or if the parameters changed since backward;
  ///           the task stays then.
  void run_next(int64_t version, Workspace, Stream);

  /// Drops all tasks, say after an error in a step.
  void clear() { pending_ = 0; }

 private:
  std::vector<WgradTask> tasks_;
  int first_ = 0;
  int pending_ = 0;
};

}  // namespace cadre
#pragma GCC visibility pop
