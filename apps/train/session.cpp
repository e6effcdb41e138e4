#include "apps/train/session.h"

#include <algorithm>
#include <chrono>
#include <iostream>
#include <map>
#include <memory>
#include <numeric>

#include "apps/train/file.h"
#include "apps/train/interrupt.h"
#include "apps/train/number_text.h"
#include "apps/train/result.h"
#include "apps/train/trainer.h"
#include "apps/train/utf8.h"
#include "cadre/error.h"
#include "cadre/recipe.h"

namespace cadre::train {
namespace fs = std::filesystem;
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kMostResults = int64_t{1} << 26;  ///< bytes of a results.json

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Mean loss of the last steps, which jumps less than that of one batch.
double recent_loss(const std::vector<double>& loss) {
  const int64_t count = std::min<int64_t>(20, std::ssize(loss));
  return std::accumulate(loss.end() - count, loss.end(), 0.0) / static_cast<double>(count);
}

/// The implementations of every recipe, found before anything else is done.
std::map<std::string, std::string> plans_of(const Request& request) {
  std::map<std::string, std::string> plans;
  for (const std::string& recipe : request.recipes) {
    NetworkShape shape{request.settings, parse_recipe(recipe), request.settings.rows};
    plans[recipe] = implementations(plan_network(shape, request.device));
    shape.mode = Mode::kPredict;
    plan_network(shape, request.device);
    shape.rows = 1;
    if (request.sample.bytes > 0) plan_network(shape, request.device);
  }
  return plans;
}

/// One command: the recipes one after the other on the same text.
class Session {
 public:
  Session(const Request& request, bool resume, std::ostream& out, const Terminal& terminal)
      : request_(request),
        plans_(plans_of(request)),
        engine_(open_engine(request.device)),
        resume_(resume),
        out_(out),
        progress_(out, terminal),
        corpus_(read_corpus(request.paths.empty() ? default_paths() : request.paths,
                            request.settings.held_out, request.out)) {}

  int run();

 private:
  RunState start_of(const std::string& recipe) const;
  bool belongs(const RunState&) const;
  void guard_old_checkpoints() const;
  void guard_old_report() const;
  void take_steps(Trainer&);
  bool resumes_equal(const fs::path& snapshot, const RunState& want) const;
  std::optional<RunResult> look_back(const RunState&, int64_t first);
  std::optional<RunResult> train(const std::string& recipe);
  int stop(const RunState&) const;
  void write_results(const std::vector<RunResult>&) const;
  int64_t verify_step() const;
  void require_verifiable() const;
  fs::path snapshot_path(const std::string& recipe) const;
  fs::path results_path() const { return request_.out / "results.json"; }
  fs::path report_path() const { return request_.out / "report.html"; }

