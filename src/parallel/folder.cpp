// An all-gather through files: round and rank are a file's name, and it appears when it is whole.
#include <filesystem>
#include <fstream>
#include <iterator>
#include <thread>

#include "cadre/error.h"
#include "cadre/expert_parallel.h"
#include "parallel/window.h"

namespace cadre {
namespace {

namespace fs = std::filesystem;
using std::chrono::steady_clock;

class Folder {
 public:
  Folder(std::string folder, int rank, int ranks, std::chrono::milliseconds limit)
      : folder_(std::move(folder)), rank_(rank), ranks_(ranks), limit_(limit) {
    require(ranks >= 1, "window: ranks are ", ranks, ", must be 1 or more");
    require(rank >= 0 && rank < ranks, "window: rank is ", rank, ", must be 0 to ", ranks - 1);
    require(!folder_.empty(), "window: the folder is '', must be a path");
    parallel::check_limit(limit);
  }

  std::vector<std::string> operator()(const std::string& own) {
    publish(own);
    std::vector<std::string> all;
    const auto since = steady_clock::now();
    for (int p = 0; p < ranks_; ++p) {
      while (!is_there(file(p))) {
        if (limit_.count() > 0 && steady_clock::now() - since >= limit_)
          throw DeviceError(text("window: rank ", p, " has not come to the folder '", folder_,
                                 "' within ", limit_.count(), " ms"));
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      std::ifstream in(file(p), std::ios::binary);
      all.emplace_back(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
    }
    ++round_;
    return all;
  }

 private:
  static bool is_there(const std::string& name) {
    std::error_code unknown;
    return fs::exists(name, unknown);
  }
  std::string file(int rank) const { return text(folder_, "/", round_, ".", rank); }

  void publish(const std::string& own) const {
    const std::string name = file(rank_), unfinished = name + ".unfinished";
    if (is_there(name))
      throw DeviceError(text("window: the folder '", folder_, "' holds ", round_, ".", rank_,
                             " of another group; take a new one"));
    std::ofstream out(unfinished, std::ios::binary);
    out << own;
    out.close();
    std::error_code error;
    if (out) fs::rename(unfinished, name, error);
    if (!out || error)
      throw DeviceError(text("window: cannot write to the folder '", folder_, "'"));
  }

  std::string folder_;
  int rank_, ranks_, round_ = 0;
  std::chrono::milliseconds limit_;
};

}  // namespace

AllGather all_gather_in(const std::string& folder, int rank, int ranks,
                        std::chrono::milliseconds limit) {
  return Folder(folder, rank, ranks, limit);
}

}  // namespace cadre
