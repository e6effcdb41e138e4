#include <algorithm>

#include "bench/cases/parts.h"

namespace cadre::bench {
namespace {

using BiasGradCase = Case<BiasGradProblem>;

TensorView packed_bias(const BiasGradCase& c) {
  TensorView bias = c.args.bias;
  if (c.args.discrete_bias) bias.data = const_cast<void*>(c.args.discrete_bias[0]);
  return bias;
}

}  // namespace

template <>
BiasGradCase make_case(const BiasGradProblem& p, const Draw& draw) {
  auto c = new_case<BiasGradCase>(p, draw);
  Seeds seeds(draw);
  Buffers& buffers = *c.buffers;
  const Rows rows = draw_rows(buffers, draw, p.rows, p.experts);
  c.offsets = rows.host;
  c.args.offsets = rows.offsets;
  c.args.dy = random_tensor(buffers, p.dy, {p.rows, p.n}, rows.live(), seeds.next());
  const TensorView dbias = buffers.tensor(p.dbias, {p.experts, p.n});
  c.args.accumulate = accumulate_words(buffers, p.accumulate, p.experts, draw.seed);
  fill_old(dbias, p.accumulate, c.args.accumulate, seeds.next());
  c.outputs.push_back({"dbias", dbias, p.experts});
  c.args.dbias = dbias;
  c.args.discrete_dbias =
      pointers(buffers, p.discrete, dbias.data, bytes_for(p.dbias, dbias.stride[0]), p.experts);
  if (p.discrete) c.args.dbias.data = nullptr;
  if (!p.bias_scale) return c;
  c.args.bias_scale = random_floats(buffers, p.rows, rows.live(), seeds.next());
  c.args.bias = random_tensor(buffers, p.bias, {p.experts, p.n}, p.experts, seeds.next());
  c.args.discrete_bias = pointers(buffers, p.discrete, c.args.bias.data,
                                  bytes_for(p.bias, c.args.bias.stride[0]), p.experts);
  if (p.discrete) c.args.bias.data = nullptr;
  c.args.dbias_scale = buffers.array<float>(p.rows);
  c.outputs.push_back(
      {"dbias_scale", view(c.args.dbias_scale, DType::kF32, {p.rows}), rows.live(), p.tail});
  return c;
}

template <>
int64_t shrink(BiasGradProblem& p) {
  scale(p.rows, affordable(p.rows, double(p.n), kElementsOfASecond));
  return p.rows;
}

template <>
std::vector<Magnitude> magnitudes(const BiasGradCase& c) {
  Buffers buffers;
  BiasGradProblem sizes = c.problem;
  sizes.dy = sizes.dbias = sizes.bias = DType::kF32;
  sizes.discrete = false;
  sizes.accumulate = Accumulate::kYes;
  BiasGradArgs args{
      .dy = absolute(buffers, c.args.dy),
      .offsets = c.args.offsets,
      .dbias = absolute_old(buffers, c.outputs[0].view, c.problem.accumulate, c.args.accumulate),
      .bias_scale = absolute(buffers, c.args.bias_scale, c.problem.rows),
      .bias = {}};
  if (sizes.bias_scale) {
    args.bias = absolute(buffers, packed_bias(c));
    args.dbias_scale = buffers.array<float>(sizes.rows);
  }
  run_on_cpu(sizes, args, "cpu_reference");
  int64_t longest = 0;
  for (size_t e = 1; e < c.offsets.size(); ++e)
    longest = std::max<int64_t>(longest, c.offsets[e] - c.offsets[e - 1]);
  std::vector<Magnitude> result = {{values_of(args.dbias), longest + 8}};
  if (sizes.bias_scale)
    result.push_back({values_of(view(args.dbias_scale, DType::kF32, {sizes.rows})), sizes.n + 8});
  return result;
}

template <>
Work work(const BiasGradCase& c) {
  const double dy = live_bytes(c.args.dy, c.offsets.back());
  return {.flops = 0, .bytes = dy + bytes_of(c.outputs[0].view)};
}

}  // namespace cadre::bench
