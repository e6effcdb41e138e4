#include "apps/train/interrupt.h"

#include <signal.h>

#include <csignal>
#include <initializer_list>

namespace cadre::train {
namespace {

// A signal handler can reach nothing but globals.
volatile std::sig_atomic_t came = 0;

void note(int signal) { came = signal; }

void handle(int signal, void (*handler)(int), int flags) {
  struct sigaction action {};
  action.sa_handler = handler;
  action.sa_flags = flags;
  sigemptyset(&action.sa_mask);
  ::sigaction(signal, &action, nullptr);
}

/// As nohup has it.
bool is_ignored(int signal) {
  struct sigaction action {};
  ::sigaction(signal, nullptr, &action);
  return action.sa_handler == SIG_IGN;
}

}  // namespace

InterruptGuard::InterruptGuard() {
  came = 0;
  const int once = SA_RESTART | static_cast<int>(SA_RESETHAND);
  handle(SIGINT, note, once);
  handle(SIGTERM, note, once);
  if (!is_ignored(SIGHUP)) handle(SIGHUP, note, once);
  handle(SIGPIPE, note, SA_RESTART);  // more than once: what follows is printed to nobody as well
  handle(SIGXFSZ, SIG_IGN, 0);
}

InterruptGuard::~InterruptGuard() {
  for (const int signal : {SIGINT, SIGTERM, SIGPIPE, SIGXFSZ}) handle(signal, SIG_DFL, 0);
  if (!is_ignored(SIGHUP)) handle(SIGHUP, SIG_DFL, 0);
}

int InterruptGuard::signal() { return came; }

}  // namespace cadre::train
