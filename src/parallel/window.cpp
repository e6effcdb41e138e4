#include "parallel/window.h"

#include <algorithm>
#include <array>
#include <sstream>
#include <utility>

#include "cadre/error.h"
#include "ops/checks.h"
#include "ops/moved_codes.h"
#include "parallel/exchange.h"
#include "parallel/rank_device.h"
#include "parallel/shared_memory.h"

namespace cadre {
namespace {

using std::chrono::steady_clock;

constexpr std::chrono::milliseconds kMostLimit = std::chrono::hours(24 * 365 * 10);

/// What a rank tells the others when a window is made, a line each.
struct WindowOffer {
  std::string error, problem, bytes, limit, host, address;

  std::string text() const {
    std::string all;
    for (std::string line : {error, problem, bytes, limit, host, address}) {
      std::replace(line.begin(), line.end(), '\n', ' ');
      all += line + '\n';
    }
    return all;
  }
  static WindowOffer of(const std::string& text) {
    WindowOffer offer;
    std::istringstream in(text);
    for (std::string* line :
         {&offer.error, &offer.problem, &offer.bytes, &offer.limit, &offer.host, &offer.address})
      std::getline(in, *line);
    return offer;
  }
};

/// The first rank's error, thrown by all.
void check_errors(const std::vector<std::string>& errors) {
  for (size_t p = 0; p < errors.size(); ++p)
    if (!errors[p].empty()) throw DeviceError(text("window: rank ", p, " failed: ", errors[p]));
}

std::vector<WindowOffer> gather_offers(const WindowOffer& own, int ranks,
                                       const AllGather& all_gather) {
  const std::vector<std::string> all = all_gather(own.text());
  require(int(all.size()) == ranks, "window: all_gather returned ", all.size(),
          " strings, must be ", ranks, "; one a rank");
  std::vector<WindowOffer> offers;
  std::vector<std::string> errors;
  for (const std::string& words : all) {
    offers.push_back(WindowOffer::of(words));
    errors.push_back(offers.back().error);
  }
  check_errors(errors);
  const WindowOffer& first = offers.front();
  for (int p = 1; p < ranks; ++p) {
    const WindowOffer& offer = offers[size_t(p)];
    require(offer.problem == first.problem, "window: the problem of rank ", p, " is ",
            offer.problem, ", must be that of rank 0: ", first.problem);
    require(offer.bytes == first.bytes, "window: rank ", p, " makes ", offer.bytes,
            " bytes, must make those of rank 0: ", first.bytes, "; build all ranks alike");
    require(offer.limit == first.limit, "window: the limit of rank ", p, " is ", offer.limit,
            " ms, must be that of rank 0: ", first.limit);
    if (offer.host != first.host)
      throw Unsupported(text("window: rank ", p, " is on another host than rank 0 (", offer.host,
                             ", ", first.host, "); windows are memory that all ranks can map"));
  }
  return offers;
}

/// What `work` throws, as the other ranks are told; empty if nothing.
template <class Work>
std::string error_of(Work&& work) {
  try {
    work();
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

}  // namespace

Window Window::create(const ExpertParallelPlan& plan, int rank, const AllGather& all_gather,
                      const WindowOptions& options) {
  const auto limit = options.limit;
  const int ranks = plan.problem.ranks;
  auto state = std::make_unique<State>();
  state->rank = rank;
  state->ranks = ranks;
  state->limit = limit;
  state->device = parallel::rank_device(plan.device);
  const int64_t bytes = state->device->whole_bytes(plan.window.bytes);
  std::unique_ptr<parallel::FileSharing> sharing;
  parallel::File own;
  WindowOffer offer;
  offer.error = error_of([&] {
    require(rank >= 0 && rank < ranks, "rank is ", rank, ", must be 0 to ", ranks - 1);
    require(limit.count() >= 0 && limit <= kMostLimit, "limit is ", limit.count(),
            " ms, must be 0 to ", kMostLimit.count());
    own = state->device->make_memory(bytes);
    sharing = std::make_unique<parallel::FileSharing>(rank);
    offer.address = sharing->address();
  });
  offer.problem = to_string(plan.problem);
  offer.bytes = text(bytes);
  offer.limit = text(limit.count());
  offer.host = options.host.empty() ? parallel::host_name() : options.host;
  std::vector<std::string> addresses;
  for (const WindowOffer& one : gather_offers(offer, ranks, all_gather))
    addresses.push_back(one.address);
  const auto until =
      limit.count() == 0 ? steady_clock::time_point::max() : steady_clock::now() + limit;
  check_errors(all_gather(error_of([&] {
    std::vector<parallel::File> files = sharing->share(own, addresses, until);
    files[size_t(rank)] = std::move(own);
    state->memory = state->device->map(files, bytes, rank);
    state->bytes_each = bytes;
  })));
  return Window(std::move(state));
}

Window::Window(std::unique_ptr<State> state) : state_(std::move(state)) {}
Window::Window(Window&&) noexcept = default;
Window& Window::operator=(Window&&) noexcept = default;
Window::~Window() = default;

int Window::rank() const { return state_->rank; }
int64_t Window::bytes() const { return state_->bytes_each; }

TensorView Window::tokens(const ExpertParallelPlan& plan) const {
  const ExpertParallelProblem& p = plan.problem;
  return view(state_->of(state_->rank) + plan.window.tokens, p.dtype, {p.tokens, p.hidden});
}
TensorView Window::rows(const ExpertParallelPlan& plan) const {
  const ExpertParallelProblem& p = plan.problem;
  ops::Checks("rows", p).holds(p.sum == RowSum::kChoice,
                               "sum is rank, must be choice; sums lie in the window, no rows");
  return view(state_->of(state_->rank) + plan.window.rows, p.dtype, {p.rows, p.hidden});
}

QuantizedView Window::codes(const ExpertParallelPlan& plan) const {
  const ExpertParallelProblem& p = plan.problem;
  ops::Checks("codes", p).holds(p.x.has_value(), "x is no format, must be one; tokens are numbers");
  char* home = state_->of(state_->rank);
  const int64_t scales = ops::scales_of_row(*p.x, p.hidden);
  return {.codes = view(home + plan.window.tokens, p.x->element, {p.tokens, p.hidden}),
          .scales = view(home + plan.window.scales, info(p.x->kind).scale, {p.tokens, scales})};
}

TensorView Window::places(const ExpertParallelPlan& plan) const {
  const ExpertParallelProblem& p = plan.problem;
  ops::Checks("places", p).holds(p.push, "push is no, must be yes; rows lie at home");
  return parallel::of_ranks(*state_, plan.window.rows, p.dtype, p.tokens * p.top_k, p.hidden);
}

void Window::await_readers(Stream stream) {
  state_->check_failure();
  state_->device->await_readers(*state_, {}, stream);
}

void Window::check() {
  state_->check_failure();
  state_->check_overflow();
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
  const ExpertParallelProblem& p = of->second;
  throw DeviceError(text("expert_parallel: rows of rank ", note.rank, " are ", note.routed,
                         ", must be at most R, ", p.rows, "; that step is NaN on every rank; R = ",
                         note.routed, ", or ", double(note.routed) / double(p.tokens * p.top_k),
                         " times T * top_k, would have held them [", to_string(p), "]"));
}

void Window::State::remember(const ExpertParallelPlan& plan) {
  for (const auto& [tag, problem] : dispatched)
    if (tag == plan.tag) return;
  dispatched.emplace_back(plan.tag, plan.problem);
}

Window::State::State() = default;
Window::State::~State() = default;

namespace parallel {

std::string_view name(ExchangeKind call) {
  constexpr std::array<std::string_view, 5> kNames = {"the next exchange", "dispatch", "collect",
                                                      "collect backward", "dispatch backward"};
  return kNames[size_t(call)];
}

}  // namespace parallel
}  // namespace cadre
