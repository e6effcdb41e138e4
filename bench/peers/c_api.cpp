#include "bench/peers/c_api.h"

#include <exception>
#include <string>

#include "cadre/device.h"
#include "cadre/error.h"
#include "cadre/grouped_gemm.h"

struct CadreGemm {
  cadre::GroupedGemmPlan plan;
  std::string name;
};

namespace {

std::string& last_error() {
  thread_local std::string words;
  return words;
}

// Runs `work`; keeps what it throws, and returns `failed` then.
template <class Result, class Work>
Result guarded(Result failed, Work&& work) {
  try {
    return work();
  } catch (const std::exception& error) {
    last_error() = error.what();
    return failed;
  }
}

// Operands of one piece each, which the arguments above have room for.
void require_bare(const cadre::GroupedGemmProblem& p) {
  const auto fits = [](const cadre::Format& format, cadre::Major major) {
    const cadre::FormatInfo& row = info(format.kind);
    return !(row.has_expert_scale && row.block != 0) &&
           (!is_plain(format) || major == cadre::Major::kRow);
  };
  const bool words =
      p.accumulate == cadre::Accumulate::kDevice || p.accumulate == cadre::Accumulate::kPerExpert;
  cadre::require(
      fits(p.lhs, p.lhs_major) && fits(p.rhs, p.rhs_major) && p.out_major == cadre::Major::kRow &&
          !words && !p.discrete_rhs && !p.discrete_out && !p.alpha && !p.beta && !p.bias &&
          !p.activation,
      "c_api: problem is '", to_string(p),
      "', must be packed, with scales of blocks or of experts but not both, without epilogue, "
      "plain operands row-major");
}

cadre::Operand operand(const cadre::QuantizedShape& shape, const void* codes, const void* scales) {
  const cadre::QuantizedView like = quantized_view(shape, nullptr);
  cadre::Operand operand{.codes = like.codes, .scales = like.scales};
  operand.codes.data = const_cast<void*>(codes);
  if (info(shape.format.kind).has_expert_scale)
    operand.expert_scale = static_cast<const float*>(scales);
  else
    operand.scales.data = const_cast<void*>(scales);
  return operand;
}

cadre::GroupedGemmArgs args_of(const cadre::GroupedGemmProblem& p, const CadreGemmArgs& given) {
  using cadre::Pass;
  using cadre::view;
  const bool fprop = p.pass == Pass::kFprop, wgrad = p.pass == Pass::kWgrad;
  cadre::GroupedGemmArgs args;
  args.lhs = operand(lhs_shape(p), given.lhs, given.lhs_scales);
  args.rhs = operand(rhs_shape(p), given.rhs, given.rhs_scales);
  args.offsets = {given.offsets, p.experts};
  args.out = wgrad ? view(given.out, p.out, {p.experts, p.n, p.k})
                   : view(given.out, p.out, {p.rows, fprop ? p.n : p.k});
  return args;
}

}  // namespace

extern "C" {

CadreGemm* cadre_gemm_plan(const char* problem, const char* device, const char* only) {
  return guarded<CadreGemm*>(nullptr, [&] {
    cadre::require(problem != nullptr && device != nullptr,
                   "c_api: problem or device is null, must be words");
    const auto p = cadre::parse_grouped_gemm_problem(problem);
    require_bare(p);
    auto chosen = plan(p, cadre::parse_device(device), only == nullptr ? "" : only);
    const std::string name(chosen.name);
    return new CadreGemm{std::move(chosen), name};
  });
}

void cadre_gemm_free(CadreGemm* gemm) { delete gemm; }

const char* cadre_gemm_name(const CadreGemm* gemm) { return gemm ? gemm->name.c_str() : ""; }

long long cadre_gemm_workspace_bytes(const CadreGemm* gemm) {
  return gemm ? gemm->plan.workspace_bytes : 0;
}

int cadre_gemm_run(const CadreGemm* gemm, const CadreGemmArgs* args, void* stream) {
  return guarded(1, [&] {
    cadre::require(gemm != nullptr && args != nullptr,
                   "c_api: plan or arguments are null, must be given");
    run(gemm->plan, args_of(gemm->plan.problem, *args),
        {args->workspace, gemm->plan.workspace_bytes}, {stream});
    return 0;
  });
}

const char* cadre_gemm_error() { return last_error().c_str(); }
}
