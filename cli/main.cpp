// The command line: a table of verbs. Errors go to stderr in one line that says what to do.
#include <CLI/CLI.hpp>
#include <array>
#include <cstdio>
#include <iostream>
#include <new>

#include "apps/train/utf8.h"
#include "apps/train/waiting.h"
#include "cadre/error.h"
#include "cli/numbers.h"
#include "cli/verb.h"

namespace cadre::cli {
namespace {

constexpr std::array kVerbs = {
    Verb{"info", "formats, activations, recipes, operations and devices of this build",
         declare_info},
    Verb{"explain", "which implementation takes a problem, and why others refuse it",
         declare_explain},
    Verb{"check", "run implementations against the reference on random data", declare_check},
    Verb{"bench", "check, then time beside peers: a dense oneDNN product, a copy", declare_bench},
    Verb{"facts", "measure a GPU: bandwidths, dense products, launches", declare_facts},
    Verb{"train", "train a Mixture-of-Experts language model on text files, in any recipe",
         declare_train},
};

constexpr const char* kExamples = R"(
A problem is what to compute, as text: an operation, then name=value. What is left out has its
default. The same text stands in errors, shape files and benchmark records.

Try
  cadre info
  cadre explain grouped_gemm fprop R=8192 N=2048 K=4096 E=64 format=mxfp8
  cadre explain grouped_gemm wgrad R=8192 N=2048 K=4096 E=64 format=nvfp4 --device sm_90
  cadre check activation backward swiglu R=512 F=96 E=8 prob=yes
  cadre bench grouped_gemm fprop R=4096 N=1024 K=512 E=16 --offsets uniform,zipf:1.2
  cadre train --recipe bf16,mxfp8
`cadre VERB --help` says more. Exit codes: 0 good, 1 a check failed or no implementation takes
the problem, 2 the request was wrong.)";

int fail(const std::string& reason, int code = 2) {
  std::string what =
      train::printable(reason);  // a file that is no text must not reach the terminal
  while (!what.empty() && what.back() == '\n') what.pop_back();
  for (size_t at = what.find('\n'); at != what.npos; at = what.find('\n', at))
    what.replace(at, what.find_first_not_of(" \n", at) - at,
                 at > 0 && what[at - 1] == ':' ? " " : " | ");
  std::cerr << "cadre: " << what << "\n";
  return code;
}

// CLI11 does not say which words it would have taken.
void require_known_verb(int argc, char** argv) {
  if (argc < 2 || argv[1][0] == '-') return;
  std::string known;
  for (const Verb& verb : kVerbs) {
    if (verb.name == argv[1]) return;
    known += text(known.empty() ? "" : ", ", verb.name);
  }
  throw UsageError(text("verb is '", argv[1], "', must be one of ", known));
}

std::string chosen_verb(const CLI::App& app) {
  const auto chosen = app.get_subcommands();
  return chosen.empty() ? "" : " " + chosen[0]->get_name();
}

// CLI11 takes an empty number for 0; an empty name would be taken for one that is left out.
void refuse_empty_values(const CLI::App& verb) {
  for (const CLI::Option* option : verb.get_options()) {
    if (option->get_positional() || option->get_name() == "--prompt") continue;
    for (const std::string& word : option->results())
      if (word.empty())
        throw UsageError(text(option->get_name(), " is '', must not be empty; run 'cadre ",
                              verb.get_name(), " --help'"));
  }
}

int run(int argc, char** argv) {
  CLI::App app("Expert layers of Mixture-of-Experts models: plan, check and time them.", "cadre");
  app.footer(kExamples);
  app.set_version_flag("--version", version());
  app.require_subcommand(0, 1);
  std::vector<std::pair<CLI::App*, Action>> actions;
  for (const Verb& verb : kVerbs) {
    CLI::App* sub = app.add_subcommand(std::string(verb.name), std::string(verb.summary));
    actions.emplace_back(sub, verb.declare(*sub));
    take_decimals(*sub);
  }
  require_known_verb(argc, argv);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == 0) return app.exit(e);  // --help, --version
    return fail(text(e.what(), "; run 'cadre", chosen_verb(app), " --help'"));
  }
  for (const auto& [sub, action] : actions)
    if (sub->parsed()) {
      refuse_empty_values(*sub);
      return action();
    }
  std::cout << app.help();
  return 0;
}

// What was printed is only known to be out when it is flushed.
int flushed(int code) {
  std::cout.flush();
  const bool good = std::fflush(stdout) == 0 && std::ferror(stdout) == 0 && std::cout.good();
  if (good || code != 0) return code;
  return fail("standard output could not be written; is the disk full?");
}

}  // namespace

std::string version() { return "cadre " CADRE_VERSION; }

}  // namespace cadre::cli

int main(int argc, char** argv) {
  try {
    if (argc > 1 && std::string_view(argv[1]) == "train") cadre::train::sleep_while_waiting(argv);
    return cadre::cli::flushed(cadre::cli::run(argc, argv));
  } catch (const std::bad_alloc&) {
    return cadre::cli::fail("out of memory; make the problem or the model smaller");
  } catch (const std::length_error&) {
    return cadre::cli::fail("out of memory; make the problem or the model smaller");
  } catch (const cadre::Unsupported& e) {
    return cadre::cli::fail(e.what(), 1);
  } catch (const std::exception& e) {
    return cadre::cli::fail(e.what());
  }
}
