#pragma once
#include <string>

#include "door.h"
#include "parameters.h"

namespace cadre::door {

/// The schema of a backward as an overload that writes into what forward saved.
inline std::string overwriting_saved(std::string schema) {
  schema.insert(schema.find('('), ".overwrite_saved");
  schema.replace(schema.find("Tensor saved"), 6, "Tensor(a!)");
  return schema;
}

/// A layer of experts with the parameters of both its linears, and the stream to run on.
template <class Problem, class Args>
class ExpertLaunch {
 public:
  ExpertLaunch(const Problem& of, const Tensor& x)
      : x_(x), current_(x), problem(of), fc1(of.parameters, tables), fc2(of.parameters, tables) {
    args.x = view(x, "x");
  }

  template <class Direction>
  void run(Direction direction, int64_t LayerMemory::*workspace_bytes) {
    tables.write(x_, current_);
    args.fc1 = fc1.parameters;
    args.fc2 = fc2.parameters;
    const auto& plan = cached_plan(problem, device(x_));
    const Scratch scratch(plan.memory.*workspace_bytes, x_);
    direction(plan, args, scratch.workspace(), current_.stream());
  }

 private:
  const Tensor& x_;
  const CurrentStream current_;

 protected:
  const Problem& problem;
  PointerTables tables;

 public:
  LinearBindings fc1, fc2;
  Args args;
};

}  // namespace cadre::door
