#pragma once
#include <array>
#include <memory>
#include <string>
#include <vector>

#include "cadre/dequantize.h"
#include "cadre/quantize.h"
#include "cpu/quantized_expert.h"
#include "tests/judge/counts.h"
#include "tests/judge/tensor.h"

// One quantisation with everything that it reads and writes, all of it watched.
namespace cadre::test {

/// Codes, scales and expert scales of one copy, poisoned, with canaries between their rows.
struct QuantizedCopy {
  QuantizedShape shape;
  Tensor codes, scales, expert_scale, block_offsets;

  QuantizedCopy() = default;
  explicit QuantizedCopy(const QuantizedShape& s, int64_t gap = 6) : shape(s) {
    const QuantizedView want = quantized_view(s, nullptr);
    codes = tensor_like(want.codes, s.codes_major, gap);
    const int64_t scales_gap = gap % 16 == 0 ? 8 : 3;  // words of 64 bits, where codes have them
    if (want.scales.rank != 0) scales = tensor_like(want.scales, s.scales_major, scales_gap);
    if (info(s.format.kind).has_expert_scale) expert_scale = Tensor(DType::kF32, {s.experts});
    if (s.decoded && is_transformed(s.format, s.axis))
      block_offsets = Tensor(DType::kI32, {s.experts + 1});
  }

  QuantizedView view() const {
    return view([](const Tensor& t) { return t.view(); });
  }
  /// `at` says where a tensor is.
  template <class At>
  QuantizedView view(At&& at) const {
    QuantizedView q;
    q.codes = in_order(at(codes), shape.codes_major);
    if (!scales.bytes().empty()) q.scales = in_order(at(scales), shape.scales_major);
    if (!expert_scale.bytes().empty()) q.expert_scale = static_cast<float*>(at(expert_scale).data);
    if (!block_offsets.bytes().empty())
      q.block_offsets = static_cast<int32_t*>(at(block_offsets).data);
    return q;
  }
  std::string damage() const {
    return codes.damage() + (scales.bytes().empty() ? "" : scales.damage()) +
           (expert_scale.bytes().empty() ? "" : expert_scale.damage()) +
           (block_offsets.bytes().empty() ? "" : block_offsets.damage());
  }
  bool operator==(const QuantizedCopy& other) const {
    return codes.bytes() == other.codes.bytes() && scales.bytes() == other.scales.bytes() &&
           expert_scale.bytes() == other.expert_scale.bytes() &&
           block_offsets.bytes() == other.block_offsets.bytes();
  }

