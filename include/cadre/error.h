#pragma once
#include <locale>
#include <sstream>
#include <stdexcept>
#include <string>

#pragma GCC visibility push(default)
namespace cadre {

/// The caller broke the documented contract. Nothing was launched, no output was touched.
struct InvalidArgument : std::invalid_argument {
  using invalid_argument::invalid_argument;
};

/// The request is legal, but no compiled implementation takes it on this device. The message lists
/// every implementation with its reason.
struct Unsupported : std::runtime_error {
  using runtime_error::runtime_error;
};

/// A CUDA call returned an error code, or a rank of several failed.
struct DeviceError : std::runtime_error {
  using runtime_error::runtime_error;
};

}  // namespace cadre
#pragma GCC visibility pop

// Templates are compiled where they are used, so nobody needs them from a library.
namespace cadre {

/// Joins the parts as an ostream prints them, or as to_string() does; the same in every locale.
template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  out.imbue(std::locale::classic());
  const auto print = [&out](const auto& part) {
    if constexpr (requires { out << part; })
      out << part;
    else
      out << to_string(part);
  };
  (print(parts), ...);
  return out.str();
}

/// Throws InvalidArgument with the joined parts unless `holds`. Parts are formatted only on
/// failure, so a problem or a view is given as it is, not as its to_string(). Form:
/// `<op>: <what> is <value>, must be <value or condition>; <why or what to do> [<problem>]`.
template <class... Parts>
void require(bool holds, const Parts&... parts) {
  if (!holds) throw InvalidArgument(text(parts...));
}

}  // namespace cadre
