// The four exchanges by the caller's engine in blocks: messages have one size, so the host reads
// nothing. Which expert has the row at a place travels with it, and the sort of these is the map.
#include "parallel/collective.h"
#include "parallel/exchange.h"

namespace cadre::parallel {
namespace {

constexpr auto kWord = int64_t(sizeof(int32_t));

TensorView column(const float* list, int64_t count) { return view(list, DType::kF32, {count, 1}); }

/// An exchange under way.
class BlockPassage {
 public:
  BlockPassage(const Collective& collective, const CollectiveMap& map, Workspace workspace,
               Stream stream)
      : state_(collective.state()),
        p_(state_.plan.problem),
        map_(map),
        base_(static_cast<char*>(workspace.data)),
        stream_(stream) {
    state_.messages.clear();
  }

  void sort_choices(const CollectiveDispatchArgs&) const;
  schedule::RowBlocks blocks(const CollectiveDispatchArgs&) const;
  void make_places(const schedule::RowBlocks& b) const { state_.link->make_places(b, stream_); }
  void judge(const schedule::RowBlocks& b) const { state_.link->judge(b, stream_); }
  void sort_arrivals() const;

  void leave(const TensorView& tokens, const float* prob) const;
  void tell(const schedule::RowBlocks&) const;
  void to_experts(bool with_prob) const { move(true, with_prob); }
  void to_tokens(bool with_prob) const { move(false, with_prob); }
  void place(const TensorView& rows, float* row_prob) const;
  void go_back(const TensorView& rows, const float* row_prob) const;
  void sum(const TensorView& tokens, float* dprob) const;
  void spoil(const TensorView& rows) const { state_.link->spoil(rows, map_.verdict, stream_); }
  void spoil(const float* list, int64_t count) const {
    if (list != nullptr) spoil(column(list, count));
  }

 private:
  template <class Word>
  Word* list(int64_t offset) const {
    return reinterpret_cast<Word*>(base_ + offset);
  }
  int64_t places() const { return leaving_rows(p_); }
  TensorView rows_at(int64_t offset) const {
    return view(base_ + offset, p_.dtype, {places(), p_.hidden});
  }
  /// The probabilities there, if they go along.
  float* prob_at(int64_t offset, bool with_prob) const {
    return with_prob ? list<float>(offset) : nullptr;
  }
  void add_messages(int64_t from, int64_t to, int64_t bytes) const;
  void move(bool to_experts, bool with_prob) const;

