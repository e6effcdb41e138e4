// The peer of grouped_gemm: one dense oneDNN product of equal work, all live rows times one weight.
#include <memory>
#include <unordered_map>

#include "bench/peer.h"
#include "cadre/error.h"
#include "cpu/gemm/onednn/matmul.h"

namespace cadre::bench {
namespace {

using Tag = dnnl::memory::format_tag;
using Type = dnnl::memory::data_type;

// One matrix product and the memory that it works on.
struct Dense {
  Buffers buffers;
  dnnl::stream stream{cpu::gemm::cpu_engine()};
  dnnl::matmul product;
  std::unordered_map<int, dnnl::memory> args;

  // A matrix of random numbers as oneDNN sees it; `transposed` if it is stored [columns, rows].
  dnnl::memory matrix(DType dtype, int64_t rows, int64_t columns, bool transposed) {
    const TensorView v = transposed ? buffers.tensor(dtype, {columns, rows})
                                    : buffers.tensor(dtype, {rows, columns});
    fill_normal(v, v[0], uint64_t(buffers.bytes()));
    const Type type = dtype == DType::kF32 ? Type::f32 : Type::bf16;
    return {
        {{rows, columns}, type, transposed ? Tag::ba : Tag::ab}, cpu::gemm::cpu_engine(), v.data};
  }
};

// The sizes of the dense product and how its factors are stored, for each pass.
struct Shape {
  int64_t m, n, k;
  bool a_transposed, b_transposed;
};

Shape shape_of(const GroupedGemmProblem& p, int64_t live) {
  switch (p.pass) {
    case Pass::kFprop:
      return {live, p.n, p.k, false, true};
    case Pass::kDgrad:
      return {live, p.k, p.n, false, false};
    case Pass::kWgrad:
      return {p.n, p.k, live, true, false};
  }
  return {};
}

bool is_bf16(const Format& f) { return f.kind != FormatKind::kF32 && f.kind != FormatKind::kF16; }

// Our own planning knows whether oneDNN's bf16 products are safe and worth it on this processor.
DType dense_type(GroupedGemmProblem p) {
  if (!is_bf16(p.lhs) || !is_bf16(p.rhs)) return DType::kF32;
  p.lhs = p.rhs = format(FormatKind::kBf16);
  return plan(p, this_cpu()).name.ends_with("_bf16") ? DType::kBf16 : DType::kF32;
}

}  // namespace

std::vector<Peer> peers(const GroupedGemmCase& c) {
  const GroupedGemmProblem& p = c.problem;
  if (c.offsets.back() == 0) return {};
  const Shape s = shape_of(p, c.offsets.back());
  const DType in = dense_type(p), out = p.out == DType::kF32 ? DType::kF32 : in;
  const auto dense = std::make_shared<Dense>();
  const dnnl::memory a = dense->matrix(in, s.m, s.k, s.a_transposed);
  const dnnl::memory b = dense->matrix(in, s.k, s.n, s.b_transposed);
  const dnnl::memory y = dense->matrix(out, s.m, s.n, false);
  dense->product = cpu::gemm::make_matmul({a.get_desc(), b.get_desc(), y.get_desc()}, false);
  dense->args = {{DNNL_ARG_SRC, a}, {DNNL_ARG_WEIGHTS, b}, {DNNL_ARG_DST, y}};
  const std::string what = text("one product in ", name(in), ", ", s.m, " x ", s.n, " x ", s.k);
  return {{"onednn_dense", what, [dense] {
             dense->product.execute(dense->stream, dense->args);
             dense->stream.wait();
           }}};
}

}  // namespace cadre::bench
