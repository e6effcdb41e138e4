#pragma once
#include <cadre/expert_parallel.h>
#include <torch/custom_class.h>

#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "door.h"

// What ranks that read each other's memory own: a window, and the exchanges of a layer through it.
namespace cadre::door {

/// A rank's window, owned by the exchanges through it and by the tensors that lie in it.
struct RankWindow : torch::CustomClassHolder {
  explicit RankWindow(Window made) : window(std::move(made)) {}
  Window window;
};

/// Makes a window together with the other ranks, in a thread of its own, while the caller gathers:
///
///     while (words = ask()) answer(all_gather(words))
///     window()
class WindowMaker : public torch::CustomClassHolder {
 public:
  /// `on` is any tensor of the rank's device. With addresses the window lies there, one a rank.
  /// Errors    as those of plan().
  WindowMaker(const std::string& problem, const at::Tensor& on, int64_t rank, int64_t limit_ms,
              const std::vector<int64_t>& addresses);
  ~WindowMaker() override;

  /// What the caller is to gather next from all ranks; nothing once the window is made, or failed.
  std::optional<std::string> ask();
  void answer(std::vector<std::string> of_all_ranks);
  /// Errors    as those of Window::create() and adopt().
  c10::intrusive_ptr<RankWindow> window();

 private:
  std::vector<std::string> gather(const std::string& words);

  std::mutex mutex_;  ///< of all below
  std::condition_variable changed_;
  std::optional<std::string> asked_;
  std::optional<std::vector<std::string>> answered_;
  bool done_ = false, given_up_ = false;
  std::exception_ptr error_;
  c10::intrusive_ptr<RankWindow> window_;
  std::thread thread_;
};

/// The exchanges of one problem through a window. Operators name it in words, since these are the
/// same for tracers, fake kernels and kernels: a number that no other has, and the problem.
class Exchange : public torch::CustomClassHolder {
 public:
  /// Errors    as those of plan(); ValueError where the window is too small.
  Exchange(const c10::intrusive_ptr<RankWindow>&, const std::string& problem, const at::Tensor& on);
  ~Exchange() override;

  /// Errors    ValueError for a name that no living exchange has.
  static c10::intrusive_ptr<Exchange> of(std::string_view name);

  std::string name() const { return name_; }
  c10::intrusive_ptr<RankWindow> window() const { return window_; }
  void check();
  void await_readers();
  at::Tensor tokens();  ///< [T, H] in the window
  at::Tensor rows();    ///< [R, H] in the window
  /// What stands for rows that were pushed into the windows of all ranks: [R, H], read by nobody.
  at::Tensor pushed() const;
  bool is_pushed(const at::Tensor& rows) const { return rows.is_alias_of(nobodys_); }
  std::string route() const { return std::string(plan_.name); }

  const ExpertParallelPlan& plan() const { return plan_; }
  /// Errors    ValueError unless the tensor is on the device of the window.
  void require_here(const at::Tensor& t, const char* what) const {
    require_same_device(on_, t, what);
  }
  Window& rank_window() const { return window_->window; }

 private:
  at::Tensor tensor_at(const TensorView&) const;

  c10::intrusive_ptr<RankWindow> window_;
  ExpertParallelPlan plan_;
  at::Tensor on_, nobodys_;
  std::string name_;
};

/// Memory for rows that this exchange moves next: in its window, once other ranks have read what
/// lies there, if they have the shape and the type of those; else new. No name: new. Of one whose
/// rows are pushed it is Exchange::pushed().
/// Errors    as those of Exchange::of() and check(); ValueError for rows that cannot be pushed.
at::Tensor new_rows(std::string_view exchange, const at::Tensor& like);

}  // namespace cadre::door
