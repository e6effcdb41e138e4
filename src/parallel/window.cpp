#include "parallel/window.h"

#include <algorithm>
#include <array>
#include <utility>

#include "cadre/error.h"
#include "ops/checks.h"
#include "ops/moved_codes.h"
#include "parallel/exchange.h"
#include "parallel/rank_device.h"

namespace cadre {

Window::Window(std::unique_ptr<State> state) : state_(std::move(state)) {}
Window::Window(Window&&) noexcept = default;
Window& Window::operator=(Window&&) noexcept = default;
Window::~Window() = default;

Window::State& Window::state() const {
  require(state_ != nullptr, "window: it was moved from; use the one to which it was moved");
  return *state_;
}
int Window::rank() const { return state().rank; }
int64_t Window::bytes() const { return state().bytes; }

TensorView Window::tokens(const ExpertParallelPlan& plan) const {
  const ExpertParallelProblem& p = plan.problem;
  parallel::check_fits("tokens", plan, *this);
  return view(state_->of(state_->rank) + plan.window.tokens, p.dtype, {p.tokens, p.hidden});
}
TensorView Window::rows(const ExpertParallelPlan& plan) const {
  const ExpertParallelProblem& p = plan.problem;
  parallel::check_fits("rows", plan, *this);
  ops::Checks("rows", p).holds(p.sum == RowSum::kChoice,
                               "sum is rank, must be choice; sums lie in the window, no rows");
  ops::Checks("rows", p).holds(!p.push, "push is yes, must be no; places lie in the window");
  return view(state_->of(state_->rank) + plan.window.rows, p.dtype, {p.rows, p.hidden});
}

QuantizedView Window::codes(const ExpertParallelPlan& plan) const {
  const ExpertParallelProblem& p = plan.problem;
  parallel::check_fits("codes", plan, *this);
  ops::Checks("codes", p).holds(p.x.has_value(), "x is no format, must be one; tokens are numbers");
  char* home = state_->of(state_->rank);
  const int64_t scales = ops::scales_of_row(*p.x, p.hidden);
  return {.codes = view(home + plan.window.tokens, p.x->element, {p.tokens, p.hidden}),
          .scales = view(home + plan.window.scales, info(p.x->kind).scale, {p.tokens, scales})};
}

TensorView Window::places(const ExpertParallelPlan& plan) const {
  const ExpertParallelProblem& p = plan.problem;
  parallel::check_fits("places", plan, *this);
  ops::Checks("places", p).holds(p.push, "push is no, must be yes; rows lie at home");
  return parallel::of_ranks(*state_, plan.window.rows, p.dtype, p.tokens * p.top_k, p.hidden);
}

void Window::await_readers(Stream stream) {
  state().check_failure();
  state().device->await_readers(state(), {}, stream);
}

void Window::check() {
  state().check_failure();
  state().check_overflow();
}

void Window::State::check_failure() const {
  using parallel::Failure;
  const Failure failure = device->failure(*this);
  if (failure.why == Failure::Why::kNone) return;
  const bool late = failure.why == Failure::Why::kLate;
  throw DeviceError(text("expert_parallel: rank ", failure.rank,
                         late ? " has not come to " : " is at another exchange than ",
                         parallel::name(failure.call), ", exchange ", failure.epoch,
                         late ? text(", within ", limit.count(), " ms") : "",
                         "; the window is of no more use"));
}

void Window::State::check_overflow() {
  const parallel::OverflowNote note = device->take_overflow();
  if (note.rank < 0) return;
  const auto of = std::find_if(dispatched.begin(), dispatched.end(),
                               [&](const auto& one) { return one.first == note.problem; });
  throw parallel::overflow_error(of->second, note.rank, note.routed);
}

void Window::State::remember(const ExpertParallelPlan& plan) {
  for (const auto& [tag, problem] : dispatched)
    if (tag == plan.tag) return;
  dispatched.emplace_back(plan.tag, plan.problem);
}

Window::State::State() = default;
Window::State::~State() = default;

namespace parallel {

void check_is_of_window(std::string_view op, const ExpertParallelPlan& plan) {
  const ops::Checks checks(op, plan.problem);
  checks.holds(!plan.name.empty(), "the plan is empty; make it with plan()");
  checks.holds(plan.name != kCollective, "the plan is by ", plan.name,
               ", must be by a window; a Collective is made of it");
}

void check_fits(std::string_view op, const ExpertParallelPlan& plan, const Window& window) {
  const ops::Checks checks(op, plan.problem);
  const int64_t bytes = window.bytes();
  check_is_of_window(op, plan);
  checks.holds(window.state().ranks == plan.problem.ranks, "the window is of ",
               window.state().ranks, " ranks, must be of ", plan.problem.ranks);
  const Device &here = window.state().planned, &wanted = plan.device;
  if (here.kind != wanted.kind || here.index != wanted.index)
    checks.holds(false, "the plan is for device ", wanted.index, ", ", to_string(wanted),
                 ", must be for device ", here.index, ", ", to_string(here),
                 ", where the window is");
  checks.holds(bytes >= plan.window.bytes, "the window has ", bytes, " bytes a rank, must have ",
               plan.window.bytes, "; make it for the largest plan");
}

DeviceError overflow_error(const ExpertParallelProblem& p, int rank, int64_t routed) {
  return DeviceError(text("expert_parallel: rows of rank ", rank, " are ", routed,
                          ", must be at most R, ", p.rows, "; that step is NaN on every rank; R = ",
                          routed, ", or ", double(routed) / double(p.tokens * p.top_k),
                          " times T * top_k, would have held them [", to_string(p), "]"));
}

std::string_view name(ExchangeKind call) {
  constexpr std::array<std::string_view, 5> kNames = {"the next exchange", "dispatch", "collect",
                                                      "collect backward", "dispatch backward"};
  return kNames[size_t(call)];
}

}  // namespace parallel
}  // namespace cadre
