#include "apps/train/safetensors.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "apps/train/random.h"
#include "cadre/error.h"

namespace cadre::train {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

constexpr size_t kMostHeader = 100'000'000;
constexpr const char* kRemedy = "; it is cut short, damaged, or no safetensors file";

struct StoredType {
  const char* name;
  int64_t bytes;
};
constexpr std::array kTypes = {StoredType{"F64", 8},  StoredType{"F32", 4}, StoredType{"F16", 2},
                               StoredType{"BF16", 2}, StoredType{"I64", 8}, StoredType{"I32", 4},
                               StoredType{"I16", 2},  StoredType{"I8", 1},  StoredType{"U8", 1},
                               StoredType{"BOOL", 1}};

/// Throws what every complaint about a file has in common.
template <class... Parts>
void demand(bool holds, const fs::path& path, const Parts&... parts) {
  if (!holds)
    throw InvalidArgument(text("train: checkpoint ", path.string(), ": ", parts..., kRemedy));
}

/// The header's JSON; a name that stands in an object twice is an error, which the parser alone
/// lets pass.
json parse_header(const uint8_t* first, size_t length, const fs::path& path) {
  std::vector<std::set<std::string>> open;  // the names of each object that has not ended
  std::optional<std::string> twice;
  const auto watch = [&](int, json::parse_event_t event, json& value) {
    if (event == json::parse_event_t::object_start) open.emplace_back();
    if (event == json::parse_event_t::object_end) open.pop_back();
    if (event == json::parse_event_t::key && !open.back().insert(value.get<std::string>()).second)
      twice = value.get<std::string>();
    return true;
  };
  const json header = json::parse(first, first + length, watch, false);
  demand(header.is_object(), path, "header is no JSON object");
  demand(!twice, path, "name ", twice.value_or(""), " stands twice in the header");
  return header;
}

int64_t type_bytes(const std::string& dtype) {
  const auto type = std::find_if(kTypes.begin(), kTypes.end(),
                                 [&](const StoredType& t) { return dtype == t.name; });
  return type == kTypes.end() ? 0 : type->bytes;
}

/// Bytes of a tensor, or -1 where the shape has a negative length or overflows.
int64_t tensor_bytes(const StoredTensor& tensor) {
  int64_t bytes = type_bytes(tensor.dtype);
  for (const int64_t length : tensor.shape) {
    if (length < 0 || __builtin_mul_overflow(bytes, length, &bytes)) return -1;
  }
  return bytes;
}

bool is_number_list(const json& list) {
  return list.is_array() && std::all_of(list.begin(), list.end(), [](const json& each) {
           return each.is_number_unsigned() && each.get<uint64_t>() < (uint64_t{1} << 62);
         });
}

StoredTensor parse_tensor(const std::string& name, const json& entry, std::span<const uint8_t> data,
                          const fs::path& path) {
  demand(entry.is_object() && entry.size() == 3 && entry.contains("dtype") &&
             entry["dtype"].is_string() && entry.contains("shape") &&
             is_number_list(entry["shape"]) && entry.contains("data_offsets") &&
             is_number_list(entry["data_offsets"]) && entry["data_offsets"].size() == 2,
         path, "tensor ", name, " lacks a dtype, a shape or two data_offsets, or has more");
  StoredTensor tensor{entry["dtype"], entry["shape"], {}};
  demand(type_bytes(tensor.dtype) > 0, path, "tensor ", name, " has the unknown dtype ",
         tensor.dtype);
  const uint64_t begin = entry["data_offsets"][0], end = entry["data_offsets"][1];
  demand(begin <= end && end <= data.size(), path, "tensor ", name, " lies at bytes ", begin,
         " to ", end, " of ", data.size());
  tensor.data = data.subspan(begin, end - begin);
  demand(tensor_bytes(tensor) == static_cast<int64_t>(end - begin), path, "tensor ", name, " has ",
         end - begin, " bytes, which its shape and dtype do not");
  return tensor;
}

/// Every byte of the data belongs to exactly one tensor.
void demand_cover(const SafeTensors& file, std::span<const uint8_t> data, const fs::path& path) {
  std::vector<std::pair<const uint8_t*, const uint8_t*>> stretches;
  for (const auto& [name, tensor] : file.tensors) {
    if (!tensor.data.empty()) {
      stretches.emplace_back(tensor.data.data(), tensor.data.data() + tensor.data.size());
    }
  }
  std::sort(stretches.begin(), stretches.end());
  const uint8_t* at = data.data();
  for (const auto& [begin, end] : stretches) {
    demand(begin == at, path, "tensors overlap or leave a gap at byte ",
           std::min(begin, at) - data.data());
    at = end;
  }
  demand(at == data.data() + data.size(), path, data.data() + data.size() - at,
         " bytes at the end belong to no tensor");
}

}  // namespace

