// Lets a long command end in good order when the user presses Ctrl-C: the first signal is noted,
// the second kills as usual.
#pragma once

namespace deepinfer {

// Installs the handler; also makes writing to a closed pipe an ordinary error. Once per process.
void CatchInterrupts();
bool Interrupted();

}  // namespace deepinfer
