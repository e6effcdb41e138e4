#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "backend/walk.h"
#include "cadre/grouped_gemm.h"
#include "formats/list.h"
#include "tests/judge/close.h"
#include "tests/judge/counts.h"
#include "tests/judge/tensor.h"
#include "tests/judge/workspace.h"

// Random grouped GEMMs with known answers. Operands are made from random codes and scales, laid out
// as quantize.h says, and the answer is summed in double from their values.
namespace cadre::test {

/// How the operands and the output of a case lie in memory.
struct CaseLayout {
  int64_t lhs_gap = 0, rhs_gap = 0, out_gap = 0;  ///< elements between rows
};

/// A random code that is a finite number, and what it stands for.
struct Code {
  uint32_t bits = 0;
  double value = 0;
};
inline Code random_code(std::mt19937& random, DType dtype) {
  Code code;
  if (dtype == DType::kE8m0) {
    code.bits = uint32_t(122 + random() % 9);
    code.value = formats::E8m0::decode(uint8_t(code.bits));
    return code;
  }
  std::normal_distribution<float> normal;
  formats::visit(formats::Elements{}, dtype, [&]<class Element>() {
    typename Element::Code stored{};
    do {
      if constexpr (sizeof(stored) == 1) {
        stored = uint8_t(random() % uint32_t(Element::kMaxCode + 1));
      } else {
        stored = Element::encode(normal(random));
      }
    } while (!std::isfinite(Element::decode(stored)));
    code.value = Element::decode(stored);
    std::memcpy(&code.bits, &stored, sizeof(stored));
  });
  return code;
}

/// Puts a code at an element of a row of `data`.
inline void put_code(char* data, DType dtype, int64_t at, uint32_t bits_of_code) {
  if (dtype == DType::kE2m1) {
    auto& byte = reinterpret_cast<uint8_t*>(data)[at / 2];
    byte = at % 2 ? formats::pack_nibbles(byte & 0xf, uint8_t(bits_of_code))
                  : formats::pack_nibbles(uint8_t(bits_of_code), byte >> 4);
    return;
  }
  const int64_t size = bits(dtype) / 8;
  std::memcpy(data + at * size, &bits_of_code, size_t(size));
}

/// Numbers that lie `step` apart.
struct Line {
  const double* first;
  int64_t step;
};

/// One operand in memory, and the values that it holds.
class OperandCase {
 public:
  /// Routed rows of `offsets`, or weights.
  OperandCase(const QuantizedShape& shape, int64_t gap) : shape_(shape) {
    const QuantizedView like = quantized_view(shape, nullptr);
    codes_ = matrix(like.codes, shape.codes_major, gap);
    code_view_ = in_order(codes_.view(), shape.codes_major);
    if (like.scales.rank != 0) {
      scales_ = matrix(like.scales, shape.scales_major, gap);
      scale_view_ = in_order(scales_.view(), shape.scales_major);
    }
    scale_values_.assign(size_t(elements(like.scales)), std::nan(""));
    values_.assign(size_t(elements(like.codes)), std::nan(""));
  }

  /// Random codes and scales for rows [first, first + count) of an expert, all of a weight.
  void fill(std::mt19937& random, int expert, int64_t first, int64_t count) {
    if (info(shape_.format.kind).has_expert_scale) {
      expert_scale_.resize(size_t(shape_.experts), std::nanf(""));
      expert_scale_[size_t(expert)] = std::uniform_real_distribution<float>(0.5f, 2)(random);
    }
    fill_scales(random, expert, first, count);
    for (int64_t i = 0; i < count; ++i)
      for (int64_t j = 0; j < shape_.cols; ++j) fill_element(random, {expert, first, i, j});
  }

