#include "exchange.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>

#include <bit>
#include <chrono>
#include <map>
#include <utility>

// Windows, and exchanges by name, as objects of Python.
namespace cadre::door {
namespace {

ExpertParallelPlan plan_of(const std::string& problem, const at::Tensor& on) {
  return translate_errors(
      [&] { return cadre::plan(parse_expert_parallel_problem(problem), device(on)); });
}

/// The exchanges that live, by name. Each takes itself out when it ends.
struct Exchanges {
  std::mutex mutex;
  int64_t made = 0;
  std::map<std::string, Exchange*, std::less<>> by_name;

  static Exchanges& all() {
    static auto* const exchanges = new Exchanges;  // Python may end after static objects do
    return *exchanges;
  }
};

}  // namespace

WindowMaker::WindowMaker(const std::string& problem, const at::Tensor& on, int64_t rank,
                         int64_t limit_ms, const std::vector<int64_t>& addresses) {
  const ExpertParallelPlan plan = plan_of(problem, on);
  const c10::Device device = on.device();
  std::vector<void*> memory;
  memory.reserve(addresses.size());
  for (const int64_t address : addresses) memory.push_back(std::bit_cast<void*>(address));
  thread_ = std::thread([this, plan, device, rank, limit_ms, memory] {
    std::exception_ptr error;
    c10::intrusive_ptr<RankWindow> made;
    try {
      const c10::DeviceGuard guard(device);
      const WindowOptions options{.limit = std::chrono::milliseconds(limit_ms)};
      const AllGather all_gather = [this](const std::string& words) { return gather(words); };
      made = c10::make_intrusive<RankWindow>(
          memory.empty() ? Window::create(plan, int(rank), all_gather, options)
                         : Window::adopt(plan, memory, int(rank), all_gather, options));
    } catch (...) {
      error = std::current_exception();
    }
    const std::lock_guard lock(mutex_);
    window_ = std::move(made);
    error_ = error;
    done_ = true;
    changed_.notify_all();
  });
}

WindowMaker::~WindowMaker() {
  {
    const std::lock_guard lock(mutex_);
    given_up_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

std::optional<std::string> WindowMaker::ask() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return asked_ || done_; });
  return std::exchange(asked_, std::nullopt);
}

void WindowMaker::answer(std::vector<std::string> of_all_ranks) {
  const std::lock_guard lock(mutex_);
  answered_ = std::move(of_all_ranks);
  changed_.notify_all();
}

std::vector<std::string> WindowMaker::gather(const std::string& words) {
  std::unique_lock lock(mutex_);
  asked_ = words;
  changed_.notify_all();
  changed_.wait(lock, [&] { return answered_ || given_up_; });
  if (!answered_) throw DeviceError("window: nobody gathers any more");
  return *std::exchange(answered_, std::nullopt);
}

c10::intrusive_ptr<RankWindow> WindowMaker::window() {
  const std::lock_guard lock(mutex_);
  if (error_) translate_errors([&] { std::rethrow_exception(error_); });
  return window_;
}

Exchange::Exchange(const c10::intrusive_ptr<RankWindow>& window, const std::string& problem,
                   const at::Tensor& on)
    : window_(window), plan_(plan_of(problem, on)), on_(on) {
  const ExpertParallelProblem& p = plan_.problem;
  const c10::InferenceMode no_inference(false);  // it is part of graphs
  if (p.push) nobodys_ = at::zeros({1}, on_.options().dtype(scalar_type(p.dtype)));
  const int64_t bytes = window->window.bytes(), needed = plan_.window.bytes;
  TORCH_CHECK_VALUE(bytes >= needed, "window has ", bytes, " bytes a rank, must have ", needed,
                    "; share that of the largest layer [", problem, "]");
  Exchanges& all = Exchanges::all();
  const std::lock_guard lock(all.mutex);
  name_ = std::to_string(all.made++) + " " + problem;
  all.by_name.emplace(name_, this);
}

