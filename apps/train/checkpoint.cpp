#include "apps/train/checkpoint.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>

#include "apps/train/file.h"
#include "apps/train/utf8.h"
#include "cadre/error.h"

namespace cadre::train {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

constexpr const char* kKind = "cadre train 2";
constexpr const char* kFirstKind = "cadre train 1";  // its checksum leaves out the metadata
constexpr int64_t kMostBytes = int64_t{1} << 40;

template <class T>
constexpr const char* kStoredType = "I64";
template <>
constexpr const char* kStoredType<float> = "F32";
template <>
constexpr const char* kStoredType<double> = "F64";

/// Calls `f(name, vector, shape)` for every array of the state. `shape` is what the settings and
/// the step demand; a length of -1 is free.
template <class State, class F>
void each_array(State& state, F&& f) {
  for (auto& p : state.parameters) {
    f("model." + p.name, p.value, p.shape);
    f("adamw.mean." + p.name, p.mean, p.shape);
    f("adamw.square." + p.name, p.square, p.shape);
  }
  auto& history = state.history;
  const Settings& s = state.settings;
  f("history.loss", history.loss, std::vector<int64_t>{state.step});
  f("history.eval_step", history.eval_step, std::vector<int64_t>{-1});
  f("history.eval_bits", history.eval_bits, std::vector<int64_t>{-1});
  f("history.load", history.load, std::vector<int64_t>{kLoadBins, s.blocks, s.experts});
  f("history.held_bits", history.held_bits, std::vector<int64_t>{-1});
}

std::string hexadecimal(uint64_t word) {
  char digits[17] = {};
  std::to_chars(digits, digits + 16, word, 16);
  return digits;
}

/// A path as JSON: text, or a list of bytes where it is not UTF-8, which JSON cannot hold.
json stored_path(const std::string& path) {
  size_t at = 0, length = 1;
  while (at < path.size() && length > 0) at += length = utf8_length(path, at);
  if (length > 0) return path;
  return std::vector<uint8_t>(path.begin(), path.end());
}

std::string loaded_path(const json& stored) {
  if (stored.is_string()) return stored;
  std::string path;
  for (const json& byte : stored) path += static_cast<char>(byte.get<uint8_t>());
  return path;
}

bool is_text(const json& stored) { return stored.is_string(); }

bool is_path(const json& stored) {
  const auto is_byte = [](const json& each) {
    return each.is_number_unsigned() && each.get<uint64_t>() < 256;
  };
  return is_text(stored) ||
         (stored.is_array() && std::all_of(stored.begin(), stored.end(), is_byte));
}

std::map<std::string, std::string> metadata_of(const RunState& state) {
  json paths = json::array();
  for (const std::string& path : state.paths) paths.push_back(stored_path(path));
  return {{"kind", kKind},
          {"settings", to_string(state.settings)},
          {"recipe", state.recipe},
          {"recipes", json(state.recipes).dump()},
          {"paths", paths.dump()},
          {"text", hexadecimal(state.fingerprint)},
          {"step", std::to_string(state.step)}};
}

class CheckpointReader {
 public:
  CheckpointReader(const SafeTensors& file, const fs::path& path) : file_(file), path_(path) {}

  template <class... Parts>
  void demand(bool holds, const Parts&... parts) const {
    if (!holds) throw InvalidArgument(text("train: checkpoint ", path_.string(), ": ", parts...));
  }

  const std::string& metadata(const std::string& key) const {
    const auto found = file_.metadata.find(key);
    demand(found != file_.metadata.end(), "metadata ", key,
           " is missing; name a checkpoint that cadre train has written");
    return found->second;
  }

  uint64_t number(const std::string& key, int base) const {
    const std::string& words = metadata(key);
    uint64_t value = 0;
    const char* end = words.data() + words.size();
    const auto got = std::from_chars(words.data(), end, value, base);
    demand(got.ec == std::errc() && got.ptr == end, key, " is '", words,
           "', must be a number; the file is damaged");
    return value;
  }

  std::vector<std::string> names(const std::string& key, bool (*is_name)(const json&)) const {
    const json list = json::parse(metadata(key), nullptr, false);
    demand(list.is_array() && std::all_of(list.begin(), list.end(), is_name), key,
           " is no list of names; the file is damaged");
    std::vector<std::string> words;
    for (const json& each : list) words.push_back(loaded_path(each));
    return words;
  }

  /// The tensor's place, its dtype and shape checked.
  const StoredTensor& tensor(const std::string& name, const std::string& dtype,
                             const std::vector<int64_t>& shape) const {
    const auto found = file_.tensors.find(name);
    demand(found != file_.tensors.end(), "tensor ", name,
           " is missing; the file is damaged or from another version of cadre");
    const StoredTensor& t = found->second;
    bool fits = t.dtype == dtype && t.shape.size() == shape.size();
    for (size_t i = 0; fits && i < shape.size(); ++i) {
      fits = shape[i] < 0 || shape[i] == t.shape[i];
    }
    demand(fits, "tensor ", name, " is ", t.dtype, json(t.shape).dump(), ", must be ", dtype,
           json(shape).dump(), " by its settings; the file is damaged");
    return t;
  }