  const Request& request_;
  std::map<std::string, std::string> plans_;  ///< implementations of each recipe
  std::unique_ptr<Engine> engine_;
  bool resume_;
  std::ostream& out_;
  Progress progress_;
  Corpus corpus_;
  double seconds_ = 0;  ///< of the recipe in progress
  int code_ = 0;
};

bool Session::belongs(const RunState& state) const {
  return state.settings == request_.settings && state.fingerprint == corpus_.fingerprint;
}

/// Without --resume nothing is overwritten that somebody may still want.
void Session::guard_old_checkpoints() const {
  for (const std::string& recipe : request_.recipes) {
    const fs::path path = checkpoint_path(request_.out, recipe);
    if (!fs::exists(path)) continue;
    const RunState old = load_checkpoint(path);
    require(request_.overwrite, "train: ", path.string(), " holds ",
            old.finished() ? "a finished" : "an unfinished", " run, step ", old.step, " of ",
            old.settings.steps, "; add --resume ", path.string(),
            old.finished() ? " to report it again" : " to go on with it",
            ", --overwrite to start anew, or choose another folder with --out");
  }
}

/// What `cadre train` has not written is nobody's to throw away.
void require_own(const fs::path& path, bool (*is_own)(const std::string&)) {
  if (!fs::exists(path)) return;
  const std::vector<uint8_t> bytes = read_file(path, kMostResults);
  require(is_own({bytes.begin(), bytes.end()}), "train: ", path.string(),
          " is no file of cadre train, must be one to be replaced; move it away, or choose another "
          "folder with --out");
}

/// A report stays where it is unless it is of the run that goes on, or thrown away.
void Session::guard_old_report() const {
  const fs::path results = results_path();
  require_own(results, is_results);
  require_own(report_path(), is_report);
  const auto is_ours = [&] {
    if (!resume_ || !fs::exists(results)) return false;
    const std::vector<uint8_t> bytes = read_file(results, kMostResults);
    return is_result_of({bytes.begin(), bytes.end()}, request_.settings, request_.recipes);
  };
  for (const fs::path& path : {results, report_path()}) {
    require(request_.overwrite || !fs::exists(path) || is_ours(), "train: ", path.string(),
            " is of another run; add --overwrite to replace it, or choose another folder with "
            "--out");
  }
  if (!request_.overwrite || is_ours()) return;
  fs::remove(results);  // or whoever goes on with this run would find that of another
  fs::remove(report_path());
}

RunState Session::start_of(const std::string& recipe) const {
  const fs::path path = checkpoint_path(request_.out, recipe);
  if (resume_ && fs::exists(path)) {
    RunState state = load_checkpoint(path);
    if (belongs(state) && state.recipe == recipe) return state;
    require(request_.overwrite, "train: checkpoint ", path.string(),
            " belongs to a run with other ",
            state.settings == request_.settings ? "text" : "settings",
            "; bring back what it was started with, or start anew with --overwrite");
  }
  RunState state = initial_state(request_.settings, recipe);
  state.recipes = request_.recipes;
  state.paths = request_.paths;
  state.fingerprint = corpus_.fingerprint;
  return state;
}

int64_t Session::verify_step() const {
  const int64_t steps = request_.settings.steps;
  return steps - std::clamp<int64_t>(steps / 20, 1, 20);
}

/// Where every recipe is past the step from which it would be resumed, nothing would be compared.
void Session::require_verifiable() const {
  int64_t step = 0;
  for (const std::string& recipe : request_.recipes) {
    step = start_of(recipe).step;
    if (step < verify_step()) return;
  }
  throw InvalidArgument(text("train: run is at step ", step, ", must be before step ",
                             verify_step(), " for --verify-resume; leave it out"));
}

fs::path Session::snapshot_path(const std::string& recipe) const {
  return checkpoint_path(request_.out, recipe).string() + ".verify";
}

/// Steps until the end or a signal.
void Session::take_steps(Trainer& trainer) {
  const std::string recipe = trainer.state().recipe;
  const int64_t steps = request_.settings.steps, first = trainer.step();
  const Clock::time_point start = Clock::now();
  const fs::path path = checkpoint_path(request_.out, recipe);
  while (!trainer.done() && InterruptGuard::signal() == 0) {
    trainer.advance();
    const int64_t step = trainer.step();
    if (progress_.due(step, steps)) {
      const double loss = recent_loss(trainer.losses());  // waits for the steps that are timed
      const double seconds = seconds_since(start), done = static_cast<double>(step - first);
      progress_.show({recipe, step, steps, loss,
                      done * static_cast<double>(request_.settings.rows) / seconds,
                      seconds / done * static_cast<double>(steps - step)});
    }
    if (request_.verify_resume && step == verify_step()) {
      save_checkpoint(trainer.state(), snapshot_path(recipe));
    }
    if (step % request_.save_every != 0 || trainer.done()) continue;
    const RunState& state = trainer.state();
    try {
      save_checkpoint(state, path);
    } catch (const InvalidArgument& e) {
      progress_.clear();
      std::cerr << e.what() << "; training goes on\n";
    }
  }
  if (trainer.step() > first && trainer.done()) {
    save_checkpoint(trainer.state(), path);  // what the held-out text takes may not be waited for
  }
  if (trainer.done()) trainer.finish();
  seconds_ = seconds_since(start);
  progress_.clear();
}

/// Goes on from the snapshot in a new trainer and compares both ends. After a signal it says
/// nothing.
bool Session::resumes_equal(const fs::path& snapshot, const RunState& want) const {
  Trainer again(*engine_, corpus_, load_checkpoint(snapshot));
  while (!again.done() && InterruptGuard::signal() == 0) again.advance();
  if (again.done()) again.finish();
  fs::remove(snapshot);
  return checkpoint_content(again.state()) == checkpoint_content(want);
}

/// What is said of a finished recipe that began here at step `first`; nothing if a signal comes.
std::optional<RunResult> Session::look_back(const RunState& state, int64_t first) {
  const std::string& recipe = state.recipe;
  RunResult result;
  result.recipe = recipe;
  result.device = engine_->name();
  result.plans = plans_.at(recipe);
  result.settings = state.settings;
  result.history = state.history;
  result.seconds = seconds_;
  result.steps_here = state.step - first;
  for (const Parameter& p : state.parameters) result.model_parameters += elements(p);
  if (request_.sample.bytes > 0) result.sample = sample_text(*engine_, state, request_.sample);
  if (request_.verify_resume && first < verify_step()) {
    result.resumes_equal = resumes_equal(snapshot_path(recipe), state);
  }
  if (InterruptGuard::signal() != 0) return {};
  if (request_.verify_resume && !result.resumes_equal) {
    out_ << recipe << ": not resumed to compare, it was past step " << verify_step() << " already"
         << std::endl;
  }
  if (result.resumes_equal) {
    const bool equal = *result.resumes_equal;
    if (!equal) code_ = 1;
    out_ << recipe << (equal ? ": resumed" : ": DIFFERS when resumed") << " from step "
         << verify_step() << (equal ? ", equal bit for bit to the uninterrupted run" : "")
         << std::endl;
  }
  return result;
}

/// Trains one recipe to its end and saves it; nothing if a signal came first.
std::optional<RunResult> Session::train(const std::string& recipe) {
  Trainer trainer(*engine_, corpus_, start_of(recipe));
  const int64_t first = trainer.step();
  const bool was_finished = trainer.state().finished();
  if (resume_ && first > 0) {
    out_ << recipe << (was_finished ? " is finished already" : " goes on") << " at step " << first
         << " of " << request_.settings.steps << std::endl;
  }
  out_ << recipe << " runs on " << engine_->name() << ": " << plans_.at(recipe) << std::endl;
  take_steps(trainer);
  const RunState& state = trainer.state();
  std::optional<RunResult> result;
  if (state.finished()) {
    if (!was_finished) save_checkpoint(state, checkpoint_path(request_.out, recipe));
    result = look_back(state, first);
  }
  if (!result) code_ = stop(state);
  return result;
}

/// Saves what an interrupted recipe has learnt and says how to go on.
int Session::stop(const RunState& state) const {
  const fs::path path = checkpoint_path(request_.out, state.recipe);
  std::error_code none;
  fs::remove(snapshot_path(state.recipe), none);
  if (state.step > 0) save_checkpoint(state, path);
  out_ << "interrupted: " << state.recipe << " is at step " << state.step << " of "
       << state.settings.steps << (state.step > 0 ? text(", saved in ", path.string()) : "")
       << "\ngo on with: cadre train --resume " << request_.out.string()
       << (engine_->is_host() ? "" : text(" --device cuda:", request_.device.index)) << std::endl;
  return 128 + InterruptGuard::signal();
}

void Session::write_results(const std::vector<RunResult>& runs) const {
  const TextFacts facts = facts_of(corpus_);
  replace_file(results_path(), results_json(facts, runs, request_.origin));
  replace_file(report_path(), report_html(facts, runs, request_.sample.prompt, request_.origin));
  for (const RunResult& run : runs) {
    if (run.sample.empty()) continue;
    out_ << "\n-- " << run.recipe << " writes\n"
         << printable(request_.sample.prompt + run.sample.substr(0, 400)) << "\n";
  }
  out_ << "\n"
       << summary_table(facts, runs) << "\nreport: " << (request_.out / "report.html").string()
       << std::endl;
}

int Session::run() {
  const auto count = static_cast<int64_t>(request_.recipes.size());
  prepare_folder(request_.out, count * checkpoint_bytes(request_.settings));
  const FolderLock lock(request_.out);
  if (!resume_) guard_old_checkpoints();
  if (request_.verify_resume && resume_) require_verifiable();
  guard_old_report();
  out_ << "text: " << corpus_.documents.size() << " files, " << thousands(corpus_.train.count())
       << " bytes to learn from, " << thousands(corpus_.held.count())
       << " held out, bigram entropy " << fixed(bigram_entropy(corpus_), 3) << " bits/byte"
       << std::endl;
  std::vector<RunResult> results;
  for (const std::string& recipe : request_.recipes) {
    std::optional<RunResult> result = train(recipe);
    if (!result) return code_;
    results.push_back(std::move(*result));
  }
  write_results(results);
  return code_;
}

/// The checkpoint that was written last among those that cadre train has written.
fs::path latest_checkpoint(const fs::path& folder) {
  std::vector<std::pair<fs::file_time_type, fs::path>> found;
  std::error_code error;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) {
    if (at->path().extension() == ".safetensors") {
      found.emplace_back(fs::last_write_time(at->path()), at->path());
    }
  }
  require(!error, "train: folder ", folder.string(), " cannot be read: ", error.message());
  require(!found.empty(), "train: folder ", folder.string(),
          " holds no checkpoint; name the --out folder of an interrupted run");
  return std::max_element(found.begin(), found.end())->second;
}

}  // namespace

