#pragma once
#include <string>

#include "cadre/routing.h"

namespace cadre::cuda::portable {

/// Both directions in one launch, with the bits of the CPU's `cpu`; with map one launch for few
/// tokens, two for many.
void routing(const RoutingPlan&, const RoutingArgs&, Workspace, Stream);
int64_t routing_workspace_bytes(const RoutingProblem&, const Device&);
std::string refuses_routing(const RoutingProblem&, const Device&);

}  // namespace cadre::cuda::portable
