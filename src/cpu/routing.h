#pragma once
#include "cadre/routing.h"

namespace cadre::cpu {

/// Both directions, token by token in parallel, in fp32.
void routing(const RoutingPlan&, const RoutingArgs&, Workspace, Stream);
int64_t routing_workspace_bytes(const RoutingProblem&, const Device&);

}  // namespace cadre::cpu