 private:
  static TensorView in_order(const TensorView& v, Major major) {
    return major == Major::kRow ? v : transposed(v);
  }
  /// Rows, or columns, lie `gap` elements further apart than they must; nibbles by an even number.
  static Tensor tensor_like(const TensorView& like, Major major, int64_t gap) {
    const TensorView v = in_order(like, major);
    const Lie lie{.row_gap = bits(v.dtype) == 4 ? gap + v[v.rank - 1] % 2 : gap};
    return v.rank == 2 ? Tensor(v.dtype, {v[0], v[1]}, lie)
                       : Tensor(v.dtype, {v[0], v[1], v[2]}, lie);
  }
};

struct QuantizeCase {
  QuantizeProblem problem;
  std::vector<int32_t> offsets;               ///< routed rows
  Tensor source;                              ///< [R, C] with its tail poisoned, or [E, N, K]
  mutable std::vector<const void*> discrete;  ///< made by args(), where the source now lies
  std::vector<int32_t> slots;                 ///< [R] with gather, when the source is [T, C]
  std::vector<uint64_t> rng = {0x0123'4567'89ab'cdefull, 42};
  int64_t gap = 6;  ///< elements between rows of codes

  /// Routed rows with these counts; the source is poison until it is filled.
  static QuantizeCase rows(const Counts& counts, int64_t cols, DType source, int64_t row_gap = 5) {
    QuantizeCase c;
    c.problem = {.rows = counts.rows,
                 .cols = cols,
                 .experts = counts.experts(),
                 .source = source,
                 .along_k = {},
                 .along_rows = {}};
    c.offsets = counts.offsets();
    c.source = Tensor(source, {counts.rows, cols}, {.row_gap = row_gap});
    return c;
  }
  static QuantizeCase weights(std::array<int64_t, 3> e_n_k, DType source, bool discrete = false,
                              int64_t row_gap = 5) {
    QuantizeCase c;
    const auto [experts, n, k] = e_n_k;
    c.problem = {.kind = RowsKind::kWeights,
                 .rows = n,
                 .cols = k,
                 .experts = int(experts),
                 .source = source,
                 .along_k = {},
                 .along_rows = {},
                 .discrete = discrete};
    c.source = Tensor(source, {experts, n, k}, {.row_gap = row_gap});
    return c;
  }

  QuantizeCase& formats(std::string_view along_k, std::string_view along_rows) {
    problem.along_k = problem.along_rows = std::nullopt;
    if (!along_k.empty()) problem.along_k = parse_format(along_k);
    if (!along_rows.empty()) problem.along_rows = parse_format(along_rows);
    return *this;
  }

  int64_t used_rows() const { return offsets.empty() ? source.rows() : offsets.back(); }
  bool ragged() const { return problem.kind == RowsKind::kRagged; }

  QuantizedShape shape(Axis axis) const { return copy_shape(problem, axis); }

  struct Out {
    QuantizedCopy along_k, along_rows;

    bool operator==(const Out& other) const {
      return along_k == other.along_k && along_rows == other.along_rows;
    }
  };
  Out outputs() const {
    Out out;
    if (problem.along_k) out.along_k = QuantizedCopy(shape(Axis::kAlongK), gap);
    if (problem.along_rows) out.along_rows = QuantizedCopy(shape(Axis::kAlongRows), gap);
    return out;
  }

  QuantizeArgs args(const Out& out) const {
    return args(
        out, [](const Tensor& t) { return t.view(); }, [](auto& list) { return list.data(); });
  }
  /// `view` and `list` say where tensors and lists are.
  template <class View, class List>
  QuantizeArgs args(const Out& out, View&& view, List&& list) const {
    QuantizeArgs a;
    a.source = view(source);
    if (problem.discrete) {
      discrete.clear();
      for (int64_t e = problem.experts - 1; e >= 0; --e)  // expert 0 lies last
        discrete.push_back(cpu::matrix_of(a.source, e).data);
      a.source.data = nullptr;
      a.discrete = list(discrete);
    }
    if (ragged()) a.offsets = {list(offsets), problem.experts};
    if (problem.gather) a.slot_of = list(slots);
    if (problem.along_k) a.along_k = out.along_k.view(view);
    if (problem.along_rows) a.along_rows = out.along_rows.view(view);
    a.rng = list(rng);
    return a;
  }

  /// What the implementation called `only` writes.
  Out run(std::string_view only = {}) const {
    const QuantizePlan made = plan(problem, this_cpu(), only);
    std::vector<char> memory(size_t(made.workspace_bytes + 256), '\xff');
    const auto at = (reinterpret_cast<uintptr_t>(memory.data()) + 255) / 256 * 256;
    Out out = outputs();
    cadre::run(made, args(out), {reinterpret_cast<void*>(at), made.workspace_bytes}, {});
    return out;
  }
};

/// The kinds of values that break quantisers, one of each in turn.
enum class ValuesKind { kNormal, kZeroBlocks, kTiny, kHugeAmongTiny, kLargest, kNan, kInfinite };
inline constexpr int kValuesKinds = 7;

/// Fills rows [0, used) of a source with values of a kind; the rest keeps its poison.
inline void fill_values(QuantizeCase& c, ValuesKind kind, std::mt19937& random) {
  std::normal_distribution<double> normal;
  const auto one_in = [&](unsigned n) { return random() % n == 0; };
  const double largest = c.problem.source == DType::kF16 ? 65504 : 3e38;
  const double smallest = c.problem.source == DType::kF16 ? 0x1p-24 : 0x1p-133;
  double row_factor = 1;
  const auto value = [&](int64_t col) {
    const double x = normal(random) * row_factor;
    switch (kind) {
      case ValuesKind::kZeroBlocks:
        return col / 16 % 3 == 0 || row_factor < 1 ? (one_in(2) ? -0.0 : 0.0) : x;
      case ValuesKind::kTiny:
        return one_in(3) ? 0 : smallest * double(random() % 300);
      case ValuesKind::kHugeAmongTiny:
        return one_in(40) ? 1e4 * x : 1e-4 * x;
      case ValuesKind::kLargest:
        return one_in(20) ? (one_in(2) ? largest : -largest) : x;
      case ValuesKind::kNan:
        return one_in(50) ? std::nan("") : x;
      case ValuesKind::kInfinite:
        return one_in(50) ? (one_in(2) ? INFINITY : -INFINITY) : x;
      default:
        return x;
    }
  };
  const TensorView v = c.source.view();
  for (int64_t r = 0; r < c.used_rows(); ++r) {
    row_factor = std::ldexp(1.0, int(random() % 7) - 3);
    for (int64_t j = 0; j < c.problem.cols; ++j) {
      const cpu::At at = c.ragged() ? cpu::At{r, j} : cpu::At{r / v[1], r % v[1], j};
      cpu::write(v, at, value(j));
    }
  }
}

/// A poisoned tensor for the values of a copy.
inline Tensor values_like(const QuantizedCopy& copy, DType out, int64_t gap = 3) {
  const TensorView codes = copy.view().codes;
  return codes.rank == 2 ? Tensor(out, {codes[0], codes[1]}, {.row_gap = gap})
                         : Tensor(out, {codes[0], codes[1], codes[2]}, {.row_gap = gap});
}

/// The values of a copy in fp32, in a poisoned tensor of the shape of its codes.
inline Tensor decoded(const QuantizedCopy& copy, const std::vector<int32_t>& offsets,
                      DType out = DType::kF32, std::string_view only = {}) {
  const DequantizePlan made = plan(DequantizeProblem{copy.shape, out}, this_cpu(), only);
  Tensor values = values_like(copy, out);
  DequantizeArgs args{.source = copy.view(), .offsets = {}, .out = values.view()};
  if (copy.shape.kind == RowsKind::kRagged) args.offsets = {offsets.data(), copy.shape.experts};
  std::vector<char> memory(size_t(made.workspace_bytes + 256), '\xff');
  const auto at = (reinterpret_cast<uintptr_t>(memory.data()) + 255) / 256 * 256;
  cadre::run(made, args, {reinterpret_cast<void*>(at), made.workspace_bytes}, {});
  return values;
}

}  // namespace cadre::test
