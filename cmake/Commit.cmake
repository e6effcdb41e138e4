# cmake -DSOURCE=... -DOUT=... -P Commit.cmake: writes a C++ file that names the commit of SOURCE,
# and leaves it alone where it says so already.
execute_process(COMMAND git -C ${SOURCE} describe --always --dirty --abbrev=12 --exclude=*
  OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
if(NOT commit)
  set(commit unknown)
endif()
file(CONFIGURE OUTPUT ${OUT} CONTENT [[
#include "cli/record.h"

namespace cadre::cli {

std::string commit() { return "@commit@"; }

}  // namespace cadre::cli
]] @ONLY)
