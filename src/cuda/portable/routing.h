#pragma once
#include <string>

#include "cadre/routing.h"

namespace cadre::cuda::portable {

/// Both directions in one launch, with the bits of the CPU's `cpu`.
void routing(const RoutingPlan&, const RoutingArgs&, Workspace, Stream);
std::string refuses_routing(const RoutingProblem&, const Device&);

}  // namespace cadre::cuda::portable
