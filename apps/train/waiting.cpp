#include "apps/train/waiting.h"

#include <unistd.h>

#include <cstdlib>

namespace cadre::train {

void sleep_while_waiting(char** arguments) {
  if (std::getenv("OMP_WAIT_POLICY") != nullptr || std::getenv("GOMP_SPINCOUNT") != nullptr) return;
  // Where the system does not start it again, it goes on as it is.
  if (::setenv("OMP_WAIT_POLICY", "passive", 0) == 0) ::execv("/proc/self/exe", arguments);
}

}  // namespace cadre::train
