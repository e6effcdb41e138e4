#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "cadre/activation_kind.h"
#include "cadre/format.h"
#include "cadre/offsets.h"
#include "cadre/quantize.h"

#pragma GCC visibility push(default)
namespace cadre {

enum class Pass : uint8_t {
  kFprop,  ///< y from x and w; contracts K
  kDgrad,  ///< dx from dy and w; contracts N
  kWgrad,  ///< dw from dy and x; contracts the rows of each expert
};

/// What happens to rows of an output at or beyond offsets[E].
enum class Tail : uint8_t {
  kKeep,  ///< not written
  kZero,  ///< written as zero
};

/// Whether wgrad adds to what dw holds.
enum class Accumulate : uint8_t {
  kNo,         ///< overwrite; old content, NaN too, does not leak; an empty expert's dw is zero
  kYes,        ///< add; an empty expert's dw is untouched
  kDevice,     ///< a word in device memory decides: 0 as kNo, else as kYes
  kPerExpert,  ///< E words in device memory, one an expert, each as kDevice
};

/// Which operand lies in token order, so that no copy of it in expert order is needed.
enum class Gather : uint8_t {
  kNo,
  kLhs,  ///< x (fprop), dy (dgrad, wgrad)
  kRhs,  ///< x (wgrad)
};

/// The activation that fprop's output z goes through before it leaves as h = act(z) * prob. z is
/// rounded to the type of the output first, whether it is kept or not.
struct GemmActivation {
  ActivationKind kind = ActivationKind::kSwiGlu;
  ActivationConstants constants{};        ///< clamped swiglu only
  GluLayout layout = GluLayout::kConcat;  ///< of the N columns of z; gated only
  bool prob = false;                      ///< h is scaled by a probability per row
  bool keep_z = false;                    ///< z is written too

  bool operator==(const GemmActivation&) const = default;
};

/// A grouped GEMM as a value: `grouped_gemm fprop R=8192 N=2048 K=4096 E=64 format=bf16`. The
/// weight of one expert is [N, K] in every pass.
struct GroupedGemmProblem {
  using Args = struct GroupedGemmArgs;
  static constexpr OperationText kOperation = {
      "grouped_gemm", "each expert's rows times that expert's weight: fprop, dgrad, wgrad",
      "grouped_gemm fprop R=8192 N=2048 K=4096 E=64 format=mxfp8"};

  Pass pass = Pass::kFprop;
  int64_t rows = 0;                 ///< R: bound on routed rows; the counts live on the device
  int64_t n = 0;                    ///< N
  int64_t k = 0;                    ///< K
  int experts = 1;                  ///< E
  Format lhs{};                     ///< x (fprop), dy (dgrad, wgrad); along the contraction
  Format rhs{};                     ///< w (fprop, dgrad), x (wgrad); along the contraction
  DType out = DType::kBf16;         ///< f32, bf16 or f16
  Major lhs_major = Major::kRow;    ///< of [R, C]; column only for plain formats
  Major rhs_major = Major::kRow;    ///< of w [N, K] or x [R, K]; column: w is stored [K, N]
  Major out_major = Major::kRow;    ///< of y, dx, or dw [N, K]
  bool discrete_rhs = false;        ///< w is E pointers (fprop, dgrad)
  bool discrete_out = false;        ///< dw is E pointers (wgrad)
  bool alpha = false;               ///< a factor per expert
  bool beta = false;                ///< an addend c with a factor per expert (fprop, dgrad)
  bool bias = false;                ///< a bias per expert (fprop)
  bool discrete_bias = false;       ///< the bias is E pointers
  bool bias_scale = false;          ///< the bias is scaled by a factor per row (fprop)
  DType bias_dtype = DType::kBf16;  ///< f32, bf16 or f16
  Accumulate accumulate = Accumulate::kNo;     ///< wgrad only
  Tail tail = Tail::kKeep;                     ///< fprop, dgrad
  std::optional<GemmActivation> activation{};  ///< fprop only
  int unit_budget = 0;                         ///< SMs or threads to use at most; 0: all
  int align = 16;  ///< bytes; addresses and strides of lhs, rhs, c, out (unless dense) have them

  /// How block scales lie, as in QuantizedShape. Codes are column-major only in w of dgrad.
  Major lhs_scales_major = Major::kRow, rhs_scales_major = Major::kRow;

  Gather gather = Gather::kNo;  ///< of an operand of a plain format, row-major
  bool scatter = false;         ///< fprop, dgrad: the output's rows lie where place_of says
  int64_t tokens = 0;  ///< T: rows of the gathered operand, or tokens of a rank; 0 without either
  int top_k = 1;       ///< slots of a token, see slot_of; places, see place_of
  int ranks = 1;       ///< P: memories that what is scattered lies in

  /// The one expert has all R rows, so no offsets are given: fprop. Sums may be made of up to eight
  /// stretches of the contraction, which are the same for any R.
  bool dense = false;

