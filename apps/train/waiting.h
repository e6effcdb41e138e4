#pragma once

namespace cadre::train {

/// Lets threads of OpenMP that wait sleep, unless the user has said what they do: those that spin
/// take busy cores from each other, and training waits often. The runtime reads the word when it is
/// loaded, so the program starts once more, with the same arguments.
void sleep_while_waiting(char** arguments);

}  // namespace cadre::train
