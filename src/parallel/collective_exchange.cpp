// The four exchanges by the caller's engine. Rows leave as a permute among all experts has them, so
// those for a rank are one segment; they come by rank, and one more permute brings them in order.
#include <algorithm>

#include "parallel/checks.h"
#include "parallel/collective.h"
#include "parallel/exchange.h"

namespace cadre {
namespace parallel {
namespace {

constexpr auto kWord = int64_t(sizeof(int32_t));

/// The checks of an exchange's arguments.
class CollectiveChecks : public ExchangeChecks {
 public:
  CollectiveChecks(ExchangeKind call, const Collective& collective, Stream stream)
      : ExchangeChecks(name(call), collective.plan().problem) {
    holds(problem().block > 0 || recorded_graph(collective.plan().device, stream) == 0,
          "the stream is recorded into a graph, must run; the host reads how many rows travel");
  }
  /// [t, H]
  void tokens(std::string_view what, const TensorView& v) const {
    view(what, v, problem().dtype, {token_count(what, v), problem().hidden});
  }
  /// [R, H]
  void rows(std::string_view what, const TensorView& v) const {
    view(what, v, problem().dtype, {problem().rows, problem().hidden});
  }
  void map(const CollectiveMap& map, int64_t tokens) const {
    const auto written = [this](std::string_view what, const auto* list, int64_t count) {
      present(what, list, count, "dispatch writes it");
    };
    const int64_t ranks = problem().ranks, experts = problem().experts;
    written("map.row_of", map.row_of, tokens * problem().top_k);
    written("map.slot_of", map.slot_of, leaving_rows(problem()));
    written("map.leaving", map.leaving, ranks * experts + 1);
    written("map.came_at", map.came_at, problem().rows);
    written("map.row_at", map.row_at, coming_rows(problem()));
    written("map.offsets", map.offsets, experts + 1);
    if (problem().block > 0) {
      absent("map.counts", map.counts, "the host reads none with block");
      return written("map.verdict", map.verdict, 3);
    }
    written("map.counts", map.counts, 3 * ranks + 2);
    absent("map.verdict", map.verdict, "the problem has no block");
  }
};

/// A list as a matrix of one column.
TensorView column(const float* list, int64_t count) { return view(list, DType::kF32, {count, 1}); }

/// An exchange under way: what it has at hand, and the steps that the four are made of.
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

  /// Of dispatch: the order in which rows leave; counts of all ranks, on their way to the host;
  /// what these say; the order of the rows that come.
  void sort_choices(const CollectiveDispatchArgs&) const;
  void gather_counts() const;
  void check_names() const;
  void count_rows(int32_t* routed) const;
  void order_rows() const;

  void leave(const TensorView& tokens) const;
  void to_experts(bool with_prob) const { move(true, with_prob); }
  void place(const TensorView& rows, float* row_prob) const;
  void go_back(const TensorView& rows, const float* row_prob) const;
  void to_tokens(bool with_prob) const;
  void sum(const TensorView& tokens, float* dprob) const;

  bool overflowed() const { return *counts.overflowed != 0; }
  void fill_nan(const TensorView& rows) const { state.link->fill(rows, 0xff, stream_); }
  void fill_nan(const float* list, int64_t count) const {
    if (list != nullptr) fill_nan(column(list, count));
  }

 private:
  template <class Word>
  Word* list(int64_t offset) const {
    return reinterpret_cast<Word*>(base_ + offset);
  }
  TensorView leaving() const {
    return view(base_ + memory_.leaving, p.dtype, {p.tokens * p.top_k, p.hidden});
  }
  TensorView coming() const { return view(base_ + memory_.coming, p.dtype, {p.rows, p.hidden}); }
  void move(bool to_experts, bool with_prob) const;
  void add_messages(const TensorView& leaving, const TensorView& coming, bool to_experts) const;

