#pragma once
#include <memory>
#include <string_view>

#include "bench/mailboxes.h"
#include "bench/ranks.h"
#include "cadre/collective.h"
#include "cadre/expert_parallel.h"

namespace cadre::bench {

/// The name of the plan whose rows travel by an engine.
inline constexpr std::string_view kCollective = "collective";

/// How the rows of one rank travel: its four exchanges, of one plan. Of the maps in their arguments
/// a route may have its own. On an accelerator they are enqueued.
class RankRoute {
 public:
  RankRoute() = default;
  RankRoute(const RankRoute&) = delete;
  RankRoute& operator=(const RankRoute&) = delete;
  virtual ~RankRoute() = default;

  virtual void dispatch(const DispatchArgs&, Workspace, Stream) = 0;
  virtual void collect(const CollectArgs&, Workspace, Stream) = 0;
  virtual void collect_backward(const CollectBackwardArgs&, Workspace, Stream) = 0;
  virtual void dispatch_backward(const DispatchBackwardArgs&, Workspace, Stream) = 0;
  /// Throws, once, what went wrong in the last step.
  virtual void check() = 0;

  /// The window; none of a plan by collective.
  virtual Window* window() { return nullptr; }
  /// Another one for exchanges that a graph has, so that those that it has not wait for none of
  /// them; null where nobody waits.
  virtual std::unique_ptr<RankRoute> for_graph() const { return nullptr; }
};

/// By a window. The plan outlives it.
class WindowRoute final : public RankRoute {
 public:
  WindowRoute(const ExpertParallelPlan& plan, Window window)
      : plan_(plan), window_(std::move(window)) {}

  void dispatch(const DispatchArgs& args, Workspace workspace, Stream stream) override;
  void collect(const CollectArgs& args, Workspace, Stream stream) override;
  void collect_backward(const CollectBackwardArgs& args, Workspace, Stream stream) override;
  void dispatch_backward(const DispatchBackwardArgs& args, Workspace workspace,
                         Stream stream) override;
  void check() override { window_.check(); }
  Window* window() override { return &window_; }

 private:
  const ExpertParallelPlan& plan_;
  Window window_;
};

/// By an engine, with maps of its own in memory of the plan's device.
class CollectiveRoute final : public RankRoute {
 public:
  CollectiveRoute(const ExpertParallelPlan& plan, int rank, AllToAll engine,
                  const CollectiveMap& map)
      : collective_(plan, rank, engine), engine_(std::move(engine)), map_(map) {}

  void dispatch(const DispatchArgs& args, Workspace workspace, Stream stream) override;
  void collect(const CollectArgs& args, Workspace workspace, Stream stream) override;
  void collect_backward(const CollectBackwardArgs& args, Workspace workspace,
                        Stream stream) override;
  void dispatch_backward(const DispatchBackwardArgs& args, Workspace workspace,
                         Stream stream) override;
  void check() override { collective_.check(); }
  std::unique_ptr<RankRoute> for_graph() const override;

 private:
  Collective collective_;
  AllToAll engine_;
  CollectiveMap map_;
};

/// A problem's plan that ranks can run here: by collective there is an engine for its device.
/// Errors    InvalidArgument and Unsupported from parsing and planning; Unsupported where there is
///           no engine.
ExpertParallelPlan plan_of_ranks(std::string_view problem, const Device&, std::string_view only);

/// What ranks need before they are started: of a plan by collective on the CPU, mailboxes that
/// have room for all that an exchange sends; otherwise nothing.
std::unique_ptr<Mailboxes> mailboxes_of(const ExpertParallelPlan&);

/// The route of one rank, which every rank opens. Plan, rank and mailboxes outlive it. `map` is of
/// a plan by collective.
std::unique_ptr<RankRoute> open_route(const ExpertParallelPlan&, Rank&, Mailboxes*,
                                      const CollectiveMap& map);

}  // namespace cadre::bench
