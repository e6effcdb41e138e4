#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "cadre/grouped_gemm.h"
#include "cadre/offsets.h"

#pragma GCC visibility push(default)
namespace cadre {

enum class PermutePass : uint8_t {
  kPermute,          ///< rows from tokens
  kPermuteBackward,  ///< token gradients from row gradients
  kCombine,          ///< tokens from rows
  kCombineBackward,  ///< row gradients from token gradients
};

/// True where tokens are read and rows written, else the other way round.
constexpr bool reads_tokens(PermutePass pass) {
  return pass == PermutePass::kPermute || pass == PermutePass::kCombineBackward;
}

/// `permute permute T=4096 top_k=2 R=8192 H=2048 E=64 dtype=bf16`,
/// `permute permute T=4096 top_k=2 R=8192 H=2048 E=64 format=mxfp8`.
struct PermuteProblem {
  using Args = struct PermuteArgs;
  static constexpr OperationText kOperation = {
      "permute", "rows between token order and expert order, both ways, and the gradients",
      "permute combine T=4096 top_k=2 R=8192 H=2048 E=64 prob=yes"};

  PermutePass pass = PermutePass::kPermute;
  int64_t tokens = 0;                ///< T
  int top_k = 1;                     ///< slots of a token
  int64_t rows = 0;                  ///< R
  int64_t hidden = 0;                ///< H
  int experts = 1;                   ///< E, of the offsets; 0: there are none, see Rows
  DType dtype = DType::kBf16;        ///< of tokens and rows: f32, bf16 or f16
  int ranks = 1;                     ///< P: see Ranks
  bool prob = false;                 ///< see the formulas
  bool addend = false;               ///< of tokens that are sums of rows
  Tail tail = Tail::kKeep;           ///< of a row-shaped output
  std::optional<Format> format{};    ///< permute only: what moves are codes and scales, see Types
  Major scales_major = Major::kRow;  ///< of row_scales; column: only fp32 scales

  bool operator==(const PermuteProblem&) const = default;
};

struct PermuteArgs {
  TensorView tokens{};  ///< [T, H]: x or dout, read; out or dx, written
  TensorView rows{};    ///< [R, H]: read by combine and permute backward, else written
  TensorView y{};       ///< [R, H]: the rows that combine read; combine backward with dprob
  RowMap map{};         ///< read: slot_of by permute and combine backward, row_of where it sums
  TensorView addend{};  ///< [T, H]: added to the sums, read; may be tokens itself
  TensorView token_scales{};    ///< [T, H / block] of a format, read; of ranks [P, T, H / block]
  TensorView row_scales{};      ///< [R, H / block], written
  Offsets offsets{};            ///< offsets[E] is the number of rows
  const float* prob = nullptr;  ///< [T, top_k]: permute, combine, combine backward
  float* row_prob = nullptr;    ///< [R]: permute, written
  const float* drow_prob = nullptr;   ///< [R]: permute backward, read
  const float* drow_scale = nullptr;  ///< [R]: permute backward, added to drow_prob, if given
  float* dprob = nullptr;  ///< [T, top_k]: permute backward; combine backward, if given; written
};

using PermutePlan = Plan<PermuteProblem>;

/// Moves rows between token order and expert order. With p = prob[t, j], row = row_of[t, j]:
///
///   permute            rows[row] = tokens[t]              prob: row_prob[row] = p
///   permute backward   tokens[t] = sum_j rows[row]        prob: dprob[t, j] = drow_prob[row]
///                                  (+ addend[t])          (+ drow_scale[row])
///   combine            tokens[t] = sum_j p rows[row]
///                                  (+ addend[t])
///   combine backward   rows[row] = p tokens[t]            prob: dprob[t, j] = <tokens[t], y[row]>
///
/// Without prob, p is 1 and nothing is said about probabilities.
///
/// Ranks     what is read lies in the memories of P ranks, with ranks > 1: tokens [P, T, H] by
///           permute and combine backward, rows [P, R, H] by the two others, which take no
///           offsets; slots, rows, and arrays of one element each, are numbered through. Where
///           tokens are read, row_of, if given, says which row here each slot of all ranks has, so
///           that a token is read once. Combine backward takes no prob then.
/// Types     sums in fp32, over j in its order, then the addend, one rounding; probabilities are
///           fp32. With a format, tokens and rows are its codes along K (quantize.h), beside scales
///           that are of one row each: those of fp8_row, fp8_block and mxfp8, without `2d`. dtype
///           says nothing then. Rows of codes, and of scales, are of an even number of bytes.
/// Memory    what is written lies apart from what is read.
/// Rows      dropped choices (row_of outside [0, offsets[E])) add nothing and have dprob 0. A row
///           whose slot_of is no slot is zero, in bytes. The tail is not read; `tail` says what
///           becomes of the tail of rows and row_prob where they are written. With E = 0, which is
///           for sums, there are no offsets, and all R rows may be read.
/// Errors    InvalidArgument for shapes, types, strides, missing or surplus arguments.
/// Exact     fixed order, no atomics.
PermutePlan plan(const PermuteProblem&, const Device&, std::string_view only = {});
void run(const PermutePlan&, const PermuteArgs&, Workspace, Stream);

std::string to_string(const PermuteProblem&);
PermuteProblem parse_permute_problem(std::string_view);

}  // namespace cadre
#pragma GCC visibility pop
