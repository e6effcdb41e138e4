#pragma once
#include "parallel/collective.h"

namespace cadre::parallel {

/// An exchange under way: what it has at hand, and the steps that the four are made of. What
/// crosses to experts are tokens, or, not by token, a row for each choice.
class Passage {
 public:
  Passage(Collective& collective, const CollectiveMap& map, Workspace workspace, Stream stream)
      : state(collective.state()),
        p(state.plan.problem),
        counts(map.counts, p.ranks),
        map_(map),
        memory_(state.memory),
        base_(static_cast<char*>(workspace.data)),
        stream_(stream) {}

  Collective::State& state;
  const ExpertParallelProblem& p;
  CountLists counts;

  /// Of dispatch: the order in which tokens leave; counts of all ranks, on their way to the host;
  /// what these say; the order of the rows that come, and which tokens these are of.
  void sort_choices(const CollectiveDispatchArgs&) const;
  void gather_counts(const CollectiveDispatchArgs&) const;
  void check_words() const;
  void count_rows(int32_t* routed) const;
  void count_tokens() const;
  void count_for_hosts() const;
  void order_rows() const;
  void find_tokens(float* row_prob) const;

  void leave(const TensorView& tokens) const;
  /// Tokens; with a dispatch also what it says of its rows.
  void to_experts(bool is_dispatch) const;
  void place(const TensorView& rows, float* row_prob) const;
  void go_back(const TensorView& rows, const float* row_prob) const;
  void to_tokens(bool with_prob) const;
  void sum(const TensorView& tokens, float* dprob) const;

  bool by_token() const { return state.plan.by_token; }
  bool by_host() const { return state.plan.by_host; }
  bool overflowed() const { return *counts.overflowed != 0; }
  void fill_nan(const TensorView& rows) const { state.link->fill(rows, 0xff, stream_); }
  void fill_nan(const float* list, int64_t count) const;

 private:
  template <class Word>
  Word* list(int64_t offset) const {
    return reinterpret_cast<Word*>(base_ + offset);
  }
  TensorView leaving() const {
    return view(base_ + memory_.leaving, p.dtype, {p.tokens * p.top_k, p.hidden});
  }
  TensorView coming() const { return view(base_ + memory_.coming, p.dtype, {p.rows, p.hidden}); }
  schedule::LeavingTokens tokens_of(const CollectiveDispatchArgs&) const;
  void sort(const CollectiveDispatchArgs&, const OffsetsArgs&) const;

  /// Where a tensor lies that travels, in the workspace, and the bytes of a row.
  struct Place {
    int64_t leaving, coming, row_bytes;
  };
  Place rows_place() const {
    return {memory_.leaving, memory_.coming, bytes_for(p.dtype, p.hidden)};
  }
  Place prob_place() const {
    return {memory_.leaving_prob, memory_.coming_prob, int64_t(sizeof(float))};
  }
  void add_messages(const CountLists::Parts&, const Place&, bool to_experts) const;

  /// By host: tokens to the relays of this rank, and, of dispatch, which are for whom; and then
  /// what this rank passes on.
  void add_tokens_for_hosts() const;
  void add_numbers_for_hosts() const;
  void pass_on() const;
  void pass_on(int round) const;
  void count_passed() const;
  /// Whether this rank passes on the tokens of that one, and that one those of this rank.
  bool is_relay_of(int from) const;
  bool is_own_relay(int there) const;
  int own_host() const { return state.relays.host_of(state.rank); }
  int64_t rounds() const { return state.rounds; }
  /// Tokens of a rank for those of a host, each as often as it has ranks there.
  int64_t told_to_host(int from, int host) const;

  const CollectiveMap& map_;
  const CollectiveMemory& memory_;
  char* base_;
  Stream stream_;
};

}  // namespace cadre::parallel
