// The steps of an exchange by the caller's engine that run on its stream.
#include "parallel/collective_passage.h"

#include "parallel/exchange.h"

namespace cadre::parallel {

/// A list as a matrix of one column.
static TensorView column(const float* list, int64_t count) {
  return view(list, DType::kF32, {count, 1});
}

void Passage::sort(const CollectiveDispatchArgs& args, const OffsetsArgs& of) const {
  cadre::run(with_tokens(state.plan.offsets, args.x[0]), of,
             {base_ + memory_.scratch, memory_.scratch_bytes}, stream_);
}

/// By token there are two sorts: of all choices, and of those that are the first of a token at a
/// rank, which are the tokens that leave. By host there is a third, of those for hosts, which leave
/// in their place.
void Passage::sort_choices(const CollectiveDispatchArgs& args) const {
  float* row_prob = p.prob ? list<float>(memory_.leaving_prob) : nullptr;
  OffsetsArgs choices{.source = args.experts,
                      .offsets = map_.leaving,
                      .map = {.row_of = map_.row_of, .slot_of = map_.slot_of},
                      .prob = row_prob == nullptr ? nullptr : args.prob,
                      .row_prob = row_prob};
  if (!by_token()) return sort(args, choices);
  const schedule::LeavingTokens tokens = tokens_of(args);
  choices.offsets = list<int32_t>(memory_.row_offsets);
  choices.map.slot_of = nullptr;
  sort(args, choices);
  state.link->find_first_choices(tokens, stream_);
  OffsetsArgs firsts{.source = tokens.firsts,
                     .offsets = map_.leaving,
                     .map = {.row_of = list<int32_t>(memory_.token_of), .slot_of = map_.slot_of}};
  if (!by_host()) return sort(args, firsts);
  firsts.offsets = list<int32_t>(memory_.token_offsets);
  firsts.map.slot_of = nullptr;
  sort(args, firsts);
  sort(args, {.source = tokens.host_firsts,
              .offsets = map_.leaving,
              .map = {.row_of = list<int32_t>(memory_.host_token_of), .slot_of = map_.slot_of}});
}

schedule::LeavingTokens Passage::tokens_of(const CollectiveDispatchArgs& args) const {
  schedule::LeavingTokens tokens{
      .ranks = p.ranks,
      .experts = p.experts,
      .top_k = p.top_k,
      .choices = args.x[0] * p.top_k,
      .chosen = args.experts,
      .firsts = list<int32_t>(memory_.firsts),
      .row_of = map_.row_of,
      .row_offsets = list<int32_t>(memory_.row_offsets),
      .token_of = list<int32_t>(memory_.token_of),
      .token_offsets = map_.leaving,
      .back = list<int32_t>(memory_.leaving_back),
      .told = list<int32_t>(memory_.said) + schedule::RowBlocks::kNameWords};
  if (!by_host()) return tokens;
  tokens.token_offsets = list<int32_t>(memory_.token_offsets);
  tokens.host_ranks = p.host_ranks;
  tokens.host_firsts = list<int32_t>(memory_.host_firsts);
  tokens.host_token_of = list<int32_t>(memory_.host_token_of);
  tokens.host_token_offsets = map_.leaving;
  tokens.host_number = list<int32_t>(memory_.host_number);
  return tokens;
}

void Passage::find_tokens(float* row_prob) const {
  int64_t rows = 0;
  for (int q = 0; q < p.ranks; ++q) rows += counts.rows.received[q];
  state.link->find_tokens({.rows = rows,
                           .bound = p.rows,
                           .back = list<int32_t>(memory_.coming_back),
                           .prob = list<float>(memory_.coming_prob),
                           .came_at = map_.came_at,
                           .row_prob = row_prob,
                           .zero_tail = p.tail == Tail::kZero},
                          stream_);
}

/// By token `row_of` is of other rows than these.
void Passage::leave(const TensorView& tokens) const {
  cadre::run(with_tokens(state.steps.leave, tokens[0]),
             {.tokens = tokens,
              .rows = leaving(),
              .map = {.row_of = by_token() ? nullptr : map_.row_of, .slot_of = map_.slot_of},
              .offsets = {map_.leaving, p.ranks * p.experts}},
             {}, stream_);
}

/// Adds the messages of one tensor: what leaves for each rank and comes from each; or the other
/// way. What comes from a rank has the place of its rows, of which there are no fewer.
void Passage::add_messages(const CountLists::Parts& of, const Place& at, bool to_experts) const {
  char* came = base_ + at.coming;
  for (int q = 0; q < p.ranks; ++q) {
    char* left = base_ + at.leaving + of.first[q] * at.row_bytes;
    const int64_t sent = of.sent[q] * at.row_bytes, received = of.received[q] * at.row_bytes;
    if (to_experts)
      state.messages.push_back({left, sent, came, received});
    else
      state.messages.push_back({came, received, left, sent});
    came += counts.rows.received[q] * at.row_bytes;
  }
}

void Passage::to_experts(bool is_dispatch) const {
  state.messages.clear();
  if (by_host())
    add_tokens_for_hosts();
  else
    add_messages(counts.tokens, rows_place(), true);
  if (is_dispatch && by_host()) add_numbers_for_hosts();
  if (is_dispatch && by_token())
    add_messages(counts.rows, {memory_.leaving_back, memory_.coming_back, sizeof(int32_t)}, true);
  if (is_dispatch && p.prob) add_messages(counts.rows, prob_place(), true);
  state.all_to_all(state.messages, stream_);
  if (by_host()) pass_on();
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
  state.messages.clear();
  add_messages(counts.rows, rows_place(), false);
  if (with_prob) add_messages(counts.rows, prob_place(), false);
  state.all_to_all(state.messages, stream_);
  const TensorView rows = leaving();
  const auto clear = [&](const TensorView& of, int64_t first, int64_t count) {
    TensorView dropped = of;
    dropped.data = static_cast<char*>(of.data) + bytes_for(of.dtype, first * of[1]);
    dropped.shape[0] = count;
    state.link->fill(dropped, 0, stream_);
  };
  const CountLists::Parts& of = counts.rows;
  for (int q = 0; q < p.ranks; ++q) {
    const int64_t first = of.first[q] + of.sent[q], count = of.first[q + 1] - first;
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

void Passage::fill_nan(const float* list, int64_t count) const {
  if (list != nullptr) fill_nan(column(list, count));
}

}  // namespace cadre::parallel
