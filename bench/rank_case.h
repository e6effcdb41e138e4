#pragma once
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "bench/accelerator.h"
#include "bench/buffers.h"
#include "bench/mirror.h"
#include "bench/rank_route.h"
#include "bench/rank_routing.h"
#include "cadre/expert_parallel.h"

namespace cadre::bench {

/// The same experts and tokens on one rank.
ExpertParallelProblem as_one_rank(const ExpertParallelProblem&);

/// Bytes of a token or a row as dispatch moves it.
int64_t dispatched_bytes(const ExpertParallelProblem&);

/// What the tokens of all ranks bring, random; the same on every rank.
struct RankInputs {
  RankInputs(const ExpertParallelProblem&, uint64_t seed, Buffers&);
  TensorView x, dout;     ///< [P * T, H]
  TensorView x_scales{};  ///< [P * T, H / block], where x is codes
  float* prob;            ///< [P * T, top_k]
};

/// The tensors of a rank's four exchanges. What experts make of a row differs by expert and column,
/// and takes no weights.
class RankCase {
 public:
  /// `first_token` of all: rank * T. With an accelerator the exchanges are its.
  RankCase(const ExpertParallelPlan&, const RankInputs&, int64_t first_token, Buffers&,
           Accelerator* = nullptr);

  /// The tokens that choose, until the next call: `experts` are those of all ranks' tokens.
  void choose(const int32_t* experts, int64_t tokens);

  /// All four, and the experts between them. `enter` is told which one begins.
  void step(RankRoute&, const std::function<void(std::string_view)>& enter);
  /// From now on tokens and rows are taken from the window, where those of forward are copied to.
  void move_into(Window&);
  /// Of one rank that has all, behind its step: its sums become those that the ranks of a problem
  /// make, of which each first sums its own rows.
  void sum_as_ranks_do(const ExpertParallelProblem& of);
  /// On an accelerator they are enqueued.
  void dispatch(RankRoute&);
  void collect(RankRoute&);
  /// What an accelerator has written, on the host, and the other way.
  void fetch() const;
  void upload() const;

  const ExpertParallelPlan& plan() const { return plan_; }
  /// What the route of a plan by collective writes, where the exchanges are.
  CollectiveMap collective_map() const { return there(collective_map_); }

  /// What an exchange wrote.
  struct Result {
    std::string_view name;
    TensorView view;    ///< [T or R, width]
    bool is_of_tokens;  ///< else of rows
  };
  std::vector<Result> results() const;
  const int32_t* offsets() const { return map_.offsets; }
  const int32_t* routed() const { return routed_; }
  int64_t tokens() const { return tokens_; }
  int64_t used() const { return map_.offsets[plan_.problem.experts]; }
  bool has_overflowed() const;
  /// True while nobody has written beside what the host has alone.
  bool canaries_live() const { return of_host_.canaries_live(); }

 private:
  void take_maps(Buffers&);
  void take_collective_map(Buffers&);
  /// Writes rows to their places, if the problem pushes them.
  void push(RankRoute&, const TensorView& rows) const;
  TensorView of_tokens(const TensorView& most) const;
  void decode_rows() const;
  void apply_experts(const TensorView& from, const TensorView& to, const float* factors) const;

  template <class Args>
  Args there(const Args& args) const {
    return mirror_ ? mirror_->moved(args) : args;
  }
  Stream stream() const { return accelerator_ ? accelerator_->stream() : Stream(); }

  const ExpertParallelPlan& plan_;
  Accelerator* accelerator_;
  std::unique_ptr<Mirror> mirror_{};
  Buffers of_host_;  ///< what exchanges write there, of which an accelerator has no copy
  int64_t first_choice_, first_expert_, tokens_ = 0;
  int32_t* experts_ = nullptr;
  TensorView x_, dout_, rows_, y_, out_, dy_, drows_, dx_;
  /// Where x is codes: its scales, what dispatch writes, of which rows are made, and the scales of
  /// rows once more, row-major.
  TensorView x_scales_, row_codes_, row_scales_, scales_seen_;
  float *prob_, *row_prob_, *drow_prob_, *dprob_;
  int32_t* routed_ = nullptr;
  ExchangeMap map_{};  ///< by collective what both maps have
  CollectiveMap collective_map_{};
  Workspace workspace_;
};

}  // namespace cadre::bench
