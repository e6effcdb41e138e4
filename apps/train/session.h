#pragma once
#include <filesystem>
#include <iosfwd>
#include <string>
#include <vector>

#include "apps/train/progress.h"
#include "apps/train/result.h"
#include "apps/train/sample.h"
#include "cadre/device.h"

namespace cadre::train {

/// The options of the command.
struct Request {
  Settings settings;
  std::vector<std::string> recipes = {"bf16"};
  std::vector<std::string> paths;  ///< empty: this repository's sources and documents
  std::filesystem::path out = "cadre-train";
  int64_t save_every = 200;    ///< steps between two checkpoints
  bool overwrite = false;      ///< an earlier run in `out` may be thrown away
  bool verify_resume = false;  ///< prove for each recipe that a resumed run has equal bits
  SampleOptions sample;
  Device device = this_cpu();  ///< where the networks live
  Origin origin;               ///< what the report says of this machine and program
};

/// The recipes of "bf16,nvfp4,wgrad=bf16,mxfp8" under their full names: a comma starts a recipe,
/// or goes on with the one before where a `name=value` follows.
/// Errors    InvalidArgument for an unknown recipe, one that stands twice, or none.
std::vector<std::string> split_recipes(std::string_view);

/// The checkpoint of a recipe within a folder.
std::filesystem::path checkpoint_path(const std::filesystem::path& out, const std::string& recipe);

/// The options of an interrupted command, from one of its checkpoints or from the folder that holds
/// them. Sample, checks and device are not part of it.
/// Errors    InvalidArgument where there is no checkpoint, or one is damaged or renamed.
Request resumed_request(const std::filesystem::path&);

/// Trains every recipe and writes checkpoints, report.html and results.json into `request.out`.
/// `resume`: recipes whose checkpoints belong to this request go on from there. Returns the exit
/// code: 0, 1 where a resumed run differed, 128 + the signal where one came.
/// Errors    InvalidArgument for whatever the user can mend, Unsupported for a recipe that the
///           device does not take; the old checkpoints are still there.
int run_session(const Request& request, bool resume, std::ostream& out, const Terminal& terminal);

}  // namespace cadre::train
