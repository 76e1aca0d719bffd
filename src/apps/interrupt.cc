#include "apps/interrupt.h"

#include <signal.h>

namespace deepinfer {
namespace {

volatile sig_atomic_t g_interruptions = 0;
volatile sig_atomic_t g_counted = 1;

void OnInterrupt(int) {
  g_interruptions = g_interruptions + 1;
  if (g_interruptions < g_counted) return;
  ::signal(SIGINT, SIG_DFL);
  ::signal(SIGTERM, SIG_DFL);
}

}  // namespace

void CatchInterrupts(int counted) {
  g_counted = counted;
  struct ::sigaction action = {};
  action.sa_handler = OnInterrupt;
  ::sigemptyset(&action.sa_mask);
  ::sigaddset(&action.sa_mask, SIGINT);
  ::sigaddset(&action.sa_mask, SIGTERM);
  ::sigaction(SIGINT, &action, nullptr);
  ::sigaction(SIGTERM, &action, nullptr);
}

int Interruptions() {
  return g_interruptions;
}

}  // namespace deepinfer