  bool operator==(const GroupedGemmProblem&) const = default;
};

/// How codes and scales of an operand lie in memory: what quantized_view() takes for a copy of it.
QuantizedShape lhs_shape(const GroupedGemmProblem&);
QuantizedShape rhs_shape(const GroupedGemmProblem&);

/// Columns of what an activation, if there is one, leaves of so many: half of them if it is gated.
int64_t activated_columns(int64_t columns, const std::optional<GemmActivation>&);

/// Columns of the output of fprop or dgrad: N or K, or, behind a gated activation, F = N / 2.
int64_t out_columns(const GroupedGemmProblem&);

/// One operand. Plain formats use `codes` alone. Discrete weights give E pointers in device memory;
/// the views then have null data and the shape and strides that all experts share.
struct Operand {
  TensorView codes{};   ///< [R, C], gathered [T, C], or [E, N, K] (column major: strides (., 1, N))
  TensorView scales{};  ///< as QuantizedView
  const float* expert_scale = nullptr;           ///< [E]
  const void* const* discrete = nullptr;         ///< [E] pointers to codes
  const void* const* discrete_scales = nullptr;  ///< [E] pointers to scales
};

struct GroupedGemmArgs {
  Operand lhs{}, rhs{};
  Offsets offsets{};                    ///< none if the problem is dense
  TensorView out{};                     ///< y [R, N] or h [R, F], dx [R, K], dw [E, N, K]; written.
                                        ///< With scatter [T * top_k, .], of ranks [P, T * top_k, .]
  void* const* discrete_out = nullptr;  ///< [E] pointers, each [N, K] with out's strides
  const float* alpha = nullptr;         ///< [E]
  const float* beta = nullptr;          ///< [E]; where it is 0 that expert's c is not read
  TensorView c{};                       ///< the addend: as z, else as out; may be that
  TensorView bias{};                    ///< [E, N]
  const void* const* discrete_bias = nullptr;  ///< [E] pointers, each [N]
  const float* bias_scale = nullptr;           ///< [R]
  const int32_t* accumulate = nullptr;         ///< one word (kDevice) or [E] (kPerExpert)
  TensorView z{};                              ///< [R, N], dtype of out; written if it is kept
  const float* prob = nullptr;                 ///< [R]
  const int32_t* slot_of = nullptr;            ///< [R] with gather: as in RowMap
  const int32_t* place_of = nullptr;           ///< [R] with scatter: rows of out
};

using GroupedGemmPlan = Plan<GroupedGemmProblem>;

/// Multiplies every expert's rows with that expert's weight.
///
///   fprop   y[r, n]  = alpha_e * sum_k x[r, k] w[e, n, k] + beta_e * c[r, n]
///                      + bias[e, n] * bias_scale[r]
///           with an activation z = y, and what leaves is h[r, f] = act(z)[r, f] * prob[r]
///   dgrad   dx[r, k] = alpha_e * sum_n dy[r, n] w[e, n, k] + beta_e * c[r, k]
///   wgrad   dw[e, n, k] (+)= alpha_e * sum_r dy[r, n] x[r, k]
///
/// Shapes    x [R, K]   dy [R, N]   w, dw [E, N, K]   offsets [E + 1].
/// Types     any pair of formats; sums in fp32 (f32 operands too), rounded once at the store.
/// Memory    out lies apart from lhs and rhs; c may be out itself, or lies apart.
/// Rows      the tail is not read; `tail` says what becomes of the output's. Empty experts are
///           legal. With gather row r of that operand is row slot_of[r] / top_k of what is given,
///           and zero where slot_of[r] is no slot, as permute makes it. With scatter row r of the
///           output is written to row place_of[r] of what is given, numbered through its ranks, or
///           nowhere where that is none; no two rows have the same place, and places without a row
///           are not written.
/// Stream    no allocation but oneDNN's and the reference's, no synchronisation, no read of device
///           data by the host.
/// Errors    InvalidArgument for shapes, types, strides, missing or surplus arguments, and for
///           alignment where an implementation relies on it.
/// Exact     same bits on every run; a row of y or dx depends on its own row and weight only.
GroupedGemmPlan plan(const GroupedGemmProblem&, const Device&, std::string_view only = {});
void run(const GroupedGemmPlan&, const GroupedGemmArgs&, Workspace, Stream);

/// Like `plan`, but for a problem that nobody takes a plan without a name: its refusals say why.
GroupedGemmPlan find(const GroupedGemmProblem&, const Device&, std::string_view only = {});

/// Throws what `run` would say of the arguments, and launches nothing.
void check(const GroupedGemmPlan&, const GroupedGemmArgs&);

/// Like `run`, for arguments that `check` has passed: only the workspace is looked at.
void run_checked(const GroupedGemmPlan&, const GroupedGemmArgs&, Workspace, Stream);

/// Both operands as `format=` where they are that named recipe's pair for the pass (recipe.h), else
/// as x=, w=, dy=. Everything that has its default value is left out.
std::string to_string(const GroupedGemmProblem&);
GroupedGemmProblem parse_grouped_gemm_problem(std::string_view);

}  // namespace cadre
#pragma GCC visibility pop
