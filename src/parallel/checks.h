#pragma once
#include "ops/checks.h"
#include "ops/moved_codes.h"
#include "parallel/shared_memory.h"
#include "parallel/window.h"

namespace cadre::parallel {

constexpr int64_t aligned(int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

/// The checks of an exchange's arguments that are the same by every route.
class ExchangeChecks : public ops::Checks<ExpertParallelProblem> {
 public:
  using Checks::Checks;

  template <class Element>
  void probabilities(std::string_view what, const Element* pointer, int64_t count) const {
    if (problem().prob) return present(what, pointer, count, "the problem says prob=yes");
    absent(what, pointer, "the problem says prob=no");
  }
  void workspace(const Workspace& workspace, int64_t bytes) const {
    holds(workspace.bytes >= bytes, "the workspace has ", workspace.bytes, " bytes, must have ",
          bytes);
    present("workspace", static_cast<const char*>(workspace.data), bytes);
    aligned("workspace", workspace.data, kAlignment);
  }

 protected:
  int64_t token_count(std::string_view what, const TensorView& v) const {
    const int64_t t = v.rank == 2 ? v[0] : 0, most = problem().tokens;
    holds(t >= 0 && t <= most, what, " has ", t, " rows, must have 0 to T, ", most);
    return t;
  }
};

/// Those of a window.
class ArgsChecks : public ExchangeChecks {
 public:
  ArgsChecks(ExchangeKind call, const ExpertParallelPlan& plan, const Window& window)
      : ExchangeChecks(name(call), plan.problem), plan_(plan), window_(window) {
    check_fits(name(call), plan, window);
  }

  /// [t, H]
  void tokens(std::string_view what, const TensorView& v) const {
    view(what, v, problem().dtype, {token_count(what, v), problem().hidden});
    in_place(what, v, window_.tokens(plan_));
  }
  /// x and rows of dispatch: numbers, or codes and scales.
  void dispatched(const DispatchArgs& args) const {
    const ExpertParallelProblem& p = problem();
    if (p.x) return codes(args);
    tokens("x", args.x);
    absent("x_scales", args.x_scales, "x is no format");
    rows("rows", args.rows);
    absent("row_scales", args.row_scales, "x is no format");
  }
  /// Rows that are summed: [R, H], unless who made them has pushed them.
  void results(std::string_view what, const TensorView& v) const {
    problem().push ? absent(what, v, "the problem says push=yes") : rows(what, v);
  }
  /// [R, H]
  void rows(std::string_view what, const TensorView& v) const {
    view(what, v, problem().dtype, {problem().rows, problem().hidden});
    if (problem().sum == RowSum::kRank) return elsewhere(what, v, "sums lie there");
    if (problem().push) return elsewhere(what, v, "places lie there");
    in_place(what, v, window_.rows(plan_));
  }
  void map(const ExchangeMap& map, int64_t tokens) const {
    present("map.row_of", map.row_of, tokens * problem().top_k, "dispatch writes it");
    present("map.slot_of", map.slot_of, problem().rows, "dispatch writes it");
    present("map.row_here", map.row_here, problem().ranks * problem().tokens * problem().top_k,
            "dispatch writes it");
    present("map.offsets", map.offsets, int64_t(problem().experts) + 1, "dispatch writes it");
    present("map.verdict", map.verdict, 1, "dispatch writes it");
    if (problem().push)
      present("map.place_of", map.place_of, problem().rows, "the problem says push=yes");
    else
      absent("map.place_of", map.place_of, "the problem says push=no");
    if (problem().sum == RowSum::kRank)
      present("map.sum_of", map.sum_of, tokens * problem().ranks, "the problem says sum=rank");
    else
      absent("map.sum_of", map.sum_of, "the problem says sum=choice");
  }

 private:
  void codes(const DispatchArgs& args) const {
    const ExpertParallelProblem& p = problem();
    const QuantizedView place = window_.codes(plan_);
    const int64_t t = token_count("x", args.x), scales = place.scales[1];
    view("x", args.x, p.x->element, {t, p.hidden});
    view("x_scales", args.x_scales, place.scales.dtype, {t, scales});
    in_place("x", args.x, place.codes);
    in_place("x_scales", args.x_scales, place.scales);
    view("rows", args.rows, p.x->element, {p.rows, p.hidden});
    if (p.scales_major == Major::kRow)
      view("row_scales", args.row_scales, place.scales.dtype, {p.rows, scales});
    else
      column_view("row_scales", args.row_scales, place.scales.dtype, {p.rows, scales});
    elsewhere("rows", args.rows, "y lies there");
    elsewhere("row_scales", args.row_scales, "y lies there");
    ops::check_even(*this, "x", args.x);
    ops::check_even(*this, "x_scales", args.x_scales);
    ops::check_even(*this, "rows", args.rows);
    ops::check_even(*this, "row_scales", args.row_scales);
  }
  /// What lies in the window lies where this plan has it.
  void in_place(std::string_view what, const TensorView& v, const TensorView& place) const {
    const int64_t at = bytes_into_window(v);
    if (at < 0) return;
    const Window::State& state = window_.state();
    holds(static_cast<const char*>(v.data) == place.data && is_contiguous(v), what, " is ",
          ops::Seen{v}, ", ", at, " bytes into the window, must be contiguous, at ",
          static_cast<const char*>(place.data) - state.of(state.rank), "; or lie elsewhere");
  }
  void elsewhere(std::string_view what, const TensorView& v, std::string_view why) const {
    const int64_t at = bytes_into_window(v);
    holds(at < 0, what, " is ", at, " bytes into the window, must lie elsewhere; ", why);
  }
  /// Where a tensor begins; negative where that is not in the own window.
  int64_t bytes_into_window(const TensorView& v) const {
    const Window::State& state = window_.state();
    const auto* data = static_cast<const char*>(v.data);
    const char* window = state.of(state.rank);
    const bool is_there = elements(v) > 0 && data >= window && data < window + window_.bytes();
    return is_there ? data - window : -1;
  }

  const ExpertParallelPlan& plan_;
  const Window& window_;
};

}  // namespace cadre::parallel
