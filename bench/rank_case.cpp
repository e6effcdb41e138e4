#include "bench/rank_case.h"

#include <algorithm>

#include "bench/cases/parts.h"
#include "bench/element.h"
#include "cadre/dequantize.h"

namespace cadre::bench {
namespace {

/// So many of the rows, from the first on, in other buffers.
TensorView copy_of(const TensorView& v, int64_t first, int64_t rows, Buffers& buffers) {
  const int64_t bytes = bytes_for(v.dtype, v[1]);
  const TensorView copy = buffers.tensor(v.dtype, {rows, v[1]});
  std::copy_n(static_cast<const char*>(v.data) + first * bytes, rows * bytes,
              static_cast<char*>(copy.data));
  return copy;
}

/// Codes of so many rows, and how their scales lie.
QuantizedShape shape_of(const ExpertParallelProblem& p, int64_t rows) {
  return {.rows = rows, .cols = p.hidden, .format = *p.x};
}

/// The same of the rows that dispatch writes.
QuantizedShape shape_of_rows(const ExpertParallelProblem& p) {
  QuantizedShape shape = shape_of(p, p.rows);
  shape.scales_major = p.scales_major;
  return shape;
}

/// Numbers as codes of a format, in other buffers.
QuantizedView codes_of(const ExpertParallelProblem& p, const TensorView& x, Buffers& buffers) {
  const QuantizedShape shape = shape_of(p, x[0]);
  const QuantizedView codes = quantized_view(shape, buffers.take(quantized_bytes(shape)));
  const int32_t ends[] = {0, int32_t(x[0])};
  run_on_cpu(QuantizeProblem{.rows = x[0], .cols = p.hidden, .source = p.dtype, .along_k = p.x},
             QuantizeArgs{.source = x, .offsets = {ends, 1}, .along_k = codes});
  return codes;
}

}  // namespace

ExpertParallelProblem as_one_rank(const ExpertParallelProblem& p) {
  ExpertParallelProblem one = p;
  one.ranks = 1;
  one.experts = p.ranks * p.experts;
  one.tokens = p.ranks * p.tokens;
  one.rows = one.tokens * p.top_k;
  one.block = 0;
  one.push = false;
  one.sum = RowSum::kChoice;
  one.cross = Crossing::kAuto;
  one.host_ranks = 0;
  return one;
}

RankInputs::RankInputs(const ExpertParallelProblem& p, uint64_t seed, Buffers& buffers)
    : x(buffers.tensor(p.dtype, {p.ranks * p.tokens, p.hidden})),
      dout(buffers.tensor(p.dtype, {p.ranks * p.tokens, p.hidden})),
      prob(buffers.array<float>(p.ranks * p.tokens * p.top_k)) {
  fill_normal(x, x[0], seed);
  fill_normal(dout, dout[0], seed + 1);
  fill_normal(view(prob, DType::kF32, {x[0], p.top_k}), x[0], seed + 2);
  if (!p.x) return;
  const QuantizedView codes = codes_of(p, x, buffers);
  x = codes.codes, x_scales = codes.scales;
}

int64_t dispatched_bytes(const ExpertParallelProblem& p) {
  if (!p.x) return bytes_for(p.dtype, p.hidden);
  const TensorView scales = quantized_view(shape_of(p, 1), nullptr).scales;
  return bytes_for(p.x->element, p.hidden) + bytes_for(scales.dtype, scales[1]);
}

RankCase::RankCase(const ExpertParallelPlan& plan, const RankInputs& inputs, int64_t first_token,
                   Buffers& buffers, Accelerator* accelerator)
    : plan_(plan),
      accelerator_(accelerator),
      first_choice_(first_token * plan.problem.top_k),
      x_(copy_of(inputs.x, first_token, plan.problem.tokens, buffers)),
      dout_(copy_of(inputs.dout, first_token, plan.problem.tokens, buffers)),
      prob_(buffers.array<float>(plan.problem.tokens * plan.problem.top_k)) {
  const ExpertParallelProblem& p = plan.problem;
  std::copy_n(inputs.prob + first_choice_, p.tokens * p.top_k, prob_);
  experts_ = buffers.array<int32_t>(p.tokens * p.top_k);
  first_expert_ = p.tokens > 0 ? first_token / p.tokens * p.experts : 0;
  for (TensorView* rows : {&rows_, &y_, &dy_, &drows_})
    *rows = buffers.tensor(p.dtype, {p.rows, p.hidden});
  if (p.x) {
    const QuantizedShape shape = shape_of_rows(p);
    const QuantizedView codes = quantized_view(shape, buffers.take(quantized_bytes(shape)));
    x_scales_ = copy_of(inputs.x_scales, first_token, p.tokens, buffers);
    row_codes_ = codes.codes, row_scales_ = codes.scales;
    scales_seen_ = buffers.tensor(row_scales_.dtype, {p.rows, row_scales_[1]});
  }
  for (TensorView* sums : {&out_, &dx_}) *sums = buffers.tensor(p.dtype, {p.tokens, p.hidden});
  for (float** of_rows : {&row_prob_, &drow_prob_}) *of_rows = buffers.array<float>(p.rows);
  dprob_ = buffers.array<float>(p.tokens * p.top_k);
  take_maps(buffers);
  workspace_ = buffers.workspace(plan.workspace_bytes);
  if (accelerator != nullptr) mirror_ = std::make_unique<Mirror>(buffers, *accelerator);
}

void RankCase::take_maps(Buffers& buffers) {
  const ExpertParallelProblem& p = plan_.problem;
  const auto words = [&](int64_t count) { return buffers.array<int32_t>(count); };
  map_.row_of = words(p.tokens * p.top_k);
  map_.offsets = words(p.experts + 1);
  if (plan_.name == kCollective) return take_collective_map(buffers);
  routed_ = words(p.ranks);
  map_.slot_of = words(p.rows);
  map_.row_here = words(p.ranks * p.tokens * p.top_k);
  map_.verdict = words(1);
  if (p.push) map_.place_of = words(p.rows);
  if (p.sum == RowSum::kRank) map_.sum_of = words(p.tokens * p.ranks);
}

void RankCase::take_collective_map(Buffers& buffers) {
  const ExpertParallelProblem& p = plan_.problem;
  const auto words = [&](int64_t count) { return buffers.array<int32_t>(count); };
  const bool in_blocks = p.block > 0;
  const int64_t places = p.ranks * p.block;
  collective_map_ = {.row_of = map_.row_of,
                     .slot_of = words(in_blocks ? places : p.tokens * p.top_k),
                     .leaving = words(int64_t(p.ranks) * p.experts + 1),
                     .came_at = words(p.rows),
                     .row_at = words(in_blocks ? places : p.rows),
                     .offsets = map_.offsets};
  if (in_blocks)
    map_.verdict = collective_map_.verdict = words(3);
  else
    collective_map_.counts = of_host_.array<int64_t>(plan_.counts);
  if (plan_.by_host) collective_map_.passing = words(plan_.passing);
  routed_ = (in_blocks ? buffers : of_host_).array<int32_t>(p.ranks);
}

bool RankCase::has_overflowed() const {
  const int64_t* counts = collective_map_.counts;
  return (counts != nullptr ? counts[6 * plan_.problem.ranks + 2] : *map_.verdict) != 0;
}

void RankCase::choose(const int32_t* experts, int64_t tokens) {
  std::copy_n(experts + first_choice_, tokens * plan_.problem.top_k, experts_);
  tokens_ = tokens;
  upload();
}

void RankCase::fetch() const {
  if (mirror_) mirror_->fetch();
}
void RankCase::upload() const {
  if (mirror_) mirror_->upload();
}

void RankCase::move_into(Window& window) {
  const auto moved = [&](const TensorView& from, const TensorView& to) {
    const TensorView there_now = there(from);
    const int64_t bytes = bytes_for(from.dtype, elements(from));
    if (accelerator_ != nullptr)
      accelerator_->copy(to.data, there_now.data, bytes);
    else
      std::copy_n(static_cast<const char*>(from.data), bytes, static_cast<char*>(to.data));
    return to;
  };
  window.await_readers(stream());
  if (plan_.problem.x) {
    const QuantizedView codes = window.codes(plan_);
    x_ = moved(x_, codes.codes), x_scales_ = moved(x_scales_, codes.scales);
  } else {
    x_ = moved(x_, window.tokens(plan_));
  }
  if (!plan_.problem.push && plan_.problem.sum == RowSum::kChoice)
    y_ = moved(y_, window.rows(plan_));
}

void RankCase::sum_as_ranks_do(const ExpertParallelProblem& of) {
  const ExpertParallelProblem& p = plan_.problem;
  const auto sum = [&](const TensorView& rows, const TensorView& to) {
#pragma omp parallel for
    for (int64_t t = 0; t < tokens_; ++t)
      for (int64_t h = 0; h < p.hidden; ++h) {
        const int64_t at = t * p.hidden + h;
        float total = 0;
        for (int q = 0; q < of.ranks; ++q) {
          float of_rank = 0;
          for (int64_t i = t * p.top_k; i < (t + 1) * p.top_k; ++i)
            if (map_.row_of[i] >= 0 && experts_[i] / of.experts == q)
              of_rank += load(rows, map_.row_of[i] * p.hidden + h);
          store(to, at, of_rank);
          total += load(to, at);
        }
        store(to, at, total);
      }
  };
  sum(y_, out_);
  sum(drows_, dx_);
}

void RankCase::push(RankRoute& route, const TensorView& rows) const {
  const ExpertParallelProblem& p = plan_.problem;
  if (!p.push) return;
  Window& window = *route.window();
  window.await_readers(stream());
  const TensorView places = window.places(plan_);
  const int64_t each = p.tokens * p.top_k, bytes = bytes_for(p.dtype, p.hidden);
  for (int64_t row = 0; row < used(); ++row) {
    const int64_t place = map_.place_of[row];
    char* to = static_cast<char*>(places.data) + place % each * bytes;
    if (p.ranks > 1) to += bytes_for(p.dtype, place / each * places.stride[0]);
    const auto* from = static_cast<const char*>(rows.data) + row * bytes;
    if (accelerator_ != nullptr)
      accelerator_->upload(to, from, bytes);
    else
      std::copy_n(from, bytes, to);
  }
}

TensorView RankCase::of_tokens(const TensorView& most) const {
  return view(most.data, most.dtype, {tokens_, most[1]});
}

void RankCase::dispatch(RankRoute& route) {
  const ExpertParallelProblem& p = plan_.problem;
  DispatchArgs args{.x = of_tokens(x_),
                    .experts = experts_,
                    .prob = p.prob ? prob_ : nullptr,
                    .rows = p.x ? row_codes_ : rows_,
                    .row_scales = row_scales_,
                    .row_prob = p.prob ? row_prob_ : nullptr,
                    .routed = routed_,
                    .map = map_};
  if (p.x) args.x_scales = of_tokens(x_scales_);
  route.dispatch(there(args), there(workspace_), stream());
}

void RankCase::collect(RankRoute& route) {
  const CollectArgs args{
      .y = plan_.problem.push ? TensorView() : y_, .out = of_tokens(out_), .map = map_};
  route.collect(there(args), there(workspace_), stream());
}

/// Experts here read numbers.
void RankCase::decode_rows() const {
  const ExpertParallelProblem& p = plan_.problem;
  if (!p.x) return;
  QuantizedShape shape = shape_of_rows(p);
  shape.experts = p.experts;
  run_on_cpu(DequantizeProblem{.source = shape, .out = p.dtype},
             DequantizeArgs{.source = {.codes = row_codes_, .scales = row_scales_},
                            .offsets = {map_.offsets, p.experts},
                            .out = rows_});
  const auto* from = static_cast<const char*>(row_scales_.data);
  auto* to = static_cast<char*>(scales_seen_.data);
  const int64_t element = bits(row_scales_.dtype) / 8;
  for (int64_t i = 0; i < used() * row_scales_[1]; ++i, to += element)
    std::copy_n(from + offset_of(row_scales_, i) * element, element, to);
}

void RankCase::apply_experts(const TensorView& from, const TensorView& to,
                             const float* factors) const {
  const ExpertParallelProblem& p = plan_.problem;
  for (int e = 0; e < p.experts; ++e)
#pragma omp parallel for
    for (int64_t row = map_.offsets[e]; row < map_.offsets[e + 1]; ++row)
      for (int64_t h = 0; h < p.hidden; ++h) {
        const float factor = factors == nullptr ? 0.5f : factors[row];
        const float x = load(from, row * p.hidden + h);
        store(to, row * p.hidden + h,
              x * factor + float(first_expert_ + e) / 8 + float(h % 64) / 64);
      }
}

void RankCase::step(RankRoute& route, const std::function<void(std::string_view)>& enter) {
  const ExpertParallelProblem& p = plan_.problem;
  enter("dispatch");
  dispatch(route);
  fetch();
  enter("the experts");
  decode_rows();
  apply_experts(rows_, y_, p.prob ? row_prob_ : nullptr);
  upload();
  push(route, y_);
  enter("collect");
  collect(route);
  enter("collect backward");
  const CollectBackwardArgs of_dy{.dout = of_tokens(dout_), .dy = dy_, .map = map_};
  route.collect_backward(there(of_dy), there(workspace_), stream());
  fetch();
  enter("the experts' backward");
  apply_experts(dy_, drows_, nullptr);
  for (int64_t row = 0; row < used(); ++row)
    drow_prob_[row] = load(dy_, row * p.hidden) + load(rows_, row * p.hidden);
  upload();
  push(route, drows_);
  enter("dispatch backward");
  const DispatchBackwardArgs of_dx{.drows = p.push ? TensorView() : drows_,
                                   .drow_prob = p.prob ? drow_prob_ : nullptr,
                                   .dx = of_tokens(dx_),
                                   .dprob = p.prob ? dprob_ : nullptr,
                                   .map = map_};
  route.dispatch_backward(there(of_dx), there(workspace_), stream());
  fetch();
}

std::vector<RankCase::Result> RankCase::results() const {
  const ExpertParallelProblem& p = plan_.problem;
  std::vector<Result> all = {
      {"rows", rows_, false}, {"out", out_, true}, {"dy", dy_, false}, {"dx", dx_, true}};
  if (p.x) {
    all.push_back({"codes of rows", row_codes_, false});
    all.push_back({"scales of rows", scales_seen_, false});
  }
  if (!p.prob) return all;
  all.push_back({"row_prob", view(row_prob_, DType::kF32, {p.rows, 1}), false});
  all.push_back({"dprob", view(dprob_, DType::kF32, {p.tokens, p.top_k}), true});
  return all;
}

}  // namespace cadre::bench