  Collective::State& state_;
  const ExpertParallelProblem& p_;
  const CollectiveMap& map_;
  char* base_;
  Stream stream_;
};

void BlockPassage::sort_choices(const CollectiveDispatchArgs& args) const {
  cadre::run(with_tokens(state_.plan.offsets, args.x[0]),
             {.source = args.experts,
              .offsets = map_.leaving,
              .map = {.row_of = map_.row_of, .slot_of = list<int32_t>(state_.memory.sorted)}},
             {base_ + state_.memory.scratch, state_.memory.scratch_bytes}, stream_);
}

schedule::RowBlocks BlockPassage::blocks(const CollectiveDispatchArgs& args) const {
  const CollectiveMemory& memory = state_.memory;
  return {.ranks = p_.ranks,
          .rank = state_.rank,
          .experts = p_.experts,
          .block = p_.block,
          .bound = p_.rows,
          .choices = args.x[0] * p_.top_k,
          .tag = int32_t(state_.plan.tag),
          .overflow_is_error = p_.overflow == Overflow::kError,
          .chosen = args.experts,
          .leaving = map_.leaving,
          .sorted = list<int32_t>(memory.sorted),
          .row_of = map_.row_of,
          .slot_of = map_.slot_of,
          .expert_at = list<int32_t>(memory.leaving_experts),
          .said = list<int32_t>(memory.said),
          .heard = list<int32_t>(memory.heard),
          .verdict = map_.verdict,
          .routed = args.routed,
          .note = state_.host.note};
}

/// Places are in the order of (rank, expert, token, choice), and a sort keeps the order of equals.
void BlockPassage::sort_arrivals() const {
  cadre::run(state_.steps.arrive,
             {.source = list<int32_t>(state_.memory.coming_experts),
              .offsets = map_.offsets,
              .map = {.row_of = map_.row_at, .slot_of = map_.came_at}},
             {base_ + state_.memory.scratch, state_.memory.scratch_bytes}, stream_);
}

void BlockPassage::leave(const TensorView& tokens, const float* prob) const {
  const bool with_prob = prob != nullptr;
  const CollectiveSteps& steps = state_.steps;
  cadre::run(with_tokens(with_prob ? steps.leave_with_prob : steps.leave, tokens[0]),
             {.tokens = tokens,
              .rows = rows_at(state_.memory.leaving),
              .map = {.row_of = map_.row_of, .slot_of = map_.slot_of},
              .offsets = {map_.verdict + 1, 1},
              .prob = prob,
              .row_prob = prob_at(state_.memory.leaving_prob, with_prob)},
             {}, stream_);
}

/// Adds the messages of one tensor, of so many bytes for each rank.
void BlockPassage::add_messages(int64_t from, int64_t to, int64_t bytes) const {
  for (int q = 0; q < p_.ranks; ++q)
    state_.messages.push_back({base_ + from + q * bytes, bytes, base_ + to + q * bytes, bytes});
}

/// What a dispatch says to all, and experts at places. It goes with the rows.
void BlockPassage::tell(const schedule::RowBlocks& b) const {
  const CollectiveMemory& memory = state_.memory;
  const int64_t bytes = b.words() * kWord;
  for (int q = 0; q < p_.ranks; ++q)
    state_.messages.push_back({b.said, bytes, base_ + memory.heard + q * bytes, bytes});
  add_messages(memory.leaving_experts, memory.coming_experts, p_.block * kWord);
}

void BlockPassage::move(bool to_experts, bool with_prob) const {
  const CollectiveMemory& memory = state_.memory;
  const auto add = [&](int64_t leaving, int64_t coming, int64_t bytes) {
    to_experts ? add_messages(leaving, coming, bytes) : add_messages(coming, leaving, bytes);
  };
  add(memory.leaving, memory.coming, bytes_for(p_.dtype, p_.block * p_.hidden));
  if (with_prob) add(memory.leaving_prob, memory.coming_prob, p_.block * int64_t(sizeof(float)));
  state_.all_to_all(state_.messages, stream_);
}

void BlockPassage::place(const TensorView& rows, float* row_prob) const {
  const bool with_prob = row_prob != nullptr;
  cadre::run(with_prob ? state_.steps.place_with_prob : state_.steps.place,
             {.tokens = rows_at(state_.memory.coming),
              .rows = rows,
              .map = {.slot_of = map_.came_at},
              .offsets = {map_.offsets, p_.experts},
              .prob = prob_at(state_.memory.coming_prob, with_prob),
              .row_prob = row_prob},
             {}, stream_);
}

void BlockPassage::go_back(const TensorView& rows, const float* row_prob) const {
  const bool with_prob = row_prob != nullptr;
  cadre::run(with_prob ? state_.steps.go_back_with_prob : state_.steps.go_back,
             {.tokens = rows_at(state_.memory.coming),
              .rows = rows,
              .map = {.row_of = map_.row_at},
              .drow_prob = row_prob,
              .dprob = prob_at(state_.memory.coming_prob, with_prob)},
             {}, stream_);
}

void BlockPassage::sum(const TensorView& tokens, float* dprob) const {
  const bool with_prob = dprob != nullptr;
  const CollectiveSteps& steps = state_.steps;
  cadre::run(with_tokens(with_prob ? steps.sum_with_dprob : steps.sum, tokens[0]),
             {.tokens = tokens,
              .rows = rows_at(state_.memory.leaving),
              .map = {.row_of = map_.row_of},
              .drow_prob = prob_at(state_.memory.leaving_prob, with_prob),
              .dprob = dprob},
             {}, stream_);
}

/// Throws what earlier dispatches noted, on all ranks alike: what it looks at is over on each.
/// Returns whether the host may look, as it may not while a graph is recorded.
bool check_earlier(Collective::State& state, Stream stream) {
  if (recorded_graph(state.plan.device, stream) != 0) {
    state.was_recorded = true;
    return false;
  }
  if (state.was_recorded) state.link->mark(stream);
  state.link->await();
  state.check_note();
  return true;
}

}  // namespace

void dispatch_blocks(const Collective& collective, const CollectiveDispatchArgs& args,
                     Workspace workspace, Stream stream) {
  Collective::State& state = collective.state();
  const ExpertParallelProblem& p = state.plan.problem;
  const bool is_eager = check_earlier(state, stream);
  const BlockPassage passage(collective, args.map, workspace, stream);
  const schedule::RowBlocks blocks = passage.blocks(args);
  passage.sort_choices(args);
  passage.make_places(blocks);
  passage.leave(args.x, args.prob);
  passage.tell(blocks);
  passage.to_experts(p.prob);
  passage.judge(blocks);
  if (is_eager) state.link->mark(stream);
  passage.sort_arrivals();
  passage.place(args.rows, args.row_prob);
  passage.spoil(args.rows);
  passage.spoil(args.row_prob, p.rows);
}

void collect_blocks(const Collective& collective, const CollectiveCollectArgs& args,
                    Workspace workspace, Stream stream) {
  const BlockPassage passage(collective, args.map, workspace, stream);
  passage.go_back(args.y, nullptr);
  passage.to_tokens(false);
  passage.sum(args.out, nullptr);
  passage.spoil(args.out);
}

void collect_backward_blocks(const Collective& collective,
                             const CollectiveCollectBackwardArgs& args, Workspace workspace,
                             Stream stream) {
  const BlockPassage passage(collective, args.map, workspace, stream);
  passage.leave(args.dout, nullptr);
  passage.to_experts(false);
  passage.place(args.dy, nullptr);
  passage.spoil(args.dy);
}

void dispatch_backward_blocks(const Collective& collective,
                              const CollectiveDispatchBackwardArgs& args, Workspace workspace,
                              Stream stream) {
  const ExpertParallelProblem& p = collective.plan().problem;
  const BlockPassage passage(collective, args.map, workspace, stream);
  passage.go_back(args.drows, args.drow_prob);
  passage.to_tokens(p.prob);
  passage.sum(args.dx, args.dprob);
  passage.spoil(args.dx);
  passage.spoil(args.dprob, args.dx[0] * p.top_k);
}

}  // namespace cadre::parallel
