#include "cuda/sm90/grouped_gemm.h"

#include <algorithm>
#include <utility>

#include "cadre/error.h"
#include "cuda/sm90/fp8_rows.h"
#include "cuda/sm90/gathered_contraction.h"
#include "cuda/sm90/gathered_products.h"
#include "cuda/sm90/gathered_rows.h"
#include "cuda/sm90/prepare.h"
#include "cuda/sm90/ragged_contraction.h"
#include "cuda/sm90/scattered_rows.h"

namespace cadre::cuda::sm90 {
namespace {

constexpr int kBlockFeatures = 32;          // of gate, then of up, interleaved by 32
constexpr int64_t kLeastGatedColumns = 64;  // of gate and up: see halves_of()

bool is_16_bit(DType dtype) { return dtype == DType::kBf16 || dtype == DType::kF16; }
DType dtype_of(const Format& format) { return info(format.kind).element; }

/// What the families of 16-bit operands ask for.
std::string refuses(const GroupedGemmProblem& p, const Device& device) {
  const DType type = dtype_of(p.lhs);
  if (std::string why = refuses_device(device); !why.empty()) return why;
  if (!is_plain(p.lhs) || p.lhs != p.rhs || !is_16_bit(type))
    return "takes bf16 or f16 operands, both of the same type";
  if (p.out != type && p.out != DType::kF32) return "writes f32 or the type of its operands";
  if (p.n % kWidthUnit != 0 || p.k % kWidthUnit != 0)
    return text("takes N and K that are multiples of ", kWidthUnit, ", as TMA does");
  return refuses_layout(p);
}

CodeScales scales_of(const Format& batch) {
  if (batch.kind == FormatKind::kFp8Row) return CodeScales::kOfRows;
  return batch.kind == FormatKind::kFp8Tensor ? CodeScales::kOfExperts : CodeScales::kOfBlocks;
}

/// Formats of the kernel of 8-bit codes.
bool are_codes(const Format& batch, const Format& w) {
  if (batch.kind != w.kind || w.element != DType::kE4m3) return false;
  return batch.kind == FormatKind::kFp8Tensor || batch.kind == FormatKind::kFp8Row ||
         (batch.kind == FormatKind::kFp8Block && !batch.square && w.square);
}

struct Box {
  int rows, columns;
};

/// Two matrices of z whose columns `step` times a feature hold gate and up of it, and of those
/// after it: in whole boxes of so many columns.
struct Halves {
  TensorView view[2];
  int step;
};
Halves halves_of(const TensorView& z, GluLayout layout, int box) {
  const int64_t features = z.shape[1] / 2;
  const bool apart = layout == GluLayout::kConcat;
  const int64_t ahead = apart                                ? features
                        : layout == GluLayout::kInterleave32 ? kBlockFeatures
                                                             : box;
  Halves halves{{z, z}, apart ? 1 : 2};
  if (apart) halves.view[0].shape[1] = features;
  halves.view[1].shape[1] -= ahead;
  halves.view[1].data = static_cast<char*>(z.data) + bytes_for(z.dtype, ahead);
  return halves;
}

/// What the families that compute a gated activation ask for.
std::string refuses_gated(const GroupedGemmProblem& p, const Device& device) {
  if (!p.activation || !info(p.activation->kind).gated)
    return "takes fprop with a gated activation";
  if (p.alpha || p.beta || p.bias_scale) return "takes no alpha, beta or bias_scale";
  if (p.rhs_major != Major::kRow) return "takes a row-major w";
  if (p.out != dtype_of(p.lhs)) return "writes the type of its operands";
  if (p.n < kLeastGatedColumns || p.n % (2 * kWidthUnit) != 0)
    return text("takes F that are multiples of ", kWidthUnit, ", from ", kLeastGatedColumns / 2,
                " on");
  return refuses(p, device);
}

/// What the families ask for whose output leaves as it is summed.
std::string refuses_summed(const GroupedGemmProblem& p, const Device& device) {
  if (p.alpha || p.beta || p.bias || p.bias_scale)
    return "takes no alpha, beta, bias or bias_scale";
  if (p.out != dtype_of(p.lhs)) return "writes the type of its operands";
  return refuses(p, device);
}

/// What leaves in boxes of so many rows, and columns of h.
void set_gated(GatedRowsParams& params, const GroupedGemmPlan& plan, const GroupedGemmArgs& args,
               const Prepared& experts, const Box& box) {
  const GroupedGemmProblem& p = plan.problem;
  const GemmActivation& a = *p.activation;
  static_cast<RaggedRowsParams&>(params) = rows_params(plan, args, experts);
  params.y = ragged_map(args.out, box.rows, box.columns);
  params.in_blocks = a.layout == GluLayout::kInterleave32;
  params.in_pairs = a.layout == GluLayout::kInterleave1;
  params.kind = a.kind;
  params.layout = a.layout;
  params.constants = a.constants;
  params.prob = args.prob;
  if (!a.keep_z) return;
  const Halves z = halves_of(args.z, a.layout, box.columns);
  for (int i = 0; i < 2; ++i) params.z[i] = ragged_map(z.view[i], box.rows, box.columns);
  params.z_step = z.step;
  params.keeps_z = 1;
  params.z_tail = tail_rows(args.z, p.tail);
}

/// Those of blocks, of experts, or of rows.
void set_scales(Fp8RowsParams& params, const GroupedGemmProblem& p, const GroupedGemmArgs& args) {
  const size_t across = p.pass == Pass::kFprop ? 1 : 2;  // of w, the dimension not contracted
  const TensorView &x_scales = args.lhs.scales, &w_scales = args.rhs.scales;
  const CodeScales scales = scales_of(p.lhs);
  if (scales == CodeScales::kOfExperts) {
    params.x_scales = args.lhs.expert_scale;
    params.w_scales = {.data = args.rhs.expert_scale, .step = 1};
    return;
  }
  params.x_scales = static_cast<const float*>(x_scales.data);
  params.x_scale_step = x_scales.stride[scales == CodeScales::kOfRows ? 0 : 1];
  params.w_scales = plain(w_scales, args.rhs.discrete_scales);
  params.w_scale_row = w_scales.stride[across];
  params.w_scale_depth = w_scales.stride[3 - across];
}

TokenOrder order_of(const TensorView& tokens, const GroupedGemmProblem& p) {
  return {.top_k = p.top_k,
          .slots = int(p.tokens * p.top_k),
          .token_units = uint32_t(bytes_for(tokens.dtype, tokens.stride[0]) / 16)};
}

/// Rows of tokens, or places, lie where 32 bits say, in units of sixteen bytes.
void check_tokens(std::string_view what, const TensorView& v, const GroupedGemmProblem& p) {
  constexpr int64_t kMostBytes = int64_t(1) << 36;
  require(bytes_for(v.dtype, v.stride[0]) <= kMostBytes / std::max<int64_t>(v.shape[0], 1),
          "grouped_gemm: ", what, " is ", v, ", must lie in ", kMostBytes,
          " bytes or fewer; copy it [", p, "]");
}

/// All but the operands of wgrad.
RaggedContractionParams contraction_params(const GroupedGemmPlan& plan, const GroupedGemmArgs& args,
                                           Workspace workspace, cudaStream_t stream) {
  const GroupedGemmProblem& p = plan.problem;
  const TensorView& dw = args.out;
  const auto* pointers = const_cast<const void* const*>(args.discrete_out);
  const Prepared experts = prepare({.view = dw,
                                    .pointers = pointers,
                                    .box_rows = kGradientRows,
                                    .clears = p.gather == Gather::kNo},
                                   plan, workspace, stream);
  return {.a = {},
          .b = {},
          .dw = experts.map,
          .experts = experts.maps,
          .offsets = args.offsets.data,
          .taken = experts.taken,
          .rows = p.rows,
          .expert_count = p.experts,
          .out_rows = int(p.n),
          .cols = int(p.k),
          .alpha = args.alpha,
          .accumulate = p.accumulate,
          .flags = args.accumulate};
}

/// Whether rows of w run along the contraction of fprop or dgrad.
bool is_k_major(const GroupedGemmProblem& p) {
  return (p.pass == Pass::kFprop) == (p.rhs_major == Major::kRow);
}

Prepared prepare_weight(const GroupedGemmPlan& plan, const GroupedGemmArgs& args,
                        Workspace workspace, cudaStream_t stream) {
  const int box_rows = is_k_major(plan.problem) ? kWeightRows : kWeightDepth;
  return prepare({args.rhs.codes, args.rhs.discrete, box_rows}, plan, workspace, stream);
}

Prepared prepare_gated(const GroupedGemmPlan& plan, const GroupedGemmArgs& args,
                       Workspace workspace, cudaStream_t stream) {
  return prepare({args.rhs.codes, args.rhs.discrete, 0, plan.problem.activation->layout}, plan,
                 workspace, stream);
}

}  // namespace

std::string refuses_ragged_rows(const GroupedGemmProblem& p, const Device& device) {
  if (p.pass == Pass::kWgrad) return "takes fprop and dgrad";
  return refuses(p, device);
}

std::string refuses_ragged_contraction(const GroupedGemmProblem& p, const Device& device) {
  if (p.pass != Pass::kWgrad) return "takes wgrad";
  if (p.rhs_major != Major::kRow) return "takes a row-major x";
  return refuses(p, device);
}

std::string refuses_gated_rows(const GroupedGemmProblem& p, const Device& device) {
  return p.gather != Gather::kNo ? "gathers no rows" : refuses_gated(p, device);
}

std::string refuses_gathered_rows(const GroupedGemmProblem& p, const Device& device) {
  if (p.gather != Gather::kLhs) return "takes rows that it gathers";
  if (p.pass == Pass::kWgrad) return "takes fprop and dgrad";
  return p.activation ? refuses_gated(p, device) : refuses_summed(p, device);
}

std::string refuses_gathered_contraction(const GroupedGemmProblem& p, const Device& device) {
  if (p.gather == Gather::kNo) return "takes rows that it gathers";
  if (p.out != dtype_of(p.lhs)) return "writes the type of its operands";
  return refuses_ragged_contraction(p, device);
}

std::string refuses_scattered_rows(const GroupedGemmProblem& p, const Device& device) {
  return p.scatter ? refuses_summed(p, device) : "takes rows that it scatters";
}

std::string refuses_fp8_rows(const GroupedGemmProblem& p, const Device& device) {
  const bool fprop = p.pass == Pass::kFprop;
  if (p.pass == Pass::kWgrad) return "takes fprop and dgrad";
  if (std::string why = refuses_device(device); !why.empty()) return why;
  if (!are_codes(p.lhs, p.rhs))
    return "takes a batch in fp8_block and w in fp8_block:2d, or both in fp8_tensor or fp8_row; w "
           "of e4m3";
  if (p.out != DType::kBf16 && p.out != DType::kF32) return "writes bf16 or f32";
  if ((fprop ? p.k : p.n) % kAlignment != 0 || (fprop ? p.n : p.k) % kWidthUnit != 0)
    return text("contracts multiples of ", kAlignment, ", to multiples of ", kWidthUnit,
                " columns, as TMA does");
  if ((p.rhs_major == Major::kRow) != fprop)
    return "takes codes of w with the contraction inside: row-major of fprop, column-major of "
           "dgrad";
  if (scales_of(p.lhs) == CodeScales::kOfBlocks && p.lhs_scales_major != Major::kColumn)
    return "takes column-major scales of the batch";
  return refuses_layout(p);
}

void check_fp8_rows(const GroupedGemmProblem& p, const GroupedGemmArgs& args) {
  const bool fprop = p.pass == Pass::kFprop;
  check_view(fprop ? "x" : "dy", args.lhs.codes, p);
  if (scales_of(p.lhs) == CodeScales::kOfBlocks)
    check_scales(fprop ? "x.scales" : "dy.scales", args.lhs.scales, p);
  check_view("w", args.rhs.codes, p);
  check_view(fprop ? "y" : "dx", args.out, p);
  check_view("c", args.c, p);
}

void check_gated_rows(const GroupedGemmProblem& p, const GroupedGemmArgs& args) {
  check_view("x", args.lhs.codes, p);
  check_view("w", args.rhs.codes, p);
  check_view("h", args.out, p);
  check_view("z", args.z, p);
}

void check_ragged_rows(const GroupedGemmProblem& p, const GroupedGemmArgs& args) {
  const bool fprop = p.pass == Pass::kFprop;
  check_view(fprop ? "x" : "dy", args.lhs.codes, p);
  check_view("w", args.rhs.codes, p);
  check_view(fprop ? "y" : "dx", args.out, p);
  check_view("c", args.c, p);
}

void check_gathered_rows(const GroupedGemmProblem& p, const GroupedGemmArgs& args) {
  p.activation ? check_gated_rows(p, args) : check_ragged_rows(p, args);
  check_tokens(p.pass == Pass::kFprop ? "x" : "dy", args.lhs.codes, p);
}

void check_scattered_rows(const GroupedGemmProblem& p, const GroupedGemmArgs& args) {
  check_ragged_rows(p, args);
  check_tokens(p.pass == Pass::kFprop ? "y" : "dx", args.out, p);
}

void check_ragged_contraction(const GroupedGemmProblem& p, const GroupedGemmArgs& args) {
  check_view("dy", args.lhs.codes, p);
  check_view("x", args.rhs.codes, p);
  check_view("dw", args.out, p);
}

void check_gathered_contraction(const GroupedGemmProblem& p, const GroupedGemmArgs& args) {
  check_ragged_contraction(p, args);
  if (p.gather == Gather::kLhs)
    check_tokens("dy", args.lhs.codes, p);
  else
    check_tokens("x", args.rhs.codes, p);
}

void run_ragged_rows(const GroupedGemmPlan& plan, const GroupedGemmArgs& args, Workspace workspace,
                     Stream on) {
  const GroupedGemmProblem& p = plan.problem;
  const auto stream = static_cast<cudaStream_t>(on.handle);
  if (p.rows == 0) return;
  const Prepared experts = prepare_weight(plan, args, workspace, stream);
  RaggedRowsParams params = rows_params(plan, args, experts);
  set_output(params, args, rows_of_part(p.out));
  find_ragged_rows({is_k_major(p), args.rhs.codes.dtype, p.out})(params, blocks_of(plan), stream);
}

void run_fp8_rows(const GroupedGemmPlan& plan, const GroupedGemmArgs& args, Workspace workspace,
                  Stream on) {
  const GroupedGemmProblem& p = plan.problem;
  const auto stream = static_cast<cudaStream_t>(on.handle);
  if (p.rows == 0) return;
  const Prepared experts = prepare({args.rhs.codes, args.rhs.discrete, cols_of_codes(p.out) / 2},
                                   plan, workspace, stream);
  Fp8RowsParams params;
  static_cast<RaggedRowsParams&>(params) = rows_params(plan, args, experts);
  set_output(params, args, kConsumerRows);
  set_scales(params, p, args);
  find_fp8_rows({p.lhs.element, p.out, scales_of(p.lhs)})(params, blocks_of(plan), stream);
}

void run_gated_rows(const GroupedGemmPlan& plan, const GroupedGemmArgs& args, Workspace workspace,
                    Stream on) {
  const auto stream = static_cast<cudaStream_t>(on.handle);
  if (plan.problem.rows == 0) return;
  const Prepared experts = prepare_gated(plan, args, workspace, stream);
  GatedRowsParams params;
  set_gated(params, plan, args, experts, {kGatedPartCols, kGatedPartFeatures});
  find_gated_rows(plan.problem.out)(params, blocks_of(plan), stream);
}

void run_gathered_rows(const GroupedGemmPlan& plan, const GroupedGemmArgs& args,
                       Workspace workspace, Stream on) {
  const GroupedGemmProblem& p = plan.problem;
  const auto stream = static_cast<cudaStream_t>(on.handle);
  const TensorView& x = args.lhs.codes;
  const TokenBatch batch{x.data, order_of(x, p), args.slot_of};
  if (p.rows == 0) return;
  if (p.activation) {
    const Prepared experts = prepare_gated(plan, args, workspace, stream);
    GatheredRowsParams params;
    set_gated(params, plan, args, experts, {kConsumerRows, kGatheredPartFeatures});
    static_cast<TokenBatch&>(params) = batch;
    return find_gathered_rows(p.out)(params, blocks_of(plan), stream);
  }
  const Prepared experts = prepare_weight(plan, args, workspace, stream);
  GatheredProductsParams params{rows_params(plan, args, experts), batch};
  params.y = ragged_map(args.out, kConsumerRows);
  find_gathered_products({is_k_major(p), p.out})(params, blocks_of(plan), stream);
}

void run_scattered_rows(const GroupedGemmPlan& plan, const GroupedGemmArgs& args,
                        Workspace workspace, Stream on) {
  const GroupedGemmProblem& p = plan.problem;
  const auto stream = static_cast<cudaStream_t>(on.handle);
  if (p.rows == 0) return;
  const TensorView& y = args.out;
  const int places = int(p.tokens * p.top_k);
  const auto units = [&](int64_t elements) { return uint32_t(bytes_for(y.dtype, elements) / 16); };
  const PlaceMemory to{.first = static_cast<char*>(y.data),
                       .row_units = units(y.stride[size_t(y.rank) - 2]),
                       .rank_units = p.ranks > 1 ? units(y.stride[0]) : 0,
                       .places = places,
                       .all_places = p.ranks * places};
  const Prepared experts = prepare_weight(plan, args, workspace, stream);
  const ScatteredRowsParams params{rows_params(plan, args, experts), to, args.place_of};
  find_scattered_rows({is_k_major(p), p.out})(params, blocks_of(plan), stream);
}

void run_ragged_contraction(const GroupedGemmPlan& plan, const GroupedGemmArgs& args,
                            Workspace workspace, Stream on) {
  const GroupedGemmProblem& p = plan.problem;
  const auto stream = static_cast<cudaStream_t>(on.handle);
  const TensorView dy = somewhere(args.lhs.codes, args), x = somewhere(args.rhs.codes, args);
  RaggedContractionParams params = contraction_params(plan, args, workspace, stream);
  params.a = ragged_map(dy, kDepthOfGradients);
  params.b = ragged_map(x, kDepthOfGradients);
  find_ragged_contraction({x.dtype, p.out})(params, blocks_of(plan), stream);
}

void run_gathered_contraction(const GroupedGemmPlan& plan, const GroupedGemmArgs& args,
                              Workspace workspace, Stream on) {
  const GroupedGemmProblem& p = plan.problem;
  const auto stream = static_cast<cudaStream_t>(on.handle);
  const bool turned = p.gather == Gather::kRhs;
  const TensorView &dy = args.lhs.codes, &x = args.rhs.codes;
  GatheredContractionParams params;
  static_cast<RaggedContractionParams&>(params) = contraction_params(plan, args, workspace, stream);
  if (turned) std::swap(params.out_rows, params.cols);
  params.b = ragged_map(somewhere(turned ? dy : x, args), kDepth);
  params.tokens = (turned ? x : dy).data;
  const TokenPlaces places = places_of(plan, workspace);
  params.places = places.places;
  params.lacks = places.lacks;
  write_token_places({.order = order_of(turned ? x : dy, p),
                      .slot_of = args.slot_of,
                      .offsets = args.offsets.data,
                      .rows = p.rows,
                      .experts = p.experts},
                     places, params.taken, stream);
  find_gathered_contraction({p.out, turned})(params, blocks_of(plan), stream);
}

}  // namespace cadre::cuda::sm90
