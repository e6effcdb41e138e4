#include "cpu/scattered_gemm.h"

#include <algorithm>
#include <cstring>

#include "cadre/error.h"
#include "cpu/load_store.h"
#include "cpu/threads.h"
#include "schedule/expert_rows.h"

namespace cadre::cpu {
namespace {

constexpr int64_t kAlignment = 256;

int64_t row_bytes(const GroupedGemmProblem& p) { return bytes_for(p.out, out_columns(p)); }
/// Of the workspace, which begins with them.
int64_t rows_bytes(const GroupedGemmProblem& p) {
  return (p.rows * row_bytes(p) + kAlignment - 1) / kAlignment * kAlignment;
}

/// Its rows lie without gaps, which may be less than the caller promises of its own.
GroupedGemmProblem product_of(const GroupedGemmProblem& p) {
  const int64_t pitch = row_bytes(p) | kAlignment;
  GroupedGemmProblem product = p;
  product.scatter = false;
  product.tokens = 0;
  product.top_k = product.ranks = 1;
  product.align = int(std::min<int64_t>(p.align, pitch & -pitch));
  return product;
}

}  // namespace

std::string refuses_scattered_gemm(const GroupedGemmProblem& p, const Device& device) {
  if (!p.scatter) return "is for rows that are scattered";
  try {
    plan(product_of(p), device);
  } catch (const Unsupported& error) {
    return error.what();
  }
  return {};
}

int64_t scattered_gemm_workspace_bytes(const GroupedGemmProblem& p, const Device& device) {
  return rows_bytes(p) + plan(product_of(p), device).workspace_bytes;
}

backend::Inner scattered_gemm_plans(const GroupedGemmProblem& p, const Device& device) {
  // tidy: allocation because it is made with the plan, before any run
  const auto product = std::make_shared<GroupedGemmPlan>(plan(product_of(p), device));
  return {product, product->fraction_bits};
}

void scattered_gemm(const GroupedGemmPlan& of, const GroupedGemmArgs& args, Workspace workspace,
                    Stream stream) {
  const GroupedGemmProblem& p = of.problem;
  GroupedGemmArgs to_rows = args;
  to_rows.out = view(workspace.data, p.out, {p.rows, out_columns(p)});
  to_rows.place_of = nullptr;
  run(*static_cast<const GroupedGemmPlan*>(of.inner.get()), to_rows,
      {static_cast<char*>(workspace.data) + rows_bytes(p), workspace.bytes - rows_bytes(p)},
      stream);
  const int64_t used = schedule::rows_used(args.offsets.data, p.experts, p.rows);
  const int64_t places = p.ranks * p.tokens * p.top_k;
#pragma omp parallel for schedule(static) if (worth_threads(used * out_columns(p)))
  for (int64_t row = 0; row < used; ++row) {
    const int64_t place = args.place_of[row];
    if (place < 0 || place >= places) continue;
    std::memcpy(rank_row_address(args.out, place), row_address(to_rows.out, row),
                size_t(row_bytes(p)));
  }
}

}  // namespace cadre::cpu