  const CollectiveMap& map_;
  const CollectiveMemory& memory_;
  char* base_;
  Stream stream_;
};

void Passage::sort_choices(const CollectiveDispatchArgs& args) const {
  float* row_prob = p.prob ? list<float>(memory_.leaving_prob) : nullptr;
  cadre::run(with_tokens(state.plan.offsets, args.x[0]),
             {.source = args.experts,
              .offsets = map_.leaving,
              .map = {.row_of = map_.row_of, .slot_of = map_.slot_of},
              .prob = row_prob == nullptr ? nullptr : args.prob,
              .row_prob = row_prob},
             {base_ + memory_.scratch, memory_.scratch_bytes}, stream_);
}

void Passage::gather_counts() const {
  const HostLists& host = state.host;
  state.link->await();  // the copies of the dispatch before
  auto* own_name = list<RankName>(memory_.own_name);
  state.link->copy(own_name, host.own_name, sizeof(RankName), stream_);
  const auto gathered = [&](const void* own, int64_t bytes, int64_t to) {
    for (int q = 0; q < p.ranks; ++q)
      state.messages.push_back({own, bytes, base_ + to + q * bytes, bytes});
  };
  const int64_t each = (int64_t(p.ranks) * p.experts + 1) * kWord;
  state.messages.clear();
  gathered(map_.leaving, each, memory_.counts);
  gathered(own_name, sizeof(RankName), memory_.names);
  state.all_to_all(state.messages, stream_);
  state.link->copy(host.names, base_ + memory_.names, p.ranks * int64_t(sizeof(RankName)), stream_);
  state.link->copy(host.counts, base_ + memory_.counts, p.ranks * each, stream_);
}

void Passage::check_names() const {
  const RankName* names = state.host.names;
  for (int q = 0; q < p.ranks; ++q) {
    if (names[q].problem != names[0].problem) throw problem_error(p, state.rank, q);
    if (names[q].rank != q) throw number_error(p, q, names[q].rank);
  }
}

void Passage::count_rows(int32_t* routed) const {
  const schedule::RankCounts all = state.counts();
  std::fill_n(counts.received, p.ranks, 0);
  all.each_run(state.rank,
               [&](const schedule::RankRun& run) { counts.received[run.from] += run.count; });
  counts.first[0] = 0;
  int fullest = 0;
  for (int q = 0; q < p.ranks; ++q) {
    counts.sent[q] = 0;
    counts.first[q + 1] = counts.first[q] + all.routed(state.rank, q);
    all.each_run(q, [&](const schedule::RankRun& run) {
      if (run.from == state.rank) counts.sent[q] += run.count;
    });
    if (all.routed(q) > all.routed(fullest)) fullest = q;
    if (routed != nullptr) routed[q] = int32_t(all.routed(q));
  }
  const int64_t most = all.routed(fullest);
  *counts.overflowed = p.overflow == Overflow::kError && most > p.rows;
  if (overflowed()) state.fullest = fullest, state.routed = most;
}

/// Of rows that come by rank, each rank's by expert.
void Passage::order_rows() const {
  const HostLists& host = state.host;
  std::vector<int64_t>& next = state.next;
  next[0] = 0;
  for (int q = 1; q < p.ranks; ++q) next[size_t(q)] = next[size_t(q) - 1] + counts.received[q - 1];
  int64_t rows = 0;
  std::fill_n(host.offsets, p.experts + 1, 0);
  state.counts().each_run(state.rank, [&](const schedule::RankRun& run) {
    int64_t& from = next[size_t(run.from)];
    for (int64_t i = 0; i < run.count; ++i) {
      host.came_at[run.first + i] = int32_t(from + i);
      host.row_at[from + i] = int32_t(run.first + i);
    }
    from += run.count;
    rows = run.first + run.count;
    host.offsets[run.expert + 1] = int32_t(rows);
  });
  state.link->copy(map_.came_at, host.came_at, rows * kWord, stream_);
  state.link->copy(map_.row_at, host.row_at, rows * kWord, stream_);
  state.link->copy(map_.offsets, host.offsets, (int64_t(p.experts) + 1) * kWord, stream_);
}

void Passage::leave(const TensorView& tokens) const {
  cadre::run(with_tokens(state.steps.leave, tokens[0]),
             {.tokens = tokens,
              .rows = leaving(),
              .map = {.row_of = map_.row_of, .slot_of = map_.slot_of},
              .offsets = {map_.leaving, p.ranks * p.experts}},
             {}, stream_);
}

/// Adds the messages of one tensor: rows for each rank among those that leave, and from each among
/// those that come; or the other way.
void Passage::add_messages(const TensorView& leaving, const TensorView& coming,
                           bool to_experts) const {
  const int64_t row_bytes = bytes_for(leaving.dtype, leaving[1]);
  char* came = static_cast<char*>(coming.data);
  for (int q = 0; q < p.ranks; ++q) {
    char* left = static_cast<char*>(leaving.data) + counts.first[q] * row_bytes;
    const int64_t sent = counts.sent[q] * row_bytes, received = counts.received[q] * row_bytes;
    if (to_experts)
      state.messages.push_back({left, sent, came, received});
    else
      state.messages.push_back({came, received, left, sent});
    came += received;
  }
}

void Passage::move(bool to_experts, bool with_prob) const {
  state.messages.clear();
  add_messages(leaving(), coming(), to_experts);
  if (with_prob)
    add_messages(column(list<float>(memory_.leaving_prob), p.tokens * p.top_k),
                 column(list<float>(memory_.coming_prob), p.rows), to_experts);
  state.all_to_all(state.messages, stream_);
}

void Passage::place(const TensorView& rows, float* row_prob) const {
  const bool prob = row_prob != nullptr;
  cadre::run(prob ? state.steps.place_with_prob : state.steps.place,
             {.tokens = coming(),
              .rows = rows,
              .map = {.slot_of = map_.came_at},
              .offsets = {map_.offsets, p.experts},
              .prob = prob ? list<float>(memory_.coming_prob) : nullptr,
              .row_prob = row_prob},
             {}, stream_);
}

void Passage::go_back(const TensorView& rows, const float* row_prob) const {
  const bool prob = row_prob != nullptr;
  cadre::run(prob ? state.steps.go_back_with_prob : state.steps.go_back,
             {.tokens = rows,
              .rows = coming(),
              .map = {.slot_of = map_.row_at},
              .offsets = {map_.offsets, p.experts},
              .prob = row_prob,
              .row_prob = prob ? list<float>(memory_.coming_prob) : nullptr},
             {}, stream_);
}

/// What was dropped is none of the rows that come back, and is zero.
void Passage::to_tokens(bool with_prob) const {
  move(false, with_prob);
  const TensorView rows = leaving();
  const auto clear = [&](const TensorView& of, int64_t first, int64_t count) {
    TensorView dropped = of;
    dropped.data = static_cast<char*>(of.data) + bytes_for(of.dtype, first * of[1]);
    dropped.shape[0] = count;
    state.link->fill(dropped, 0, stream_);
  };
  for (int q = 0; q < p.ranks; ++q) {
    const int64_t first = counts.first[q] + counts.sent[q], count = counts.first[q + 1] - first;
    if (count == 0) continue;
    clear(rows, first, count);
    if (with_prob) clear(column(list<float>(memory_.leaving_prob), 1), first, count);
  }
}

void Passage::sum(const TensorView& tokens, float* dprob) const {
  const bool prob = dprob != nullptr;
  cadre::run(with_tokens(prob ? state.steps.sum_with_dprob : state.steps.sum, tokens[0]),
             {.tokens = tokens,
              .rows = leaving(),
              .map = {.row_of = map_.row_of},
              .drow_prob = prob ? list<float>(memory_.leaving_prob) : nullptr,
              .dprob = dprob},
             {}, stream_);
}

}  // namespace
}  // namespace parallel