  /// `count` values from row and column on, along their row or along their column.
  Line line(int expert, std::array<int64_t, 2> from, bool along_row, int64_t count) const {
    const bool weights = shape_.kind == RowsKind::kWeights;
    const int64_t i = weights ? expert * shape_.rows + from[0] : from[0];
    const int64_t first = i * shape_.cols + from[1], step = along_row ? 1 : shape_.cols;
    if (count == 0) return {nullptr, 0};
    EXPECT_LT(first + (count - 1) * step, int64_t(values_.size()));
    return {&values_[size_t(first)], step};
  }

  /// The operand as packed experts, or as pointers to each expert.
  Operand packed() const {
    Operand operand;
    operand.codes = code_view_;
    if (info(shape_.format.kind).block != 0) operand.scales = scale_view_;
    if (!expert_scale_.empty()) operand.expert_scale = expert_scale_.data();
    return operand;
  }
  Operand discrete() {
    Operand operand = packed();
    operand.discrete = pointers(operand.codes, code_pointers_);
    if (operand.scales) operand.discrete_scales = pointers(operand.scales, scale_pointers_);
    return operand;
  }
  std::string damage() const { return codes_.damage() + scales_.damage(); }

  void fill_everything(std::mt19937& random) {
    for (Tensor* tensor : {&codes_, &scales_}) {
      const TensorView v = tensor->view();
      const int64_t lines = v.rank == 0 ? 0 : v[v.rank - 2];
      for (int64_t i = 0; i < (v.rank == 0 ? 0 : tensor->rows()); ++i)
        for (int64_t j = 0; j < tensor->columns(); ++j)
          put_code(row(*tensor, i / lines, i % lines), v.dtype, j,
                   random_code(random, v.dtype).bits);
    }
  }
  /// Another value of a plain operand: of row `i` of routed rows, or of a weight.
  void plant(int expert, int64_t i, int64_t j, double value) {
    const bool weights = shape_.kind == RowsKind::kWeights;
    cpu::write(code_view_, weights ? cpu::At{expert, i, j} : cpu::At{i, j}, value);
    values_[size_t((weights ? expert * shape_.rows + i : i) * shape_.cols + j)] = value;
  }
  /// Copies plain routed rows to row `first` of a larger matrix.
  void copy_to(const TensorView& to, int64_t first) const {
    for (int64_t i = 0; i < codes_.rows(); ++i)
      for (int64_t j = 0; j < codes_.columns(); ++j)
        cpu::write(to, {first + i, j}, codes_.at(i, j));
  }

 private:
  struct Place {
    int expert;
    int64_t first, i, j;
  };

  static TensorView in_order(const TensorView& v, Major major) {
    return major == Major::kRow ? v : transposed(v);
  }
  static Tensor matrix(const TensorView& shape, Major major, int64_t gap) {
    const TensorView like = in_order(shape, major);
    const int64_t whole = bits(like.dtype) == 4 ? 2 : 1;
    const int64_t rows = like[like.rank - 2], cols = like[like.rank - 1];
    const int64_t pitch = (cols + gap + whole - 1) / whole * whole;
    return like.rank == 2 ? Tensor(like.dtype, {rows, cols}, {pitch - cols})
                          : Tensor(like.dtype, {like[0], rows, cols}, {pitch - cols});
  }
  static const void* const* pointers(TensorView& v, std::vector<const void*>& list) {
    list.clear();
    for (int64_t e = 0; e < v[0]; ++e)
      list.push_back(static_cast<char*>(v.data) + bytes_for(v.dtype, e * v.stride[0]));
    v.data = nullptr;
    return list.data();
  }

