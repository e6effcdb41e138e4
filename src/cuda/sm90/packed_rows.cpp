#include "cuda/sm90/packed_rows.h"

#include "cadre/error.h"
#include "cuda/sm90/grouped_gemm.h"
#include "cuda/sm90/prepare.h"
#include "cuda/sm90/split_columns.h"

namespace cadre::cuda::sm90 {
namespace {

using Launch = void (*)(const PackedRowsParams&, int blocks, cudaStream_t);
struct Instance {
  PackedRowsKind kind;
  Launch launch;
};

template <PackedRowsKind kKind>
constexpr Instance instance() {
  return {kKind, launch_packed_rows<kKind>};
}

/// In tiles that are not wide.
constexpr Decoding narrow_decoding(DType codes) {
  return codes == DType::kE2m1 ? Decoding::kTable : Decoding::kSplit;
}

template <FormatKind kWeights, PackedWidth kWidth>
constexpr Instance narrow() {
  constexpr DType kCodes = kWeights == FormatKind::kMxfp8 ? DType::kE4m3 : DType::kE2m1;
  return instance<PackedRowsKind{kWeights, DType::kBf16, kWidth, narrow_decoding(kCodes)}>();
}

constexpr Instance kInstances[] = {
    instance<PackedRowsKind{FormatKind::kMxfp4, DType::kBf16}>(),
    instance<PackedRowsKind{FormatKind::kMxfp4, DType::kF32}>(),
    narrow<FormatKind::kMxfp4, PackedWidth::kMiddle>(),
    narrow<FormatKind::kMxfp4, PackedWidth::kNarrow>(),
    narrow<FormatKind::kMxfp4, PackedWidth::kNarrowest>(),
    instance<PackedRowsKind{FormatKind::kMxfp8, DType::kBf16}>(),
    instance<PackedRowsKind{.weights = FormatKind::kMxfp8, .decoding = Decoding::kSplit}>(),
    instance<PackedRowsKind{FormatKind::kMxfp8, DType::kF32}>(),
    narrow<FormatKind::kMxfp8, PackedWidth::kMiddle>(),
    narrow<FormatKind::kMxfp8, PackedWidth::kNarrow>(),
    narrow<FormatKind::kMxfp8, PackedWidth::kNarrowest>(),
    instance<PackedRowsKind{FormatKind::kNvfp4, DType::kBf16}>(),
    instance<PackedRowsKind{FormatKind::kNvfp4, DType::kF32}>(),
    narrow<FormatKind::kNvfp4, PackedWidth::kNarrow>(),
    narrow<FormatKind::kNvfp4, PackedWidth::kNarrowest>(),
};

/// Null if none was built.
Launch find(const PackedRowsKind& kind) {
  for (const Instance& instance : kInstances)
    if (instance.kind == kind) return instance.launch;
  return nullptr;
}

bool is_packed(const Format& format) {
  return !is_plain(format) && find({format.kind}) != nullptr && format.element != DType::kE5m2;
}

PackedScales scales_of(const GroupedGemmProblem& p, const Operand& w) {
  const TensorView& v = w.scales;
  const auto step = [&](size_t d) { return bytes_for(v.dtype, v.stride[d]); };
  // Of discrete ones the host does not know where they begin.
  const bool known = w.discrete_scales == nullptr && v.stride[2] == 1;
  const auto all = reinterpret_cast<uintptr_t>(v.data) | uintptr_t(step(0)) | uintptr_t(step(1)) |
                   uintptr_t(v.shape[2]) | 4;
  return {.data = v.data,
          .discrete = w.discrete_scales,
          .step = step(0),
          .row_step = step(1),
          .col_step = step(2),
          .rows = p.rhs.square ? info(p.rhs.kind).block : 1,
          .cols = int(v.shape[2]),
          .together = known ? int(all & (~all + 1)) : 1};
}

PackedWidth width_of(const GroupedGemmProblem& p) {
  if (p.out == DType::kF32) return PackedWidth::kWide;
  if (!are_few_rows(p.rows, p.experts)) {
    const bool has_middle = info(p.rhs.kind).block == 32;
    return has_middle && p.rows <= kRowsOfMiddle * p.experts ? PackedWidth::kMiddle
                                                             : PackedWidth::kWide;
  }
  return p.rows <= kRowsOfNarrowest * p.experts ? PackedWidth::kNarrowest : PackedWidth::kNarrow;
}

PackedRowsKind kind_of(const GroupedGemmProblem& p) {
  const PackedWidth width = width_of(p);
  Decoding decoding = Decoding::kPlain;
  if (width != PackedWidth::kWide)
    decoding = narrow_decoding(p.rhs.element);
  else if (p.rhs.element != DType::kE2m1 && p.out != DType::kF32 && p.n >= kSplitCols)
    decoding = Decoding::kSplit;
  return {p.rhs.kind, p.out, width, decoding};
}

bool splits(const PackedRowsKind& kind) { return kind.decoding == Decoding::kSplit; }

/// Of w in one load.
struct PackedBox {
  int rows, columns;
};
PackedBox box_of(DType codes, PackedWidth width) {
  if (width == PackedWidth::kWide) return {kWeightRows, kDepthOfPacked};
  const bool has_more = width == PackedWidth::kNarrowest && codes == DType::kE2m1;
  return {kConsumersOfNarrow * kConsumerRows, has_more ? kDepthOfNarrowest : kDepthOfNarrow};
}

/// x with its columns in the instance's order, in the workspace.
TensorView split_x(const GroupedGemmPlan& plan, const GroupedGemmArgs& args, Workspace workspace,
                   unsigned long long* taken, cudaStream_t stream) {
  const GroupedGemmProblem& p = plan.problem;
  const TensorView& x = args.lhs.codes;
  void* copy = behind_maps(plan, workspace);
  const int64_t step = bytes_for(x.dtype, x.stride[0]);
  const int64_t blocks = p.unit_budget == 0 ? kSplitBlocks : 1;
  split_columns({x.data, step, copy, args.offsets.data, p.experts, p.rows, int(p.k)},
                blocks * blocks_of(plan), taken, stream);
  return view(copy, x.dtype, {p.rows, p.k});
}

}  // namespace

std::string refuses_packed_rows(const GroupedGemmProblem& p, const Device& device) {
  if (p.pass != Pass::kFprop) return "takes fprop";
  if (std::string why = refuses_device(device); !why.empty()) return why;
  if (p.lhs != format(FormatKind::kBf16) || !is_packed(p.rhs))
    return "takes a bf16 batch and w in mxfp4, mxfp8 of e4m3, or nvfp4";
  if (p.out != DType::kBf16 && p.out != DType::kF32) return "writes bf16 or f32";
  const int64_t unit = 8 * kAlignment / bits(p.rhs.element);
  if (p.k % unit != 0 || p.n % kWidthUnit != 0)
    return text("contracts multiples of ", unit, ", to multiples of ", kWidthUnit,
                " columns, as TMA does");
  return refuses_layout(p);
}

void check_packed_rows(const GroupedGemmProblem& p, const GroupedGemmArgs& args) {
  check_view("x", args.lhs.codes, p);
  check_view("w", args.rhs.codes, p);
  check_view("y", args.out, p);
  check_view("c", args.c, p);
}

int64_t packed_rows_workspace_bytes(const GroupedGemmProblem& p, const Device& device) {
  constexpr int64_t kUnit = 128;  // the count stays aligned
  const int64_t copy = splits(kind_of(p)) ? bytes_for(DType::kBf16, p.rows * p.k) : 0;
  return grouped_gemm_workspace_bytes(p, device) + (copy + kUnit - 1) / kUnit * kUnit;
}

void run_packed_rows(const GroupedGemmPlan& plan, const GroupedGemmArgs& args, Workspace workspace,
                     Stream on) {
  const GroupedGemmProblem& p = plan.problem;
  const auto stream = static_cast<cudaStream_t>(on.handle);
  if (p.rows == 0) return;
  const PackedRowsKind kind = kind_of(p);
  const PackedBox box = box_of(p.rhs.element, kind.width);
  const Prepared experts = prepare({.view = args.rhs.codes,
                                    .pointers = args.rhs.discrete,
                                    .box_rows = box.rows,
                                    .box_columns = box.columns,
                                    .clears = !splits(kind)},
                                   plan, workspace, stream);
  GroupedGemmArgs split = args;
  if (splits(kind)) split.lhs.codes = split_x(plan, args, workspace, experts.taken, stream);
  PackedRowsParams params;
  static_cast<RaggedRowsParams&>(params) = rows_params(plan, split, experts);
  set_output(params, args, packed_part(p.out, kind.width));
  params.w_scale = args.rhs.expert_scale;
  params.w_scales = scales_of(p, args.rhs);
  find(kind)(params, blocks_of(plan), stream);
}

}  // namespace cadre::cuda::sm90
