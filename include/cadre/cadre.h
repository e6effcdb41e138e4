#pragma once

// Everything at once.
#include "cadre/device.h"
#include "cadre/dtype.h"
#include "cadre/error.h"
#include "cadre/expert_parallel.h"
#include "cadre/format.h"
#include "cadre/grouped_linear.h"
#include "cadre/grouped_mlp.h"
#include "cadre/host_device.h"
#include "cadre/layer.h"
#include "cadre/layers.h"
#include "cadre/moe.h"
#include "cadre/operations.h"  // and every operation
#include "cadre/plan.h"
#include "cadre/pointers.h"
#include "cadre/recipe.h"
#include "cadre/sequential.h"
#include "cadre/stream.h"
#include "cadre/tensor.h"
#include "cadre/type_list.h"
#include "cadre/wgrad_queue.h"
#include "cadre/workspace.h"
