#include "cli/problem.h"

#include <algorithm>

#include "cadre/error.h"
#include "cli/verb.h"

namespace cadre::cli {

Subject subject_of(std::string_view problem) {
  const size_t start = std::min(problem.find_first_not_of(" \t"), problem.size());
  const std::string_view name = problem.substr(start, problem.find_first_of(" \t", start) - start);
  std::string known;
  for (const OperationInfo& operation : operation_list()) {
    if (operation.name == name) return {&operation, nullptr};
    known += text(known.empty() ? "" : ", ", operation.name);
  }
  for (const LayerInfo& layer : layer_list()) {
    if (layer.name == name) return {nullptr, &layer};
    known += text(", ", layer.name);
  }
  if (name == kExpertParallel.name) return {};
  known += text(", ", kExpertParallel.name);
  throw UsageError(text("problem: first word is '", name, "', must be one of ", known,
                        "; 'cadre info' shows an example of each"));
}

std::string joined(const std::vector<std::string>& words) {
  std::string all;
  for (const std::string& word : words) all += (all.empty() ? "" : " ") + word;
  return all;
}

}  // namespace cadre::cli
