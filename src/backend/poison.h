#pragma once
#include "cadre/device.h"
#include "cadre/stream.h"
#include "cadre/workspace.h"

namespace cadre {
namespace backend {

/// In a build with CADRE_POISON, fills memory with 0xff (NaN in every float type, and -1), so that
/// whoever reads scratch before writing it is seen. Nothing in other builds.
///
/// Stream    On a GPU a fill in the stream's order, which a CUDA graph may capture.
void poison(const Device&, Workspace, Stream);

}  // namespace backend

namespace cuda {

/// The same on a GPU, in every build; memory of one byte or more.
void poison(Workspace, Stream);

}  // namespace cuda
}  // namespace cadre