using parallel::CollectiveChecks;
using parallel::ExchangeKind;
using parallel::Passage;

void dispatch(Collective& collective, const CollectiveDispatchArgs& args, Workspace workspace,
              Stream stream) {
  const ExpertParallelPlan& plan = collective.plan();
  const ExpertParallelProblem& p = plan.problem;
  const CollectiveChecks checks(ExchangeKind::kDispatch, collective, stream);
  checks.tokens("x", args.x);
  checks.present("experts", args.experts, args.x[0] * p.top_k);
  checks.probabilities("prob", args.prob, args.x[0] * p.top_k);
  checks.rows("rows", args.rows);
  checks.probabilities("row_prob", args.row_prob, p.rows);
  checks.map(args.map, args.x[0]);
  checks.workspace(workspace, plan.workspace_bytes);
  if (p.block > 0) return parallel::dispatch_blocks(collective, args, workspace, stream);
  collective.check();
  const Passage passage(collective, args.map, workspace, stream);
  passage.sort_choices(args);
  passage.gather_counts();
  passage.leave(args.x);  // while the host waits
  passage.state.link->await();
  passage.check_names();
  passage.count_rows(args.routed);
  if (!passage.overflowed()) passage.to_experts(p.prob);
  passage.order_rows();  // while rows travel
  if (!passage.overflowed()) return passage.place(args.rows, args.row_prob);
  passage.fill_nan(args.rows);
  passage.fill_nan(args.row_prob, p.rows);
}

