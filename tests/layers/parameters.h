#pragma once
#include <random>
#include <string>
#include <vector>

#include "cadre/layer.h"
#include "tests/judge/machine_copy.h"

namespace cadre::test {

/// A tensor per expert: packed, or E pointers. Discrete experts lie in reverse, so that taking the
/// tensor for the pointers would be seen. Column-major experts are stored transposed.
class ExpertTensor {
 public:
  struct Shape {
    DType dtype = DType::kF32;
    int64_t experts = 1, n = 1, k = 1;
    bool discrete = false;
    Major major = Major::kRow;
  };

  ExpertTensor() = default;
  explicit ExpertTensor(const Shape& shape) : shape_(shape) {
    const bool column = shape.major == Major::kColumn;
    tensor_ = Tensor(shape.dtype,
                     {shape.experts, column ? shape.k : shape.n, column ? shape.n : shape.k});
    for (int64_t e = 0; e < shape.experts; ++e)
      pointers_.push_back(tensor_.data<char>() +
                          bytes_for(shape.dtype, place(e) * shape.n * shape.k));
  }

  /// Null unless packed.
  TensorView view() const {
    if (shape_.discrete) return {};
    TensorView v = tensor_.view();
    if (shape_.major == Major::kRow) return v;
    std::swap(v.shape[1], v.shape[2]);
    std::swap(v.stride[1], v.stride[2]);
    return v;
  }
  void** pointers() { return shape_.discrete ? pointers_.data() : nullptr; }

  double at(int64_t e, int64_t n, int64_t k) const {
    const bool column = shape_.major == Major::kColumn;
    return tensor_.at(place(e), column ? k : n, column ? n : k);
  }
  void set(int64_t e, int64_t n, int64_t k, double value) {
    const bool column = shape_.major == Major::kColumn;
    tensor_.set({place(e), column ? k : n, column ? n : k}, value);
  }
  /// Random numbers for one expert, the same for every layout.
  void fill(std::mt19937& random, double range, int64_t e) {
    std::uniform_real_distribution<double> uniform(-range, range);
    for (int64_t n = 0; n < shape_.n; ++n)
      for (int64_t k = 0; k < shape_.k; ++k) set(e, n, k, uniform(random));
  }
  void fill(std::mt19937& random, double range) {
    for (int64_t e = 0; e < shape_.experts; ++e) fill(random, range, e);
  }

  /// All elements in the order of e, n, k, whatever the layout.
  std::vector<double> values() const {
    std::vector<double> all;
    for (int64_t e = 0; e < shape_.experts; ++e)
      for (int64_t n = 0; n < shape_.n; ++n)
        for (int64_t k = 0; k < shape_.k; ++k) all.push_back(at(e, n, k));
    return all;
  }
  std::string damage() const { return tensor_.damage(); }
  bool untouched() const { return tensor_.untouched(0, tensor_.rows()); }
  template <class Visit>
  void for_pieces(const char* name, Holds holds, Visit&& visit) const {
    visit(piece(name, tensor_, shape_.discrete ? Holds::kDiscrete : holds));
    if (shape_.discrete) visit(list_piece(name, pointers_, Holds::kPointers));
  }
  const Shape& shape() const { return shape_; }

 private:
  int64_t place(int64_t e) const { return shape_.discrete ? shape_.experts - 1 - e : e; }

  Shape shape_;
  Tensor tensor_;
  std::vector<void*> pointers_;
};

/// The sizes of a linear layer's parameters and how its gradients begin.
struct ParameterCase {
  ParameterLayout layout{};
  int64_t experts = 1, n = 1, k = 1;
  Accumulate accumulate = Accumulate::kNo, accumulate_bias = Accumulate::kNo;
};

/// Parameters and gradients of a linear layer. Weights and biases are random; a gradient that is
/// added to begins with random numbers, one that is overwritten with NaN.
struct Parameters {
  ExpertTensor w, bias, dw, dbias;
  std::vector<int32_t> words, bias_words;

  Parameters() = default;
  Parameters(const ParameterCase& c, std::mt19937& random)
      : w({c.layout.weight, c.experts, c.n, c.k, c.layout.discrete_weight, c.layout.weight_major}),
        bias({c.layout.bias, c.experts, 1, c.n, c.layout.discrete_bias}),
        dw({c.layout.dw, c.experts, c.n, c.k, c.layout.discrete_dw, c.layout.weight_major}),
        dbias({c.layout.dbias, c.experts, 1, c.n, c.layout.discrete_bias}) {
    w.fill(random, 1 / std::sqrt(double(c.k)));
    bias.fill(random, 1);
    for (int64_t e = 0; e < c.experts; ++e) {
      words.push_back(int32_t(random() % 2));
      bias_words.push_back(int32_t(random() % 2));
      ExpertTensor dw_before({DType::kF32, 1, c.n, c.k}), dbias_before({DType::kF32, 1, 1, c.n});
      dw_before.fill(random, 1);
      dbias_before.fill(random, 1);
      if (adds(c.accumulate, words, e)) copy(dw_before, dw, e);
      if (adds(c.accumulate_bias, bias_words, e)) copy(dbias_before, dbias, e);
    }
  }

  static bool adds(Accumulate how, const std::vector<int32_t>& words, int64_t e) {
    if (how == Accumulate::kDevice) return words[0] != 0;
    if (how == Accumulate::kPerExpert) return words[size_t(e)] != 0;
    return how == Accumulate::kYes;
  }

  LinearParameters args() {
    LinearParameters p;
    p.w = w.view();
    p.discrete_w = w.pointers();
    p.bias = bias.shape().discrete ? TensorView() : row_view(bias);
    p.discrete_bias = bias.pointers();
    p.dw = dw.view();
    p.discrete_dw = dw.pointers();
    p.dbias = dbias.shape().discrete ? TensorView() : row_view(dbias);
    p.discrete_dbias = dbias.pointers();
    p.accumulate = words.data();
    p.accumulate_bias = bias_words.data();
    return p;
  }
  std::string damage() const { return w.damage() + bias.damage() + dw.damage() + dbias.damage(); }
  template <class Visit>
  void for_pieces(Visit&& visit) const {
    w.for_pieces("w", Holds::kInput, visit);
    bias.for_pieces("bias", Holds::kInput, visit);
    dw.for_pieces("dw", Holds::kOutput, visit);
    dbias.for_pieces("dbias", Holds::kOutput, visit);
    visit(list_piece("accumulate", words));
    visit(list_piece("accumulate_bias", bias_words));
  }

 private:
  /// [E, 1, N] as [E, N].
  static TensorView row_view(const ExpertTensor& t) {
    return cadre::view(t.view().data, t.shape().dtype, {t.shape().experts, t.shape().k});
  }
  static void copy(const ExpertTensor& from, ExpertTensor& to, int64_t e) {
    for (int64_t n = 0; n < from.shape().n; ++n)
      for (int64_t k = 0; k < from.shape().k; ++k) to.set(e, n, k, from.at(0, n, k));
  }
};

}  // namespace cadre::test