Exchange::~Exchange() {
  Exchanges& all = Exchanges::all();
  const std::lock_guard lock(all.mutex);
  all.by_name.erase(name_);
}

c10::intrusive_ptr<Exchange> Exchange::of(std::string_view name) {
  Exchanges& all = Exchanges::all();
  const std::lock_guard lock(all.mutex);
  const auto found = all.by_name.find(name);
  TORCH_CHECK_VALUE(found != all.by_name.end(), "exchange is '", name,
                    "', must be one of this process; its ExpertParallel is gone");
  return c10::intrusive_ptr<Exchange>::reclaim_copy(found->second);
}

void Exchange::check() {
  translate_errors([&] { rank_window().check(); });
}

void Exchange::await_readers() {
  const CurrentStream current(on_);
  translate_errors([&] { rank_window().await_readers(current.stream()); });
}

at::Tensor Exchange::tokens() { return tensor_at(rank_window().tokens(plan_)); }
at::Tensor Exchange::rows() {
  TensorView there;
  translate_errors([&] { there = rank_window().rows(plan_); });
  return tensor_at(there);
}

at::Tensor Exchange::pushed() const {
  return nobodys_.expand({plan_.problem.rows, plan_.problem.hidden});
}

at::Tensor Exchange::tensor_at(const TensorView& v) const {
  const auto options = on_.options().dtype(scalar_type(v.dtype)).requires_grad(false);
  return at::from_blob(
      v.data, {v[0], v[1]}, [kept = window_](void*) {}, options, on_.device());
}

at::Tensor new_rows(std::string_view exchange, const at::Tensor& like) {
  if (exchange.empty()) return at::empty(like.sizes(), like.options());
  const auto found = Exchange::of(exchange);
  const ExpertParallelProblem& p = found->plan().problem;
  if (p.push) {
    TORCH_CHECK_VALUE(like.sizes() == at::IntArrayRef({p.rows, p.hidden}) &&
                          like.scalar_type() == scalar_type(p.dtype),
                      "x is ", like.scalar_type(), like.sizes(), ", must be ", scalar_type(p.dtype),
                      "[", p.rows, ", ", p.hidden, "], whose results are pushed [", to_string(p),
                      "]");
    found->await_readers();
    return found->pushed();
  }
  if (p.sum == RowSum::kRank) return at::empty(like.sizes(), like.options());
  const at::Tensor rows = found->rows();
  if (rows.sizes() != like.sizes() || rows.scalar_type() != like.scalar_type())
    return at::empty(like.sizes(), like.options());
  found->await_readers();
  return rows;
}

/// Bytes of a rank's window. Errors    as those of plan().
static int64_t window_bytes(std::string_view problem, const at::Tensor& on) {
  return plan_of(std::string(problem), on).window.bytes;
}

TORCH_LIBRARY_FRAGMENT(cadre, m) {
  m.def("_window_bytes(str problem, Tensor on) -> int", window_bytes);
  m.class_<RankWindow>("RankWindow");
  m.class_<WindowMaker>("WindowMaker")
      .def(torch::init<const std::string&, const at::Tensor&, int64_t, int64_t,
                       const std::vector<int64_t>&>())
      .def("ask", &WindowMaker::ask)
      .def("answer", &WindowMaker::answer)
      .def("window", &WindowMaker::window);
  m.class_<Exchange>("Exchange")
      .def(torch::init<const c10::intrusive_ptr<RankWindow>&, const std::string&,
                       const at::Tensor&>())
      .def("name", &Exchange::name)
      .def("window", &Exchange::window)
      .def("check", &Exchange::check)
      .def("await_readers", &Exchange::await_readers)
      .def("route", &Exchange::route)
      .def("tokens", &Exchange::tokens)
      .def("rows", &Exchange::rows);
}

}  // namespace cadre::door
