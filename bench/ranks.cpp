#include "bench/ranks.h"

#include <omp.h>
#include <pthread.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <thread>

#include "bench/buffers.h"
#include "cadre/error.h"

namespace cadre::bench {

/// What one rank has to say, in memory of all.
struct RankNotes {
  char phase[64];
  char words[4096];  ///< what it returned or threw, or brings to an all-gather

  template <size_t kBytes>
  static void write(char (&to)[kBytes], std::string_view words) {
    const size_t length = std::min(words.size(), kBytes - 1);
    std::memcpy(to, words.data(), length);
    to[length] = '\0';
  }
};

class RankBoard final : public RankGroup {
 public:
  explicit RankBoard(int count) : ranks(count), notes(memory.array<RankNotes>(count)) {
    for (int r = 0; r < count; ++r) {
      RankNotes::write(notes[r].phase, "its start");
      RankNotes::write(notes[r].words, "");
    }
    pthread_barrierattr_t attributes;
    pthread_barrierattr_init(&attributes);
    pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(barrier, &attributes, unsigned(count));
  }

  std::vector<std::string> words() const {
    std::vector<std::string> all(static_cast<size_t>(ranks));
    for (int r = 0; r < ranks; ++r) all[size_t(r)] = notes[r].words;
    return all;
  }

  void enter(int rank, std::string_view phase) override {
    RankNotes::write(notes[rank].phase, phase);
  }
  void meet() override { pthread_barrier_wait(barrier); }
  std::vector<std::string> gather(int rank, const std::string& own) override {
    RankNotes::write(notes[rank].words, own);
    meet();
    std::vector<std::string> all = words();
    meet();
    return all;
  }

  int ranks;
  Buffers memory{Buffers::ForProcesses{}};
  pthread_barrier_t* barrier = memory.array<pthread_barrier_t>(1);
  RankNotes* notes;
};

namespace {

using Work = std::function<std::string(Rank&)>;

/// The processes of all ranks: a group of their own, so that all can be ended and no other.
class RankProcesses {
 public:
  explicit RankProcesses(RankBoard& board) : board_(board) {}

  /// What went wrong; empty if nothing.
  std::string run(const Work& work) {
    std::string error;
    for (int r = 0; r < board_.ranks && error.empty(); ++r) error = start(r, work);
    if (!error.empty()) end_all();
    for (size_t left = processes_.size(); left > 0; --left) {
      int status = 0;
      const pid_t process = wait_for_any(status);
      if (status == 0 || !error.empty()) continue;
      error = describe(process, status);
      end_all();
    }
    return error;
  }

 private:
  std::string start(int rank, const Work& work) {
    const pid_t parent = getpid(), process = fork();
    if (process < 0)
      return text("expert_parallel: rank ", rank, " cannot be started: ", std::strerror(errno));
    if (process == 0) be_rank(rank, parent, work);
    processes_.push_back(process);
    setpgid(process, group());
    return {};
  }

  [[noreturn]] void be_rank(int number, pid_t parent, const Work& work) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);  // it was gone before
    omp_set_num_threads(std::max(1, omp_get_max_threads() / board_.ranks));
    std::string words;
    int code = 0;
    try {
      Rank rank(board_, number);
      words = work(rank);
    } catch (const std::exception& error) {
      words = error.what();
      code = 1;
    }
    RankNotes::write(board_.notes[number].words, words);
    _exit(code);
  }

  pid_t group() const { return processes_.front(); }

  void end_all() const {
    for (const pid_t process : processes_) kill(process, SIGKILL);
  }

  pid_t wait_for_any(int& status) const {
    pid_t process = 0;
    do {
      process = waitpid(-group(), &status, 0);
    } while (process < 0 && errno == EINTR);
    return process;
  }

  std::string describe(pid_t process, int status) const {
    const auto rank = std::find(processes_.begin(), processes_.end(), process) - processes_.begin();
    const RankNotes& notes = board_.notes[rank];
    if (WIFSIGNALED(status))
      return text("expert_parallel: rank ", rank, " was killed by signal ", WTERMSIG(status),
                  " in ", notes.phase, "; the other ranks were ended");
    return text("expert_parallel: rank ", rank, " failed in ", notes.phase, ": ", notes.words);
  }

  RankBoard& board_;
  std::vector<pid_t> processes_;
};

}  // namespace

std::vector<std::string> run_ranks(int ranks, const std::function<std::string(Rank&)>& work) {
  RankBoard board(ranks);
  std::string error;
  // OpenMP would wait in a new process for threads that it has not. It has those of the thread that
  // it was called from, and this one has called nobody.
  std::thread([&] { error = RankProcesses(board).run(work); }).join();
  if (!error.empty()) throw DeviceError(error);
  return board.words();
}

}  // namespace cadre::bench
