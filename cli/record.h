#pragma once
#include <iosfwd>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "bench/facts.h"
#include "bench/host_time.h"
#include "bench/measure.h"

namespace cadre::cli {

/// One measurement with what the record says beside it.
struct Case {
  bench::Measurement measured;
  std::string routing;  ///< how rows fell to experts: "uniform", "zipf:1.2", ...
  std::string layer;    ///< what the problem is in a model; may be empty
};

/// Host times with what the record says beside them.
struct HostCase {
  bench::HostTime measured;
  std::string layer;  ///< what the problem is in a model; may be empty
};

/// A benchmark record: {"command", "machine", "date", "commit", "cases": [...]}, or "facts".
nlohmann::ordered_json record(const std::vector<Case>&, const std::string& machine);
nlohmann::ordered_json record(const std::vector<HostCase>&, const std::string& machine);
nlohmann::ordered_json record(const std::vector<bench::Fact>&, const std::string& machine);

/// Opens the file of a record before anything is measured, so that no result is lost for want of a
/// place. An old record stays until the new one is written. `verb` is what errors begin with.
/// Errors    UsageError.
std::ofstream open_record(std::string_view verb, const std::string& path);
/// Replaces the content of the file, so that a record which grows can be written again.
void write_record(std::string_view verb, const std::string& path, std::ofstream&,
                  const nlohmann::ordered_json&);

/// The words of this process, the program without its folder, as a shell takes them.
std::string command_line();

/// "Intel(R) Xeon(R) ..., 2 threads", or "NVIDIA H200, 132 SMs".
std::string machine(const Device&);

/// "2026-11-23T05:20:00Z".
std::string now();

/// The commit that this binary was built from, with "-dirty" behind it if files had changed.
std::string commit();

}  // namespace cadre::cli
