#include "apps/train/settings.h"

#include <charconv>
#include <cmath>
#include <map>

#include "cadre/error.h"

namespace cadre::train {
namespace {

constexpr double kMostParameters = 1e9;  ///< 16 bytes each

/// The shortest text that parses back to the same bits.
template <class T>
std::string shortest(T value) {
  char buffer[64];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, value).ptr;
  return std::string(buffer, end);
}

template <class T>
void parse_number(std::string_view name, std::string_view words, T& value) {
  const auto [end, error] = std::from_chars(words.data(), words.data() + words.size(), value);
  require(error == std::errc() && end == words.data() + words.size(), "train: setting ", name,
          " is '", words, "', must be a number; the settings are damaged");
}

std::map<std::string, std::string, std::less<>> split_fields(std::string_view words) {
  std::map<std::string, std::string, std::less<>> fields;
  while (!words.empty()) {
    const size_t end = std::min(words.find(' '), words.size());
    const std::string_view field = words.substr(0, end);
    words.remove_prefix(std::min(end + 1, words.size()));
    const size_t equals = field.find('=');
    require(equals != field.npos, "train: setting '", field,
            "' has no value, must be name=value; the settings are damaged");
    fields.emplace(field.substr(0, equals), field.substr(equals + 1));
  }
  return fields;
}

/// Parameters of the model, as a double: the product of the largest settings overflows.
double model_size(const Settings& s) {
  const auto h = static_cast<double>(s.hidden), f = static_cast<double>(s.features);
  const auto e = static_cast<double>(s.experts), b = static_cast<double>(s.blocks);
  return 256 * h * static_cast<double>(s.window + 1) + h + b * (h + e * h + 3 * e * h * f);
}

/// "10000000", not "1e+07".
std::string plain(double value) {
  const bool whole = value == std::floor(value) && std::abs(value) < 1e18;
  return whole ? std::to_string(static_cast<int64_t>(value)) : text(value);
}

}  // namespace

void require_legal(const Settings& settings) {
  each_setting(settings, [](const char* name, auto value, Range range, const char* summary) {
    const double v = static_cast<double>(value);
    const bool inside = std::isfinite(v) && v >= range.low && v <= range.high;
    require(inside && static_cast<decltype(value)>(v) == value, "train: --", name, " is ", value,
            ", must be ", plain(range.low), " to ", plain(range.high), " (", summary, ")");
  });
  require(settings.hidden % 16 == 0, "train: --hidden is ", settings.hidden,
          ", must be a multiple of 16");
  require(settings.features % 16 == 0, "train: --features is ", settings.features,
          ", must be a multiple of 16");
  require(settings.top_k <= settings.experts, "train: --top-k is ", settings.top_k,
          ", must be at most --experts, which is ", settings.experts);
  require(model_size(settings) <= kMostParameters, "train: model has ", plain(model_size(settings)),
          " parameters, must be at most ", plain(kMostParameters),
          "; lower --hidden, --features, --experts or --blocks");
}

std::string to_string(const Settings& settings) {
  std::string words;
  each_setting(settings, [&](const char* name, auto value, Range, const char*) {
    words += text(words.empty() ? "" : " ", name, '=', shortest(value));
  });
  return words;
}

Settings parse_settings(std::string_view words) {
  auto fields = split_fields(words);
  Settings settings;
  each_setting(settings, [&](const char* name, auto& value, Range, const char*) {
    const auto field = fields.find(name);
    require(field != fields.end(), "train: setting ", name,
            " is missing, must be there; the settings are damaged");
    parse_number(name, field->second, value);
    fields.erase(field);
  });
  require(fields.empty(), "train: setting ", fields.empty() ? "" : fields.begin()->first,
          " is unknown; the settings come from another version of cadre");
  require_legal(settings);
  return settings;
}

std::vector<std::string> differences(const Settings& a, const Settings& b) {
  const auto left = split_fields(to_string(a)), right = split_fields(to_string(b));
  std::vector<std::string> names;
  for (const auto& [name, value] : left) {
    if (right.at(name) != value) names.push_back(name);
  }
  return names;
}

}  // namespace cadre::train
