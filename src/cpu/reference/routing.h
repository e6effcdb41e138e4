#pragma once
#include "cadre/routing.h"

namespace cadre::cpu::reference {

/// Both directions by their formulas, in double.
void routing(const RoutingPlan&, const RoutingArgs&, Workspace, Stream);
int64_t routing_workspace_bytes(const RoutingProblem&, const Device&);

}  // namespace cadre::cpu::reference
