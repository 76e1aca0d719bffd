// Lets a long command end in good order when the user presses Ctrl-C or a service manager sends
// SIGTERM: the first signals are counted, the one after them kills as usual.
#pragma once

namespace deepinfer {

// Installs the handler: signals are counted until there have been `counted` of them; then the next
// one kills. Reading that waits when a signal comes is cut short. May be called again to raise the
// limit.
void CatchInterrupts(int counted = 1);
int Interruptions();
inline bool Interrupted() {
  return Interruptions() > 0;
}

}  // namespace deepinfer