  bool along_k() const { return shape_.axis == Axis::kAlongK; }
  int64_t scale_col(int64_t j) const {
    return along_k() || shape_.format.square ? j / info(shape_.format.kind).block : j;
  }
  /// Routed rows that are transformed are stored in whole blocks, `first` among them.
  int64_t scale_row(const Place& at) const {
    const int64_t block = info(shape_.format.kind).block;
    if (along_k() && !shape_.format.square) return at.first + at.i;
    if (shape_.kind == RowsKind::kWeights) return at.i / block;
    if (is_transformed(shape_.format, shape_.axis)) return at.first / 16 + at.i / 16;
    return at.first / block + at.expert + at.i / block;
  }
  size_t scale_index(int64_t expert, int64_t i, int64_t j) const {
    const TensorView& v = scale_view_;
    return size_t(((v.rank == 3 ? expert * v[1] : 0) + i) * v[v.rank - 1] + j);
  }
  static int64_t place(const TensorView& v, int64_t expert, int64_t i, int64_t j) {
    return (v.rank == 3 ? expert * v.stride[0] : 0) + i * v.stride[v.rank - 2] +
           j * v.stride[v.rank - 1];
  }
  static char* row(const Tensor& tensor, int64_t expert, int64_t i) {
    const TensorView v = tensor.view();
    const int64_t at = v.rank == 3 ? expert * v.stride[0] + i * v.stride[1] : i * v.stride[0];
    return static_cast<char*>(v.data) + bytes_for(v.dtype, at);
  }

  void fill_scales(std::mt19937& random, int expert, int64_t first, int64_t count) {
    const FormatInfo& row_of_format = info(shape_.format.kind);
    if (row_of_format.block == 0 || count == 0) return;
    const int64_t top = scale_row({expert, first, 0, 0}),
                  end = scale_row({expert, first, count - 1, 0}) + 1;
    for (int64_t i = top; i < end; ++i) {
      for (int64_t j = 0; j <= scale_col(shape_.cols - 1); ++j) {
        Code code = random_code(random, row_of_format.scale);
        if (row_of_format.scale != DType::kE8m0) code.value = std::abs(code.value) + 0.0;
        scale_values_[scale_index(expert, i, j)] = code.value;
        put_code(static_cast<char*>(scale_view_.data), row_of_format.scale,
                 place(scale_view_, expert, i, j), positive(code.bits));
      }
    }
  }
  uint32_t positive(uint32_t bits_of_code) const {
    const DType scale = info(shape_.format.kind).scale;
    if (scale == DType::kF32) return bits_of_code & 0x7fff'ffffu;
    return scale == DType::kE4m3 ? bits_of_code & 0x7fu : bits_of_code;
  }

  void fill_element(std::mt19937& random, const Place& at) {
    const DType dtype = shape_.format.element;
    const Code code = random_code(random, dtype);
    const bool weights = shape_.kind == RowsKind::kWeights;
    const int64_t i = weights ? at.i : at.first + at.i;
    put_code(static_cast<char*>(code_view_.data), dtype, place(code_view_, at.expert, i, at.j),
             code.bits);
    double value = code.value;
    if (info(shape_.format.kind).block != 0)
      value *= scale_values_[scale_index(at.expert, scale_row(at), scale_col(at.j))];
    if (!expert_scale_.empty()) value *= expert_scale_[size_t(at.expert)];
    values_[size_t((weights ? at.expert * shape_.rows + at.i : i) * shape_.cols + at.j)] = value;
  }

