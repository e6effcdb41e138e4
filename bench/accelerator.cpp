#include "bench/accelerator.h"

#include "cadre/error.h"

namespace cadre::bench {

Device running_device(std::string_view word) {
  if (word == "cpu") return this_cpu();
  require(word.starts_with("cuda"), "device: name is '", word,
          "', must be cpu, cuda or cuda:<index>; only 'cadre explain' plans for devices that are "
          "not here");
  require(!cuda_devices().empty(), "device: '", word, "' is not here; ", why_no_accelerator());
  return parse_device(word);
}

}  // namespace cadre::bench
