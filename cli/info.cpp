// `cadre info`: what this build knows, printed from the library's own lists.
#include <CLI/CLI.hpp>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "cadre/activation.h"
#include "cadre/device.h"
#include "cadre/error.h"
#include "cadre/format.h"
#include "cadre/recipe.h"
#include "cli/problem.h"
#include "cli/table.h"
#include "cli/verb.h"

namespace cadre::cli {
namespace {

using Json = nlohmann::ordered_json;

Json devices() {
  Json list = Json::array();
  const auto add = [&](const std::string& name, const Device& d) {
    list.push_back({{"name", name},
                    {"architecture", to_string(d)},
                    {"units", d.units},
                    {"smem_bytes", d.smem_bytes}});
  };
  add("cpu", this_cpu());
  for (const Device& d : cuda_devices()) add(text("cuda:", d.index), d);
  return list;
}

Json options(const FormatInfo& f) {
  Json words = Json::array();
  for (const FormatOption& option : format_option_list())
    if (f.*option.takes) words.push_back(option.word);
  return words;
}

Json formats() {
  Json list = Json::array();
  for (const FormatInfo& f : format_list()) {
    list.push_back(
        {{"name", f.name},
         {"element", name(f.element)},
         {"bits", bits(f.element)},
         {"block", f.block == kWholeLine ? Json("line") : Json(f.block)},
         {"block_scale", f.block ? Json(name(f.scale)) : Json()},
         {"expert_scale", f.has_expert_scale ? Json("f32") : Json()},
         {"options", options(f)},
         {"default_scales",
          f.takes_power_of_two ? Json(f.power_of_two_default ? "pow2" : "fp32") : Json()},
         {"summary", f.summary}});
  }
  return list;
}

Json format_options() {
  Json list = Json::array();
  for (const FormatOption& o : format_option_list())
    list.push_back({{"name", o.word}, {"summary", o.summary}});
  return list;
}

Json activations() {
  Json list = Json::array();
  for (const ActivationInfo& a : activation_list())
    list.push_back({{"name", a.name}, {"gated", a.gated}, {"formula", a.formula}});
  return list;
}

Json recipes() {
  Json list = Json::array();
  for (const RecipeInfo& r : recipe_list()) {
    Json row = {{"name", r.name}};
    for (const auto& [pass, word] :
         {std::pair(Pass::kFprop, "fprop"), {Pass::kDgrad, "dgrad"}, {Pass::kWgrad, "wgrad"}}) {
      const OperandFormats& f = formats_of(r.recipe, pass);
      row[word] = {{"lhs", to_string(f.lhs)}, {"rhs", to_string(f.rhs)}};
    }
    row["summary"] = r.summary;
    list.push_back(row);
  }
  return list;
}

Json operations() {
  Device cuda;
  cuda.kind = DeviceKind::kCuda;
  Json list = Json::array();
  for (const OperationInfo& o : operation_list())
    list.push_back({{"name", o.name},
                    {"summary", o.summary},
                    {"example", o.example},
                    {"implementations",
                     {{"cpu", o.implementations(this_cpu())}, {"cuda", o.implementations(cuda)}}}});
  return list;
}

Json layers() {
  Json list = Json::array();
  for (const LayerInfo& l : layer_list())
    list.push_back({{"name", l.name}, {"summary", l.summary}, {"example", l.example}});
  return list;
}

Json ranks() {
  return Json::array({{{"name", kExpertParallel.name},
                       {"summary", kExpertParallel.summary},
                       {"example", kExpertParallel.example}}});
}

Json everything() {
  return {{"version", version()},
          {"devices", devices()},
          {"formats", formats()},
          {"format_options", format_options()},
          {"activations", activations()},
          {"recipes", recipes()},
          {"operations", operations()},
          {"layers", layers()},
          {"ranks", ranks()}};
}

std::string joined(const Json& words) {
  std::string all;
  for (const Json& word : words) all += text(all.empty() ? "" : ", ", word.get<std::string>());
  return all.empty() ? "-" : all;
}

std::string word_or_dash(const Json& value) { return value.is_null() ? "-" : std::string(value); }

std::string operands(const Json& pass) {
  return text(std::string(pass["lhs"]), " * ", std::string(pass["rhs"]));
}

void print_formats(const Json& list) {
  Table table({"format", "code", "block", "block scale", "expert scale", "options", ""});
  for (const Json& f : list)
    table.add({f["name"], f["element"], f["block"] == 0 ? "-" : f["block"].dump(),
               word_or_dash(f["block_scale"]), word_or_dash(f["expert_scale"]),
               joined(f["options"]), f["summary"]});
  table.print(std::cout);
}

void print_options(const Json& list) {
  Table table({"option", "such as fp8_block:2d+fp32"});
  for (const Json& o : list) table.add({o["name"], o["summary"]});
  table.print(std::cout);
}

void print(const Json& all) {
  std::cout << std::string(all["version"]) << "\n\n";
  Table devices({"device", "architecture", "SMs or threads"});
  for (const Json& d : all["devices"])
    devices.add({d["name"], d["architecture"], d["units"].dump()});
  devices.print(std::cout);
  print_formats(all["formats"]);
  print_options(all["format_options"]);
  Table activations({"activation", "gated", "formula"});
  for (const Json& a : all["activations"])
    activations.add({a["name"], a["gated"] ? "yes" : "no", a["formula"]});
  activations.print(std::cout);
  Table recipes({"recipe", "fprop x * w", "dgrad dy * w", "wgrad dy * x"});
  for (const Json& r : all["recipes"])
    recipes.add({r["name"], operands(r["fprop"]), operands(r["dgrad"]), operands(r["wgrad"])});
  recipes.print(std::cout);
  Table operations({"operation", "on the CPU, best first", "on CUDA", "example"});
  for (const Json& o : all["operations"])
    operations.add({o["name"], joined(o["implementations"]["cpu"]),
                    joined(o["implementations"]["cuda"]), o["example"]});
  operations.print(std::cout);
  Table layers({"layer", "example"});
  for (const Json& l : all["layers"]) layers.add({l["name"], l["example"]});
  layers.print(std::cout);
  Table ranks({"ranks", "example"});
  for (const Json& r : all["ranks"]) ranks.add({r["name"], r["example"]});
  ranks.print(std::cout);
}

}  // namespace

Action declare_info(CLI::App& app) {
  const auto json = std::make_shared<bool>(false);
  app.add_flag("--json", *json, "print the same as JSON");
  return [json] {
    const Json all = everything();
    if (*json)
      std::cout << all.dump(2) << "\n";
    else
      print(all);
    return 0;
  };
}

}  // namespace cadre::cli