  QuantizedShape shape_;
  Tensor codes_, scales_;
  TensorView code_view_, scale_view_;
  std::vector<float> expert_scale_;
  std::vector<double> values_;
  std::vector<double> scale_values_;
  std::vector<const void*> code_pointers_, scale_pointers_;
};

/// The implementations that take a problem on this processor, the planned one first.
inline std::vector<std::string_view> implementations(const GroupedGemmProblem& p) {
  std::vector<std::string_view> names;
  for (const auto& entry : backend::entries_on<GroupedGemmProblem>(this_cpu()))
    if (entry.refuses(p, this_cpu()).empty()) names.push_back(entry.name);
  return names;
}

/// A grouped GEMM with all its arguments, its answer and the bound of every element.
class GemmCase {
 public:
  GemmCase(const GroupedGemmProblem& problem, const Counts& counts, unsigned seed,
           CaseLayout layout = {})
      : p(problem),
        offsets(counts.offsets()),
        counts_(counts),
        lhs_(lhs_shape(p), layout.lhs_gap),
        rhs_(rhs_shape(p), layout.rhs_gap),
        layout_(layout) {
    std::mt19937 random(seed);
    for (int e = 0; e < p.experts; ++e) fill_expert(random, e);
    const auto factors = [&](bool wanted, int64_t count) {
      std::vector<float> all(size_t(wanted ? count : 0));
      for (float& f : all) f = std::uniform_real_distribution<float>(-2, 2)(random);
      return all;
    };
    alpha = factors(p.alpha, p.experts);
    beta = factors(p.beta, p.experts);
    bias_scale = factors(p.bias_scale, p.rows);
    if (p.bias) bias_ = Tensor(p.bias_dtype, {p.experts, p.n}, {layout.out_gap});
    if (p.bias) bias_.fill(random, -3, 3);
    if (p.beta) c_ = make_out(), c_.fill(random, -9, 9);
    if (p.accumulate == Accumulate::kDevice) accumulate = {int32_t(random() % 2)};
    for (int e = 0; p.accumulate == Accumulate::kPerExpert && e < p.experts; ++e)
      accumulate.push_back(int32_t(random() % 3) - 1);
    old_ = make_out();
    if (p.accumulate != Accumulate::kNo) fill_old(random);
  }

  /// What one implementation makes of it.
  struct Result {
    Tensor out;
    TensorView view;  ///< of `out`, as [R, C] or [E, N, K]
    std::string damage;
  };
  Result run(std::string_view implementation = {}, int threads = 2) {
    const Device cpu{.kind = DeviceKind::kCpu, .units = threads};
    const GroupedGemmPlan chosen = plan(p, cpu, implementation);
    return run_by(chosen.workspace_bytes, [&](const GroupedGemmArgs& a, Workspace workspace) {
      cadre::run(chosen, a, workspace, {});
    });
  }
  /// The same by a function of arguments and workspace.
  template <class Run>
  Result run_by(int64_t workspace_bytes, Run&& work) {
    const OwnedWorkspace workspace(workspace_bytes);
    Result result{old_, {}, {}};
    result.view = out_view(result.out);
    work(args(result), workspace.get());
    result.damage = result.out.damage() + lhs_.damage() + rhs_.damage() + c_.damage();
    return result;
  }

  /// Empty if every element is within its bound, the tail is as the problem says and nothing else
  /// was written.
  std::string check(const Result& result) {
    if (!result.damage.empty()) return result.damage;
    answer();
    const bool rows = p.pass != Pass::kWgrad;
    const int64_t cols = result.view[result.view.rank - 1];
    std::vector<double> got;
    for (size_t i = 0; i < want_.size(); ++i) got.push_back(at(result, int64_t(i)));
    const int64_t used = rows ? counts_.used() * cols : int64_t(want_.size());
    const auto first = [&](const std::vector<double>& all) {
      return std::span<const double>(all).first(size_t(used));
    };
    const std::string worst = difference(first(got), first(want_), first(bound_), cols);
    if (!worst.empty()) return worst;
    for (size_t i = size_t(used); i < got.size(); ++i)
      if (p.tail == Tail::kZero ? got[i] != 0 : !std::isnan(got[i]))
        return text("tail element ", i, " is ", got[i]);
    return {};
  }
  std::string check(std::string_view implementation) { return check(run(implementation)); }

  /// Element i of the answer in row-major order.
  double at(const Result& result, int64_t i) const {
    const TensorView& v = result.view;
    const int64_t col = i % v[v.rank - 1], row = i / v[v.rank - 1];
    return v.rank == 2 ? cpu::read(v, row, col) : cpu::read(v, row / v[1], row % v[1], col);
  }

  /// Numbers in all rows of codes and scales, those of the tail and between blocks too. The answer
  /// is no longer known.
  void fill_everything(unsigned seed) {
    std::mt19937 random(seed);
    lhs_.fill_everything(random);
    rhs_.fill_everything(random);
  }
  OperandCase& lhs() { return lhs_; }
  OperandCase& rhs() { return rhs_; }
  /// NaN throughout; the answer takes no part of it.
  void poison_addend() { c_ = make_out(); }

