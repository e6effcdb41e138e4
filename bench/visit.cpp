#include "bench/visit.h"

namespace cadre::bench {

void refuse_operation(std::string_view name) {
  std::vector<std::string_view> names;
  for (const OperationInfo& operation : operation_list()) names.push_back(operation.name);
  std::sort(names.begin(), names.end());
  std::string known;
  for (const std::string_view each : names) known += text(known.empty() ? "" : ", ", each);
  throw InvalidArgument(text("problem: operation is '", name, "', must be one of ", known,
                             "; layers are rows of these"));
}

}  // namespace cadre::bench
