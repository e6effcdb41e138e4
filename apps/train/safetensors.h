#pragma once
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

namespace cadre::train {

/// One tensor of a safetensors file.
struct StoredTensor {
  std::string dtype;           ///< "F32", "F64", "I64", ...
  std::vector<int64_t> shape;  ///< row-major
  std::span<const uint8_t> data;
};

/// The content of a safetensors file: eight bytes with the header's length, a JSON header, then
/// the tensors without gaps. `storage` is what the spans of a file that was read look into.
struct SafeTensors {
  std::map<std::string, std::string> metadata;
  std::map<std::string, StoredTensor> tensors;
  std::vector<uint8_t> storage;
};

/// The file in parts: header, then the tensors in the order of their names. The parts look into
/// `header` and the tensors.
std::vector<std::span<const uint8_t>> safetensors_parts(const SafeTensors&, std::string& header);

/// Takes a file apart. Checks the length of the header, its JSON, every dtype and shape, and that
/// the tensors cover the data without gap or overlap to the last byte.
/// Errors    InvalidArgument naming `path` and what is wrong.
SafeTensors parse_safetensors(std::vector<uint8_t> bytes, const std::filesystem::path& path);

/// A checksum of all that a file says: the metadata, apart from the word "checksum" itself, then
/// the name, dtype, shape and bytes of every tensor.
uint64_t checksum(const SafeTensors&);

/// The same of the tensors' bytes alone, which is what checkpoints had before.
uint64_t tensors_checksum(const SafeTensors&);

}  // namespace cadre::train