  GroupedGemmProblem p;
  std::vector<int32_t> offsets, accumulate;
  std::vector<float> alpha, beta, bias_scale;
  bool c_is_out = false;  ///< the addend is what the output holds

 private:
  Tensor make_out() const {
    const bool column = p.out_major == Major::kColumn;
    const int64_t cols = p.pass == Pass::kFprop ? p.n : p.k;
    const int64_t outer = p.pass == Pass::kWgrad ? p.n : p.rows;
    const int64_t rows = column ? cols : outer, width = column ? outer : cols;
    return p.pass == Pass::kWgrad ? Tensor(p.out, {p.experts, rows, width}, {layout_.out_gap})
                                  : Tensor(p.out, {rows, width}, {layout_.out_gap});
  }
  TensorView out_view(const Tensor& tensor) const {
    TensorView v = tensor.view();
    if (p.out_major == Major::kRow) return v;
    std::swap(v.shape[size_t(v.rank - 1)], v.shape[size_t(v.rank - 2)]);
    std::swap(v.stride[size_t(v.rank - 1)], v.stride[size_t(v.rank - 2)]);
    return v;
  }

  CodeRows codes_of(const Format& format, Axis axis, int e) const {
    return code_rows(format, axis, {offsets[size_t(e)], counts_.of[size_t(e)]}, e);
  }
  void fill_expert(std::mt19937& random, int e) {
    const QuantizedShape lhs = lhs_shape(p), rhs = rhs_shape(p);
    const CodeRows left = codes_of(lhs.format, lhs.axis, e);
    lhs_.fill(random, e, left.first, left.count);
    const CodeRows right =
        rhs.kind == RowsKind::kWeights ? CodeRows{0, p.n} : codes_of(rhs.format, rhs.axis, e);
    rhs_.fill(random, e, right.first, right.count);
  }
  bool accumulates(int e) const {
    if (accumulate.empty()) return p.accumulate == Accumulate::kYes;
    return accumulate[p.accumulate == Accumulate::kDevice ? 0 : size_t(e)] != 0;
  }
  /// Old content where it counts; NaN where it must not leak.
  void fill_old(std::mt19937& random) {
    const int64_t rows = old_.rows() / p.experts;
    for (int e = 0; e < p.experts; ++e)
      if (accumulates(e)) old_.fill(random, -9, 9, e * rows, (e + 1) * rows);
  }

  GroupedGemmArgs args(Result& result) {
    GroupedGemmArgs a;
    a.lhs = lhs_.packed();
    a.rhs = p.discrete_rhs ? rhs_.discrete() : rhs_.packed();
    if (!p.dense) a.offsets = {offsets.data(), p.experts};
    a.out = result.view;
    out_pointers_.clear();
    for (int e = 0; p.discrete_out && e < p.experts; ++e)
      out_pointers_.push_back(static_cast<char*>(a.out.data) +
                              bytes_for(p.out, e * a.out.stride[0]));
    if (p.discrete_out) a.discrete_out = out_pointers_.data(), a.out.data = nullptr;
    a.alpha = p.alpha ? alpha.data() : nullptr;
    a.beta = p.beta ? beta.data() : nullptr;
    if (p.beta) a.c = c_is_out ? a.out : out_view(c_);
    if (p.beta && c_is_out) copy_rows(c_, result.out);
    if (p.bias) a.bias = bias_.view();
    bias_pointers_.clear();
    for (int e = 0; p.discrete_bias && e < p.experts; ++e)
      bias_pointers_.push_back(static_cast<char*>(a.bias.data) +
                               bytes_for(p.bias_dtype, e * a.bias.stride[0]));
    if (p.discrete_bias) a.discrete_bias = bias_pointers_.data(), a.bias.data = nullptr;
    a.bias_scale = p.bias_scale ? bias_scale.data() : nullptr;
    a.accumulate = accumulate.empty() ? nullptr : accumulate.data();
    return a;
  }
  /// The used rows of a row-major output.
  void copy_rows(const Tensor& from, Tensor& to) const {
    for (int64_t r = 0; r < counts_.used(); ++r)
      for (int64_t j = 0; j < from.columns(); ++j) to.set({r, j}, from.at(r, j));
  }

