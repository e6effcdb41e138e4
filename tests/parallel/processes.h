#pragma once
#include <sys/wait.h>
#include <unistd.h>

#include <exception>
#include <filesystem>
#include <string>
#include <vector>

namespace cadre::test {

/// How a process ended: what it threw, empty if nothing; or the signal that killed it.
struct Ended {
  std::string error{};
  int signal = 0;
};

/// Calls work(rank, folder) in a process for each rank. The folder is theirs, and empty. No thread
/// may have been started before.
template <class Work>
std::vector<Ended> in_processes(int ranks, Work&& work) {
  std::string folder = (std::filesystem::temp_directory_path() / "cadre-XXXXXX").string();
  if (mkdtemp(folder.data()) == nullptr) return {};
  std::vector<pid_t> processes;
  std::vector<int> errors;
  for (int rank = 0; rank < ranks; ++rank) {
    int ends[2];
    if (pipe(ends) != 0) return {};
    const pid_t process = fork();
    if (process == 0) {
      std::string error;
      try {
        work(rank, folder);
      } catch (const std::exception& thrown) {
        error = thrown.what();
      }
      _exit(write(ends[1], error.data(), error.size()) == ssize_t(error.size()) ? 0 : 1);
    }
    close(ends[1]);
    processes.push_back(process);
    errors.push_back(ends[0]);
  }
  std::vector<Ended> ended;
  for (int rank = 0; rank < ranks; ++rank) {
    Ended& end = ended.emplace_back();
    char some[512];
    for (ssize_t n = 0; (n = read(errors[size_t(rank)], some, sizeof some)) > 0;)
      end.error.append(some, size_t(n));
    close(errors[size_t(rank)]);
    int status = 0;
    waitpid(processes[size_t(rank)], &status, 0);
    if (WIFSIGNALED(status)) end.signal = WTERMSIG(status);
  }
  std::filesystem::remove_all(folder);
  return ended;
}

}  // namespace cadre::test
