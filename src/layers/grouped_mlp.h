#pragma once
#include "cadre/grouped_mlp.h"

// What the rows that hold an expert MLP check before they launch anything.
namespace cadre::layers {

void check_forward(const GroupedMlpPlan&, const GroupedMlpArgs&, Workspace);
void check_backward(const GroupedMlpPlan&, const GroupedMlpArgs&, Workspace);
void check_wgrad(const GroupedMlpPlan&, const GroupedMlpArgs&, Workspace);

}  // namespace cadre::layers