  struct Sum {
    double value = 0, magnitude = 0;
    void add(double x) { value += x, magnitude += std::abs(x); }
    /// factor sum_i a_i b_i, which takes most of the time of these tests: line() has looked at the
    /// ends, so that sanitizers need not look at each element.
    [[gnu::no_sanitize("address", "undefined")]] void add_products(double factor, Line a, Line b,
                                                                   int64_t count) {
      for (int64_t i = 0; i < count; ++i) {
        const double x = factor * a.first[i * a.step] * b.first[i * b.step];
        value += x, magnitude += std::abs(x);
      }
    }
  };
  /// An element of the answer; its bound from its terms: one rounding in fp32 for each product and
  /// each addition, a few for scales and the epilogue, one to the output's type.
  void set(int64_t i, const Sum& sum, int64_t terms) {
    want_[size_t(i)] = sum.value;
    bound_[size_t(i)] = gamma(terms + 10, sum.magnitude) + 2 * rounding(p.out, sum.value);
  }
  void answer() {
    if (!want_.empty()) return;
    const int64_t count = elements(out_view(old_));
    want_.assign(size_t(count), 0);
    bound_.assign(size_t(count), 0);
    for (int e = 0; e < p.experts; ++e) p.pass == Pass::kWgrad ? wgrad(e) : ragged_rows(e);
  }
  void ragged_rows(int e) {
    const bool fprop = p.pass == Pass::kFprop;
    const int64_t cols = fprop ? p.n : p.k, depth = fprop ? p.k : p.n;
    for (int64_t r = offsets[size_t(e)]; r < offsets[size_t(e) + 1]; ++r) {
      for (int64_t j = 0; j < cols; ++j) {
        const double factor = p.alpha ? alpha[size_t(e)] : 1.0;
        Sum sum;
        sum.add_products(
            factor, lhs_.line(e, {r, 0}, true, depth),
            fprop ? rhs_.line(e, {j, 0}, true, depth) : rhs_.line(e, {0, j}, false, depth), depth);
        if (p.beta && beta[size_t(e)] != 0)
          sum.add(double(beta[size_t(e)]) * cpu::read(out_view(c_), r, j));
        if (p.bias) sum.add(bias_.at(e, j) * (p.bias_scale ? bias_scale[size_t(r)] : 1.0));
        set(r * cols + j, sum, depth);
      }
    }
  }
  void wgrad(int e) {
    const QuantizedShape lhs = lhs_shape(p), rhs = rhs_shape(p);
    const CodeRows left = codes_of(lhs.format, lhs.axis, e);
    const CodeRows right = codes_of(rhs.format, rhs.axis, e);
    for (int64_t n = 0; n < p.n; ++n) {
      for (int64_t k = 0; k < p.k; ++k) {
        Sum sum;
        sum.add_products(p.alpha ? alpha[size_t(e)] : 1.0,
                         lhs_.line(e, {left.first, n}, false, left.count),
                         rhs_.line(e, {right.first, k}, false, left.count), left.count);
        if (accumulates(e)) sum.add(cpu::read(out_view(old_), e, n, k));
        set((e * p.n + n) * p.k + k, sum, left.count);
      }
    }
  }

  Counts counts_;
  OperandCase lhs_, rhs_;
  CaseLayout layout_;
  Tensor bias_, c_, old_;
  std::vector<void*> out_pointers_;
  std::vector<const void*> bias_pointers_;
  std::vector<double> want_, bound_;
};

}  // namespace cadre::test
