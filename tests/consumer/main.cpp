#include <cadre/device.h>
#include <cadre/error.h>
#include <cadre/tensor.h>

#include <iostream>

int main() {
  const float x[6] = {};
  std::cout << to_string(cadre::view(x, cadre::DType::kF32, {2, 3})) << " on "
            << to_string(cadre::this_cpu()) << "\n";
  try {
    cadre::parse_device("abacus");
  } catch (const cadre::InvalidArgument& error) {
    std::cout << error.what() << "\n";
    return 0;
  }
  return 1;
}
