// What is known of every operation without its types, made from the list of operations.
#include "cadre/operations.h"

#include <array>

#include "backend/walk.h"

namespace cadre {
namespace {

template <class Problem>
std::vector<std::string_view> implementations(const Device& device) {
  std::vector<std::string_view> names;
  for (const auto& entry : backend::entries_on<Problem>(device)) names.push_back(entry.name);
  return names;
}

template <class Operation>
Explanation explain(std::string_view words, const Device& device) {
  using Problem = typename Operation::Problem;
  const Problem problem = Operation::parse(words);
  Explanation result{.problem = to_string(problem), .plan = {}, .refusals = {}};
  try {
    Plan<Problem> chosen = plan(problem, device);
    result.plan = chosen.name;
    result.workspace_bytes = chosen.workspace_bytes;
    result.exact = chosen.exact;
    result.refusals = std::move(chosen.refusals);
  } catch (const Unsupported&) {
    result.refusals = backend::find(problem, device, {}).refusals;
  }
  return result;
}

template <class... Each>
constexpr auto rows(TypeList<Each...>) {
  return std::array{OperationInfo{Each::kText.name, Each::kText.summary, Each::kText.example,
                                  implementations<typename Each::Problem>, explain<Each>}...};
}
constexpr auto kOperations = rows(Operations{});

}  // namespace

std::span<const OperationInfo> operation_list() { return kOperations; }

}  // namespace cadre
