#pragma once
#include "cadre/device.h"
#include "cadre/stream.h"
#include "cadre/workspace.h"

namespace cadre::backend {

/// In a build with CADRE_POISON, fills memory with 0xff (NaN in every float type, and -1), so that
/// whoever reads scratch before writing it is seen. Nothing in other builds.
void poison(const Device&, Workspace, Stream);

}  // namespace cadre::backend
