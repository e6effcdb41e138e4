#include "bench/accelerator.h"

#include "cadre/error.h"

namespace cadre::bench {

Device running_device(std::string_view word) {
  if (word == "cpu") return this_cpu();
  require(word.starts_with("cuda"), "device: name is '", word,
          "', must be cpu, cuda or cuda:<index>; only 'cadre explain' plans for devices that are "
          "not here");
  const std::string what_to_do = why_no_accelerator() + ", or give --device cpu";
  require(!cuda_devices().empty(), "device: '", word, "' is not here; ", what_to_do);
  return parse_device(word);
}

Device running_gpu(std::string_view word) {
  require(word.starts_with("cuda"), "device: name is '", word,
          "', must be cuda or cuda:<index>; facts are of a GPU");
  require(!cuda_devices().empty(), "device: '", word, "' is not here; ", why_no_accelerator());
  return parse_device(word);
}

}  // namespace cadre::bench