std::vector<std::string> split_recipes(std::string_view words) {
  std::vector<std::string> recipes;
  for (size_t at = 0; at <= words.size();) {
    const size_t end = std::min(words.find(',', at), words.size());
    const std::string part(words.substr(at, end - at));
    if ((part.find('=') != part.npos || part == "pinned") && !recipes.empty()) {
      recipes.back() += ',' + part;
    } else {
      recipes.push_back(part);
    }
    at = end + 1;
  }
  for (std::string& recipe : recipes) {
    recipe = to_string(parse_recipe(recipe));
    require(std::count(recipes.begin(), recipes.end(), recipe) == 1, "train: recipe ", recipe,
            " stands twice; name each once");
  }
  return recipes;
}

fs::path checkpoint_path(const fs::path& out, const std::string& recipe) {
  std::string name = recipe;
  for (char& c : name) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_' || c == '-';
    if (!plain) c = '-';
  }
  return out / (name + ".safetensors");
}

Request resumed_request(const fs::path& path) {
  require(fs::exists(path), "train: ", path.string(),
          " does not exist; name the --out folder of an interrupted run, or a checkpoint");
  const fs::path file = fs::is_directory(path) ? latest_checkpoint(path) : path;
  const RunState state = load_checkpoint(file);
  const fs::path name = checkpoint_path("", state.recipe);
  const bool has_own_name = file.filename() == name || (file != path && fs::exists(path / name));
  require(has_own_name, "train: checkpoint ", file.string(), " is of recipe ", state.recipe,
          ", must be called ", name.string(), "; rename it");
  Request request;
  request.recipes.clear();
  request.settings = state.settings;
  for (const std::string& recipe : state.recipes) {
    request.recipes.push_back(to_string(parse_recipe(recipe)));
  }
  request.paths = state.paths;
  request.out = file.has_parent_path() ? file.parent_path() : ".";
  return request;
}

int run_session(const Request& request, bool resume, std::ostream& out, const Terminal& terminal) {
  const InterruptGuard guard;
  return Session(request, resume, out, terminal).run();
}

}  // namespace cadre::train