 private:
  const SafeTensors& file_;
  const fs::path& path_;
};

void demand_undamaged(const SafeTensors& file, const CheckpointReader& reader) {
  const auto kind = file.metadata.find("kind");
  const bool first = kind != file.metadata.end() && kind->second == kFirstKind;
  reader.demand(first || (kind != file.metadata.end() && kind->second == kKind),
                "was not written by this version of cadre train; name one of its checkpoints");
  const uint64_t sum = first ? tensors_checksum(file) : checksum(file);
  reader.demand(reader.metadata("checksum") == hexadecimal(sum),
                "its content does not match its checksum; the file is damaged");
}

void demand_sound(const RunState& state, const CheckpointReader& reader) {
  const History& h = state.history;
  reader.demand(h.eval_step.size() == h.eval_bits.size() && h.held_bits.size() <= 1,
                "history does not fit together; the file is damaged");
  bool named = false;
  for (const std::string& recipe : state.recipes) named = named || recipe == state.recipe;
  reader.demand(named, "recipe ", state.recipe, " is none of its run; the file is damaged");
}

/// Whatever its words say beside what was read, or otherwise than it is written, would be lost.
void demand_all_read(const RunState& state, const SafeTensors& file,
                     const CheckpointReader& reader) {
  const auto read = metadata_of(state);
  for (const auto& [key, words] : file.metadata) {
    if (key == "kind" || key == "checksum") continue;
    const auto found = read.find(key);
    reader.demand(found != read.end(), "metadata ", key,
                  " is unknown; the file is damaged or from another version of cadre");
    reader.demand(found->second == words, "metadata ", key, " is '", words, "', must be '",
                  found->second, "' as cadre train writes it; the file is damaged");
  }
}

}  // namespace

RunState initial_state(const Settings& settings, const std::string& recipe) {
  RunState state;
  state.settings = settings;
  state.recipe = recipe;
  state.recipes = {recipe};
  state.parameters = initial_parameters(settings);
  state.history.load.assign(kLoadBins * settings.blocks * settings.experts, 0);
  return state;
}

SafeTensors to_safetensors(const RunState& state) {
  SafeTensors file;
  each_array(state, [&]<class T>(const std::string& name, const std::vector<T>& values,
                                 std::vector<int64_t> shape) {
    if (shape[0] < 0) shape[0] = static_cast<int64_t>(values.size());
    file.tensors[name] = {
        kStoredType<T>,
        std::move(shape),
        {reinterpret_cast<const uint8_t*>(values.data()), values.size() * sizeof(T)}};
  });
  file.metadata = metadata_of(state);
  file.metadata["checksum"] = hexadecimal(checksum(file));
  return file;
}

RunState from_safetensors(const SafeTensors& file, const fs::path& path) {
  const CheckpointReader reader(file, path);
  demand_undamaged(file, reader);
  RunState state;
  try {
    state.settings = parse_settings(reader.metadata("settings"));
  } catch (const InvalidArgument& e) {
    reader.demand(false, e.what());
  }
  state.recipe = reader.metadata("recipe");
  state.recipes = reader.names("recipes", is_text);
  state.paths = reader.names("paths", is_path);
  state.fingerprint = reader.number("text", 16);
  const uint64_t step = reader.number("step", 10);
  reader.demand(step <= static_cast<uint64_t>(state.settings.steps), "step is ", step,
                ", must be at most ", state.settings.steps, "; the file is damaged");
  state.step = static_cast<int64_t>(step);
  state.parameters = parameter_list(state.settings);
  size_t used = 0;
  each_array(state, [&]<class T>(const std::string& name, std::vector<T>& values,
                                 const std::vector<int64_t>& shape) {
    const StoredTensor& t = reader.tensor(name, kStoredType<T>, shape);
    values.resize(t.data.size() / sizeof(T));
    if (!t.data.empty()) std::memcpy(values.data(), t.data.data(), t.data.size());
    ++used;
  });
  reader.demand(used == file.tensors.size(), "has ", file.tensors.size(), " tensors, must have ",
                used, "; the file is damaged or from another version of cadre");
  demand_sound(state, reader);
  demand_all_read(state, file, reader);
  return state;
}

std::vector<uint8_t> checkpoint_content(const RunState& state) {
  const SafeTensors file = to_safetensors(state);
  std::string header;
  std::vector<uint8_t> bytes;
  for (const auto& part : safetensors_parts(file, header)) {
    bytes.insert(bytes.end(), part.begin(), part.end());
  }
  return bytes;
}

void save_checkpoint(const RunState& state, const fs::path& path) {
  const SafeTensors file = to_safetensors(state);
  std::string header;
  replace_file(path, safetensors_parts(file, header));
}

RunState load_checkpoint(const fs::path& path) {
  return from_safetensors(parse_safetensors(read_file(path, kMostBytes), path), path);
}

int64_t checkpoint_bytes(const Settings& settings) {
  int64_t floats = 0;
  for (const Parameter& p : parameter_list(settings)) floats += 3 * elements(p);
  return 4 * floats + 8 * settings.steps + (int64_t{1} << 16);
}

}  // namespace cadre::train
