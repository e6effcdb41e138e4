// What `python -m cadre doctor` and recipes ask of the library: its devices, lists and plans, as
// text.
#include <string>
#include <tuple>
#include <vector>

#include "door.h"

namespace cadre::door {
namespace {

using Words = std::vector<std::string>;

/// One "name architecture units" for each device.
Words devices() {
  Words list;
  const auto add = [&](const std::string& name, const Device& d) {
    list.push_back(name + " " + to_string(d) + " " + std::to_string(d.units));
  };
  add("cpu", this_cpu());
  for (const Device& d : cuda_devices()) add("cuda:" + std::to_string(d.index), d);
  return list;
}

template <class List>
Words names(const List& list) {
  Words words;
  for (const auto& info : list) words.emplace_back(info.name);
  return words;
}

/// A problem of each operation, then of each layer, that every build takes on the CPU.
Words problems() {
  Words words;
  for (const OperationInfo& o : operation_list()) words.emplace_back(o.example);
  for (const LayerInfo& l : layer_list()) words.emplace_back(l.example);
  return words;
}

using Answer = std::tuple<std::string, std::string, Words>;  // plan, steps of a layer, refusals

Answer explain(const OperationInfo& operation, const std::string& problem, const Device& device) {
  const Explanation e = operation.explain(problem, device);
  Words refusals;
  for (const Refusal& r : e.refusals) refusals.push_back(std::string(r.name) + ": " + r.why);
  return {e.plan, "", refusals};
}

Answer explain(const LayerInfo& layer, const std::string& problem, const Device& device) {
  const LayerExplanation e = layer.explain(problem, device);
  return {e.plan, e.steps, e.refusals.empty() ? Words{} : Words{e.refusals}};
}

Answer explain(const std::string& problem, const std::string& device) {
  return translate_errors([&] {
    const Device on = parse_device(device);
    const std::string word = problem.substr(0, problem.find(' '));
    for (const OperationInfo& o : operation_list())
      if (o.name == word) return explain(o, problem, on);
    for (const LayerInfo& l : layer_list())
      if (l.name == word) return explain(l, problem, on);
    std::string all;
    for (const std::string& p : problems()) all += "\n  " + p;
    throw InvalidArgument("problem begins with '" + word +
                          "', must begin with the name of an operation or layer, such as:" + all);
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(cadre, m) {
  m.def("_devices() -> str[]", [] { return devices(); });
  m.def("_formats() -> str[]", [] { return names(format_list()); });
  m.def("_recipes() -> str[]", [] { return names(recipe_list()); });
  m.def("_require_recipe(str words) -> ()",
        [](const std::string& words) { translate_errors([&] { (void)parse_recipe(words); }); });
  m.def("_reads_codes_of(str recipe, str format) -> bool", [](const std::string& recipe,
                                                              const std::string& format) {
    return translate_errors([&] { return parse_recipe(recipe).fprop.lhs == parse_format(format); });
  });
  m.def("_problems() -> str[]", [] { return problems(); });
  m.def("_explain(str problem, str device) -> (str plan, str steps, str[] refusals)",
        [](const std::string& problem, const std::string& device) {
          return explain(problem, device);
        });
}

}  // namespace cadre::door