void collect(Collective& collective, const CollectiveCollectArgs& args, Workspace workspace,
             Stream stream) {
  const CollectiveChecks checks(ExchangeKind::kCollect, collective, stream);
  checks.rows("y", args.y);
  checks.tokens("out", args.out);
  checks.map(args.map, args.out[0]);
  checks.workspace(workspace, collective.plan().workspace_bytes);
  if (collective.plan().problem.block > 0)
    return parallel::collect_blocks(collective, args, workspace, stream);
  const Passage passage(collective, args.map, workspace, stream);
  if (passage.overflowed()) return passage.fill_nan(args.out);
  passage.go_back(args.y, nullptr);
  passage.to_tokens(false);
  passage.sum(args.out, nullptr);
}

void collect_backward(Collective& collective, const CollectiveCollectBackwardArgs& args,
                      Workspace workspace, Stream stream) {
  const CollectiveChecks checks(ExchangeKind::kCollectBackward, collective, stream);
  checks.tokens("dout", args.dout);
  checks.rows("dy", args.dy);
  checks.map(args.map, args.dout[0]);
  checks.workspace(workspace, collective.plan().workspace_bytes);
  if (collective.plan().problem.block > 0)
    return parallel::collect_backward_blocks(collective, args, workspace, stream);
  const Passage passage(collective, args.map, workspace, stream);
  if (passage.overflowed()) return passage.fill_nan(args.dy);
  passage.leave(args.dout);
  passage.to_experts(false);
  passage.place(args.dy, nullptr);
}

void dispatch_backward(Collective& collective, const CollectiveDispatchBackwardArgs& args,
                       Workspace workspace, Stream stream) {
  const ExpertParallelProblem& p = collective.plan().problem;
  const CollectiveChecks checks(ExchangeKind::kDispatchBackward, collective, stream);
  checks.rows("drows", args.drows);
  checks.probabilities("drow_prob", args.drow_prob, p.rows);
  checks.tokens("dx", args.dx);
  checks.probabilities("dprob", args.dprob, args.dx[0] * p.top_k);
  checks.map(args.map, args.dx[0]);
  checks.workspace(workspace, collective.plan().workspace_bytes);
  if (p.block > 0) return parallel::dispatch_backward_blocks(collective, args, workspace, stream);
  const Passage passage(collective, args.map, workspace, stream);
  if (passage.overflowed()) {
    passage.fill_nan(args.dx);
    return passage.fill_nan(args.dprob, args.dx[0] * p.top_k);
  }
  passage.go_back(args.drows, args.drow_prob);
  passage.to_tokens(p.prob);
  passage.sum(args.dx, args.dprob);
}

}  // namespace cadre
