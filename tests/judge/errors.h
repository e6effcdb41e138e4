#pragma once
#include <gtest/gtest.h>

#include <string>

#include "cadre/error.h"

namespace cadre::test {

/// What the InvalidArgument says that `work` throws; "nothing was thrown" if none is.
template <class Work>
std::string invalid(Work&& work) {
  try {
    work();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "nothing was thrown";
}

/// What the Unsupported says that `work` throws; "nothing was thrown" if none is.
template <class Work>
std::string unsupported(Work&& work) {
  try {
    work();
  } catch (const Unsupported& error) {
    return error.what();
  }
  return "nothing was thrown";
}

/// The names of a list's rows, as an error shows what is known.
template <class Rows>
std::string names(const Rows& rows) {
  std::string all;
  for (const auto& row : rows) all += text(all.empty() ? "" : ", ", row.name);
  return all;
}

}  // namespace cadre::test
