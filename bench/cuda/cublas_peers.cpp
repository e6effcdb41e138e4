// The peers of grouped_gemm on a GPU: cuBLAS in one piece, and cuBLAS expert by expert.
#include "bench/cuda/check.h"
#include "bench/cuda/cublas.h"
#include "bench/cuda/graph.h"
#include "bench/device_peer.h"

namespace cadre::bench {
namespace {

using Matrix = Cublas::Matrix;

// The matrices of a case on the device, and the product of rows [first, first + count) with the
// weight of an expert, or of an expert's rows with themselves.
class Products {
 public:
  Products(const GroupedGemmCase& c, const Mirror& mirror)
      : p_(c.problem),
        lhs_(c.args.lhs.codes),
        rhs_(c.args.rhs.codes),
        out_(c.outputs[0].view),
        beta_(c.problem.accumulate == Accumulate::kYes ? 1.0f : 0.0f) {
    if (c.args.rhs.discrete) rhs_.data = const_cast<void*>(c.args.rhs.discrete[0]);
    for (TensorView* v : {&lhs_, &rhs_, &out_}) v->data = mirror.place_of(v->data);
  }

  Cublas::Sizes sizes(int64_t count) const {
    if (p_.pass == Pass::kWgrad) return {p_.n, p_.k, count};
    const bool fprop = p_.pass == Pass::kFprop;
    return {count, fprop ? p_.n : p_.k, fprop ? p_.k : p_.n};
  }
  void multiply(Cublas& cublas, int expert, int64_t first, int64_t count) const {
    const bool wgrad = p_.pass == Pass::kWgrad;
    const Matrix a = at(lhs_, first * lhs_.stride[0], 0, wgrad);
    const Matrix b = wgrad ? at(rhs_, first * rhs_.stride[0], 0, false)
                           : at(rhs_, expert * rhs_.stride[0], 1, p_.pass == Pass::kFprop);
    const Matrix out = wgrad ? at(out_, expert * out_.stride[0], 1, false)
                             : at(out_, first * out_.stride[0], 0, false);
    cublas.multiply(sizes(count), a, b, out, beta_);
  }

 private:
  static Matrix at(const TensorView& v, int64_t offset, int row_dimension, bool transposed) {
    return {static_cast<std::byte*>(v.data) + bytes_for(v.dtype, offset), v.dtype,
            v.stride[size_t(row_dimension)], transposed};
  }

  GroupedGemmProblem p_;
  TensorView lhs_, rhs_, out_;
  float beta_;
};

std::string why_not(const GroupedGemmProblem& p) {
  if (!is_plain(p.lhs) || !is_plain(p.rhs)) return "cuBLAS multiplies plain formats only";
  if (p.activation) return "cuBLAS computes no activation";
  if (p.gather != Gather::kNo) return "cuBLAS gathers no rows";
  if (p.scatter) return "cuBLAS scatters no rows";
  const bool row =
      p.lhs_major == Major::kRow && p.rhs_major == Major::kRow && p.out_major == Major::kRow;
  return row ? "" : "these peers take row-major operands only";
}

Peer dense_peer(const GroupedGemmCase& c, const Products& products,
                const std::shared_ptr<Cublas>& cublas) {
  const int64_t live = c.offsets.back();
  const Cublas::Sizes s = products.sizes(live);
  return {"cublas_dense",
          text("one product in ", name(c.problem.lhs.element), ", ", s.m, " x ", s.n, " x ", s.k),
          [=] { products.multiply(*cublas, 0, 0, live); }};
}

Peer graph_peer(const GroupedGemmCase& c, const Products& products,
                const std::shared_ptr<Cublas>& cublas, cudaStream_t stream) {
  int busy = 0;
  const auto graph = std::make_shared<Graph>(stream, [&] {
    for (int e = 0; e < c.problem.experts; ++e) {
      const int64_t first = c.offsets[size_t(e)], count = c.offsets[size_t(e) + 1] - first;
      if (count == 0) continue;
      products.multiply(*cublas, e, first, count);
      ++busy;
    }
  });
  return {"cublas_graph", text(busy, " products, one an expert, in a graph"),
          [graph, cublas] { graph->launch(); }};
}

}  // namespace

DevicePeers device_peers(const GroupedGemmCase& c, const Mirror& mirror, Accelerator& accelerator) {
  const char* absent = "cublas_dense and cublas_graph are not here: ";
  if (c.offsets.back() == 0) return {};
  if (const std::string why = why_not(c.problem); !why.empty()) return {{}, absent + why};
  const auto stream = static_cast<cudaStream_t>(accelerator.stream().handle);
  const auto cublas = Cublas::open(stream);
  if (!cublas) return {{}, absent + Cublas::why_absent()};
  const Products products(c, mirror);
  DevicePeers peers;
  peers.list.push_back(dense_peer(c, products, cublas));
  peers.list.back().run();  // what cuBLAS sets up at its first call is no part of a graph
  peers.list.push_back(graph_peer(c, products, cublas, stream));
  return peers;
}

}  // namespace cadre::bench
