#pragma once
#include <initializer_list>
#include <string_view>

namespace cadre::door {

/// Words such as "sigmoid normalize=yes", which the library reads as part of a whole problem: what
/// else a problem names is told by arguments and tensors here, and would not be heard.
/// Errors    ValueError for a name=value whose name is not among `names`.
void require_names(const char* what, std::string_view words,
                   std::initializer_list<std::string_view> names);

/// The names that belong to an activation.
void require_activation_names(std::string_view words);

}  // namespace cadre::door