std::vector<std::span<const uint8_t>> safetensors_parts(const SafeTensors& file,
                                                        std::string& header) {
  json entries = json::object();
  if (!file.metadata.empty()) entries["__metadata__"] = file.metadata;
  std::vector<std::span<const uint8_t>> parts(1);
  size_t at = 0;
  for (const auto& [name, tensor] : file.tensors) {
    const size_t end = at + tensor.data.size();
    entries[name] = {{"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {at, end}}};
    parts.push_back(tensor.data);
    at = end;
  }
  const std::string words = entries.dump();
  const uint64_t length = (words.size() + 7) / 8 * 8;  // padded, so that tensors are aligned
  header.assign(8, '\0');
  for (size_t i = 0; i < 8; ++i) header[i] = static_cast<char>(length >> 8 * i & 0xFF);
  header += words;
  header.resize(8 + length, ' ');
  parts[0] = {reinterpret_cast<const uint8_t*>(header.data()), header.size()};
  return parts;
}

SafeTensors parse_safetensors(std::vector<uint8_t> bytes, const fs::path& path) {
  demand(bytes.size() >= 8, path, "file has ", bytes.size(), " bytes, fewer than 8");
  uint64_t length = 0;
  for (size_t i = 0; i < 8; ++i) length |= uint64_t{bytes[i]} << 8 * i;
  demand(length <= std::min(bytes.size() - 8, kMostHeader), path, "header has ", length,
         " bytes, the file ", bytes.size());
  SafeTensors file;
  file.storage = std::move(bytes);
  const json header = parse_header(file.storage.data() + 8, length, path);
  const auto data = std::span<const uint8_t>(file.storage).subspan(8 + length);
  for (const auto& [name, entry] : header.items()) {
    if (name != "__metadata__") {
      file.tensors[name] = parse_tensor(name, entry, data, path);
      continue;
    }
    demand(entry.is_object(), path, "__metadata__ is no JSON object");
    for (const auto& [key, value] : entry.items()) {
      demand(value.is_string(), path, "metadata ", key, " is no string");
      file.metadata[key] = value;
    }
  }
  demand_cover(file, data, path);
  return file;
}

uint64_t tensors_checksum(const SafeTensors& file) {
  uint64_t sum = 0;
  for (const auto& [name, tensor] : file.tensors) {
    size_t at = 0;
    for (; at + 8 <= tensor.data.size(); at += 8) {
      uint64_t word = 0;
      std::memcpy(&word, tensor.data.data() + at, 8);
      sum = (sum ^ word) * 0x100000001B3u + (sum >> 47);
    }
    for (; at < tensor.data.size(); ++at) sum = (sum ^ tensor.data[at]) * 0x100000001B3u;
    sum = scatter(sum);
  }
  return sum;
}

uint64_t checksum(const SafeTensors& file) {
  json words = {file.metadata, json::array()};
  words[0].erase("checksum");
  for (const auto& [name, tensor] : file.tensors) {
    words[1].push_back({name, tensor.dtype, tensor.shape});
  }
  uint64_t sum = tensors_checksum(file);
  for (const char byte : words.dump()) sum = scatter(sum ^ static_cast<uint8_t>(byte));
  return sum;
}

}  // namespace cadre::train
