// cadre train: a byte-level Mixture-of-Experts language model on text files, in any recipe.
#include <CLI/CLI.hpp>
#include <iostream>
#include <memory>

#include "apps/train/session.h"
#include "bench/accelerator.h"
#include "cadre/error.h"
#include "cadre/recipe.h"
#include "cli/record.h"
#include "cli/verb.h"

namespace cadre::cli {
namespace {

using train::Request;
using train::Settings;

constexpr const char* kFooter = R"(
Settings that change the model or its training are fixed for a run; a resumed run takes them, its
recipes and its paths from the checkpoint. Equal text, settings and seed give equal bits on one
machine, whatever the number of threads. Ctrl-C, or a terminal that closes, saves a checkpoint.

With --device cuda all tensors live on the GPU, which takes every recipe from sm_80 on. A checkpoint
of one device may be resumed on the other: bits are equal on one device, and only near on two.
--resume goes on on the CPU unless --device says otherwise.

Try
  cadre train                                         this repository's own sources and documents
  cadre train notes/ book.txt --recipe bf16,nvfp4     your text, two recipes, same seed
  cadre train --device cuda --recipe bf16             on a GPU
  cadre train --resume cadre-train                    go on where Ctrl-C stopped
Exit codes: 0 good, 1 a resumed run differed, 2 the request was wrong, 130 interrupted.)";

/// What stands on the command line.
struct Options {
  Request request;
  std::string recipes = "bf16", resume, out = "cadre-train", device = "cpu";
};

std::string recipe_names() {
  std::string names;
  for (const RecipeInfo& recipe : recipe_list()) {
    names += text(names.empty() ? "" : ", ", recipe.name);
  }
  return names;
}

/// Settings on the command line of a resumed run must be those of its checkpoint.
void require_same(const CLI::App& app, const Settings& wanted, const Settings& stored) {
  for (const std::string& name : train::differences(wanted, stored)) {
    require(app.count("--" + name) == 0, "train: --", name,
            " differs from the checkpoint's, must be left out with --resume; the settings of a "
            "run stay");
  }
}

/// The request of the checkpoint, with what may be said anew.
Request resumed(const CLI::App& app, const Options& options) {
  Request request = train::resumed_request(options.resume);
  require_same(app, options.request.settings, request.settings);
  require(app.count("--recipe") == 0 || train::split_recipes(options.recipes) == request.recipes,
          "train: --recipe is ", options.recipes,
          ", must be left out with --resume; the recipes of a run stay");
  require(app.count("--out") == 0, "train: --out is ", options.out,
          ", must be left out with --resume; the run goes on in ", request.out.string());
  if (!options.request.paths.empty()) request.paths = options.request.paths;
  request.save_every = options.request.save_every;
  request.overwrite = options.request.overwrite;
  request.verify_resume = options.request.verify_resume;
  request.sample = options.request.sample;
  return request;
}

int start(const CLI::App& app, const Options& options) {
  Request request = options.request;
  const bool resume = app.count("--resume") > 0;
  if (resume) {
    request = resumed(app, options);
  } else {
    request.recipes = train::split_recipes(options.recipes);
    request.out = options.out;
    train::require_legal(request.settings);
  }
  require(request.save_every >= 1, "train: --save-every is ", request.save_every,
          ", must be 1 or more");
  require(!request.verify_resume || request.settings.steps >= 2, "train: --steps is ",
          request.settings.steps, ", must be 2 or more with --verify-resume; one is taken again");
  require(request.sample.bytes >= 0 && request.sample.bytes <= 1000000, "train: --sample is ",
          request.sample.bytes, ", must be 0 to 1000000");
  require(request.sample.temperature >= 0 && request.sample.temperature <= 100,
          "train: --temperature is ", request.sample.temperature, ", must be 0 to 100");
  request.device = bench::running_device(options.device);
  request.origin = {machine(request.device), now(), commit()};
  return run_session(request, resume, std::cout, train::this_terminal());
}

void declare_run(CLI::App& app, Options& options) {
  Request& request = options.request;
  app.add_option("PATH", request.paths, "text files and folders; none: this repository's own");
  app.add_option("-r,--recipe", options.recipes,
                 "number formats to train in, one after the other: " + recipe_names())
      ->capture_default_str();
  app.add_option("-o,--out", options.out, "folder for checkpoints, report.html and results.json")
      ->capture_default_str();
  app.add_option("--device", options.device, "where to train: cpu, cuda or cuda:1")
      ->capture_default_str();
  app.add_option("--resume", options.resume, "go on with the run of this folder or checkpoint");
  app.add_flag("--overwrite", request.overwrite, "throw an earlier run in --out away");
  app.add_option("--save-every", request.save_every, "steps between two checkpoints")
      ->capture_default_str();
  app.add_flag("--verify-resume", request.verify_resume,
               "take the last steps again from a checkpoint and compare every bit");
  app.add_option("--sample", request.sample.bytes,
                 "bytes of text that each model writes at the end")
      ->capture_default_str();
  app.add_option("--prompt", request.sample.prompt, "what that text goes on from");
  app.add_option("--temperature", request.sample.temperature, "of that text; 0: the likeliest")
      ->capture_default_str();
}

}  // namespace

Action declare_train(CLI::App& app) {
  auto options = std::make_shared<Options>();
  app.footer(kFooter);
  declare_run(app, *options);
  each_setting(options->request.settings,
               [&](const char* name, auto& value, train::Range, const char* summary) {
                 app.add_option(std::string("--") + name, value, summary)
                     ->capture_default_str()
                     ->group("Settings");
               });
  return [&app, options] {
    try {
      return start(app, *options);
    } catch (const Unsupported& e) {
      throw UsageError(e.what());  // 1 says that a resumed run differed
    }
  };
}

}  // namespace cadre::cli
