#include "cuda/portable/quantize.h"

#include "cuda/portable/cast.h"
#include "cuda/portable/quantize_job.h"
#include "formats/amaxes.h"
#include "formats/list.h"

namespace cadre::cuda::portable {
namespace {

QuantizeCopy copy_of(const QuantizeProblem& p, const QuantizeArgs& args, Axis axis,
                     uint32_t*& workspace) {
  const QuantizedShape shape = copy_shape(p, axis);
  const Format& format = shape.format;
  QuantizeCopy copy{
      .to = {shape, axis == Axis::kAlongK ? args.along_k : args.along_rows},
      .options = formats::scale_options(format, p.amax_eps, formats::largest_value(p.source)),
      .random = {.role = p.role, .axis = format.square ? Axis::kAlongK : axis},
      .stochastic = format.stochastic};
  (formats::has_whole_lines(format) ? copy.line_amax : copy.amax) = workspace;
  if (!info(format.kind).has_expert_scale) copy.amax = nullptr;
  if (!copy.to.ragged || copy.to.down) copy.expert_lines = formats::lines_of(shape);
  workspace += formats::amaxes_of(shape);
  return copy;
}

bool is_quantised(const std::optional<Format>& format) { return format && !is_plain(*format); }

int64_t amaxes_of(const QuantizeProblem& p, Axis axis) {
  const std::optional<Format>& format = axis == Axis::kAlongK ? p.along_k : p.along_rows;
  return format ? formats::amaxes_of(copy_shape(p, axis)) : 0;
}

void find_amaxes(const QuantizeJob& job, const QuantizeStream& on) {
  bool of_experts = false;
  for (int i = 0; i < job.count; ++i) {
    of_experts |= job.copies[i].amax != nullptr;
    if (job.copies[i].line_amax != nullptr) launch_line_amax(job, job.copies[i], on);
  }
  if (of_experts) launch_expert_amax(job, on);
}

/// Whether both copies are of one kind.
bool same_codes(const Format& a, const Format& b) {
  return a.kind == b.kind && a.element == b.element && a.stochastic == b.stochastic;
}

void quantize_to(const Format& format, const QuantizeJob& job, const QuantizeStream& on) {
  formats::visit(format, [&]<class Row, class Element>() {
    if constexpr (!Row::kIsPlain) launch_quantize<Row, Element>(job, on);
  });
}

}  // namespace

std::string refuses_quantize(const QuantizeProblem& p, const Device& device) {
  std::string why = needs_sm80(p, device);
  if (why.empty() && !is_quantised(p.along_k) && !is_quantised(p.along_rows))
    why = "no copy is quantised; cuda_cast takes it";
  return why;
}

std::string refuses_dequantize(const DequantizeProblem& p, const Device& device) {
  std::string why = needs_sm80(p, device);
  if (why.empty() && is_plain(p.source.format))
    why = "the source is not quantised; cuda_cast takes it";
  return why;
}

int64_t quantize_workspace_bytes(const QuantizeProblem& p, const Device&) {
  return (amaxes_of(p, Axis::kAlongK) + amaxes_of(p, Axis::kAlongRows)) * int64_t(sizeof(uint32_t));
}

void quantize(const QuantizePlan& plan, const QuantizeArgs& args, Workspace workspace,
              Stream stream) {
  const QuantizeProblem& p = plan.problem;
  QuantizeJob job{.of = {p.rows, p.cols, p.experts, args.offsets.data},
                  .source = ExpertMatrices(args.source, args.discrete),
                  .copies = {},
                  .tokens = tokens_of(p, args),
                  .rng = args.rng};
  const Format* formats[2] = {};
  auto* free = static_cast<uint32_t*>(workspace.data);
  for (const Axis axis : {Axis::kAlongK, Axis::kAlongRows}) {
    const std::optional<Format>& format = axis == Axis::kAlongK ? p.along_k : p.along_rows;
    if (!format) continue;
    if (is_plain(*format)) {
      cast_copy(p, args, axis, stream);
      continue;
    }
    formats[job.count] = &*format;
    job.copies[job.count++] = copy_of(p, args, axis, free);
  }
  const QuantizeStream on{plan.device.units, stream_of(stream)};
  if (args.along_rows.block_offsets != nullptr)
    launch_block_offsets(job.of, args.along_rows.block_offsets, on);
  find_amaxes(job, on);
  if (job.count == 2 && !same_codes(*formats[0], *formats[1])) {
    quantize_to(*formats[1], job.with_one(job.copies[1]), on);
    job = job.with_one(job.copies[0]);
  }
  quantize_to(*formats[0], job, on);
}

void dequantize(const DequantizePlan& plan, const DequantizeArgs& args, Workspace, Stream stream) {
  const QuantizedShape& s = plan.problem.source;
  const QuantizeStream on{plan.device.units, stream_of(stream)};
  DequantizeJob job{.of = {s.rows, s.cols, s.experts, args.offsets.data},
                    .from = {s, args.source},
                    .to = ExpertMatrices(args.out),
                    .block_offsets = args.block_offsets};
  if (plan.problem.decoded) job.from.expert_scale = nullptr;
  if (args.block_offsets != nullptr) launch_block_offsets(job.of, args.block_offsets, on);
  if (job.of.most_tiles() == 0) return;
  formats::visit(s.format, [&]<class Row, class Element>() {
    if constexpr (!Row::kIsPlain) launch_dequantize<Row, Element>(job, on);
  });
}

}  // namespace cadre::cuda::portable
