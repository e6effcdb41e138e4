#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <string>
#include <tuple>

#include "arguments.h"
#include "call_memory.h"

// torch.ops.cadre.offsets, offsets_of_routing: docs/ops/offsets.md.
namespace cadre::door {
namespace {

/// The tensors that the operation writes.
struct OffsetsOutputs {
  Tensor offsets{}, row_of{}, slot_of{}, status{};  ///< row_of and slot_of of routing only
};

/// Checks the outputs and launches.
void run_offsets(OffsetsProblem problem, const Tensor& source, const OffsetsOutputs& out) {
  const bool routing = problem.source == OffsetsSource::kRouting;
  const char* const what = routing ? "experts" : "source";
  problem.index = index_type(source.scalar_type(), what);
  require_memory(source, what);
  const Tensor dense = source.contiguous();
  OffsetsArgs args{.source = dense.data_ptr()};
  args.offsets = written_ints(out.offsets, {"offsets", {problem.experts + 1}, source});
  args.status = written_ints(out.status, {"status", {1}, source});
  if (routing) {
    args.map.row_of = written_ints(out.row_of, {"row_of", {problem.tokens, problem.top_k}, source});
    args.map.slot_of = written_ints(out.slot_of, {"slot_of", {problem.rows}, source});
  }
  launch(problem, args, source);
}

OffsetsProblem problem_of(const Tensor& source, std::string_view kind, int64_t rows) {
  TORCH_CHECK_VALUE(source.dim() == 1, "source has shape ", source.sizes(), ", must be [E]");
  TORCH_CHECK_VALUE(kind == "counts" || kind == "ends", "kind is ", kind,
                    ", must be counts or ends");
  return {.source = kind == "counts" ? OffsetsSource::kCounts : OffsetsSource::kEnds,
          .rows = rows,
          .experts = int(source.size(0))};
}

OffsetsProblem problem_of_routing(const Tensor& experts, int64_t num_experts, int64_t rows) {
  TORCH_CHECK_VALUE(experts.dim() == 2, "experts has shape ", experts.sizes(),
                    ", must be [T, top_k]");
  return {.source = OffsetsSource::kRouting,
          .rows = rows,
          .experts = int_of(num_experts, "num_experts"),
          .tokens = experts.size(0),
          .top_k = int(experts.size(1))};
}

std::tuple<Tensor, Tensor> offsets_op(const Tensor& source, c10::string_view kind, int64_t rows) {
  const auto problem = problem_of(source, kind, rows);
  const auto options = source.options().dtype(at::kInt);
  const OffsetsOutputs out{.offsets = at::empty({problem.experts + 1}, options),
                           .status = at::empty({1}, options)};
  run_offsets(problem, source, out);
  return {out.offsets, out.status};
}

/// Without the status: a layer turns its splits into offsets at every call.
Tensor offsets_alone(const Tensor& source, int64_t rows) {
  OffsetsProblem problem = problem_of(source, "counts", rows);
  problem.index = index_type(source.scalar_type(), "counts");
  require_memory(source, "counts");
  const Tensor dense = source.contiguous();
  const Tensor offsets = at::empty({problem.experts + 1}, source.options().dtype(at::kInt));
  launch(problem, OffsetsArgs{.source = dense.data_ptr(), .offsets = offsets.data_ptr<int32_t>()},
         source);
  return offsets;
}

void offsets_out(const Tensor& source, c10::string_view kind, int64_t rows, const Tensor& offsets,
                 const Tensor& status) {
  run_offsets(problem_of(source, kind, rows), source,
              {.offsets = written(offsets, "offsets", source),
               .status = written(status, "status", source)});
}

std::tuple<Tensor, Tensor, Tensor, Tensor> routing_op(const Tensor& experts, int64_t num_experts,
                                                      int64_t rows) {
  const auto problem = problem_of_routing(experts, num_experts, rows);
  TORCH_CHECK_VALUE(num_experts >= 1, "num_experts is ", num_experts, ", must be 1 or more");
  TORCH_CHECK_VALUE(rows >= 0, "rows is ", rows, ", must be 0 or more");
  const auto options = experts.options().dtype(at::kInt);
  const OffsetsOutputs out{.offsets = at::empty({num_experts + 1}, options),
                           .row_of = at::empty(experts.sizes(), options),
                           .slot_of = at::full({rows}, -1, options),  // the tail is not written
                           .status = at::empty({1}, options)};
  run_offsets(problem, experts, out);
  return {out.offsets, out.row_of, out.slot_of, out.status};
}

void implement(torch::Library& m) {
  m.impl("_offsets", offsets_alone);
  m.impl("offsets", offsets_op);
  implement_out(m, "offsets", offsets_out);
  m.impl("offsets_of_routing", routing_op);
  implement_out(
      m, "offsets_of_routing",
      +[](const Tensor& experts, int64_t num_experts, int64_t rows, const Tensor& offsets,
          const Tensor& row_of, const Tensor& slot_of, const Tensor& status) {
        run_offsets(problem_of_routing(experts, num_experts, rows), experts,
                    {.offsets = written(offsets, "offsets", experts),
                     .row_of = written(row_of, "row_of", experts),
                     .slot_of = written(slot_of, "slot_of", experts),
                     .status = written(status, "status", experts)});
      });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(cadre, m) {
  m.def("_offsets(Tensor counts, SymInt rows) -> Tensor");
  m.def("offsets(Tensor source, str kind, SymInt rows) -> (Tensor offsets, Tensor status)");
  m.def(
      "offsets.out(Tensor source, str kind, SymInt rows, *, Tensor(a!) offsets, Tensor(b!) status) "
      "-> ()");
  m.def(
      "offsets_of_routing(Tensor experts, int num_experts, SymInt rows) -> (Tensor offsets, "
      "Tensor row_of, Tensor slot_of, Tensor status)");
  m.def(
      "offsets_of_routing.out(Tensor experts, int num_experts, SymInt rows, *, Tensor(a!) offsets, "
      "Tensor(b!) row_of, Tensor(c!) slot_of, Tensor(d!) status) -> ()");
}
TORCH_LIBRARY_IMPL(cadre, CPU, m) { implement(m); }
TORCH_LIBRARY_IMPL(cadre, CUDA, m) { implement(m); }

}  // namespace cadre::door
