#pragma once
#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>

namespace CLI {
class App;
}

namespace cadre::cli {

/// What a verb does once its options are parsed. Returns the exit code: 0 good, 1 a failed check.
/// Unsupported that it throws is exit code 1, what else it throws 2.
using Action = std::function<int()>;

/// One verb of the command line: a row of the table in main.cpp.
struct Verb {
  std::string_view name, summary;
  Action (*declare)(CLI::App&);  ///< adds the options, returns the action that will read them
};

/// A mistake of the user's that the library cannot see, such as an unreadable file. Printed in one
/// line; exit code 2. The text says what to do.
struct UsageError : std::runtime_error {
  using runtime_error::runtime_error;
};

// One file each.
Action declare_bench(CLI::App&);
Action declare_check(CLI::App&);
Action declare_explain(CLI::App&);
Action declare_facts(CLI::App&);
Action declare_info(CLI::App&);
Action declare_train(CLI::App&);

/// "cadre 0.1.0".
std::string version();

}  // namespace cadre::cli
