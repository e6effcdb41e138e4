#include "apps/train/waiting.h"

#include <unistd.h>

#include <cstdlib>
#include <filesystem>

namespace cadre::train {
namespace fs = std::filesystem;

void sleep_while_waiting(char** arguments) {
  // What runs may be an interpreter that was given the program, such as the dynamic linker.
  std::error_code error;
  const fs::path program = fs::read_symlink("/proc/self/exe", error);
  if (program.filename() != fs::path(arguments[0]).filename()) return;
  if (std::getenv("OMP_WAIT_POLICY") != nullptr || std::getenv("GOMP_SPINCOUNT") != nullptr) return;
  // Where the system does not start it again, it goes on as it is.
  if (::setenv("OMP_WAIT_POLICY", "passive", 0) == 0) ::execv("/proc/self/exe", arguments);
}

}  // namespace cadre::train
