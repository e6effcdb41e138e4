#include "cuda/portable/activation_codes.h"

#include "cadre/error.h"
#include "cuda/portable/activation_codes_job.h"
#include "formats/list.h"

namespace cadre::cuda::portable {
namespace {

/// Formats that have instances.
template <class Row>
constexpr bool kHasInstances =
    Row::kInfo.kind == FormatKind::kFp8Block || Row::kInfo.kind == FormatKind::kMxfp8 ||
    Row::kInfo.kind == FormatKind::kMxfp4;

bool has_instances(const Format& format) {
  bool has = false;
  formats::visit(format, [&]<class Row, class>() { has = kHasInstances<Row>; });
  return has;
}

}  // namespace

std::string refuses_activation_codes(const ActivationProblem& p, const Device& device) {
  if (!p.along_k) return "is for activations whose result is quantised";
  if (std::string why = needs_sm80(p, device); !why.empty()) return why;
  if (p.z != DType::kBf16 || p.h != DType::kBf16) return "takes z and h in bf16";
  if (!has_instances(*p.along_k)) return text("is not written for ", to_string(*p.along_k));
  if (p.features % kChunk != 0) return text("takes F that are multiples of ", kChunk);
  const int block = info(p.along_k->kind).block;
  if (p.backward && info(p.kind).gated && p.layout == GluLayout::kConcat && p.features % block != 0)
    return text("takes F that are multiples of ", block,
                " where gates come before ups, so that no block of dz has both");
  return {};
}

void activation_codes(const ActivationPlan& plan, const ActivationArgs& args, Workspace,
                      Stream stream) {
  const ActivationProblem& p = plan.problem;
  const Format& format = *p.along_k;
  if (p.rows == 0) return;
  const ActivationCodesJob job{
      .act = ActivationJob(p, args),
      .copy = {.to = {copy_shape(p), args.along_k},
               .options =
                   formats::scale_options(format, p.amax_eps, formats::largest_value(DType::kBf16)),
               .random = {}}};
  formats::visit(format, [&]<class Row, class Element>() {
    if constexpr (kHasInstances<Row>)
      launch_activation_codes<Row, Element>(plan, job, stream_of(stream));
  });
}

}  // namespace cadre::cuda::portable
