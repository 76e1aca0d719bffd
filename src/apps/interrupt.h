// Lets a long command end in good order when the user presses Ctrl-C: the first signal is noted,
// the second kills as usual.
#pragma once

namespace deepinfer {

// Installs the handler. Reading that waits when the signal comes fails with EINTR. Once per
// process.
void CatchInterrupts();
bool Interrupted();

}  // namespace deepinfer
