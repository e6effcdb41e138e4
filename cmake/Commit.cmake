# cmake -DSOURCE=... -DTEMPLATE=... -DOUT=... [-DNAME=value...] -P Commit.cmake: writes OUT from the
# template with the commit of SOURCE as @COMMIT@, and leaves it alone where it says so already.
execute_process(COMMAND git -C ${SOURCE} describe --always --dirty --abbrev=12 --exclude=*
  OUTPUT_VARIABLE COMMIT OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
if(NOT COMMIT)
  set(COMMIT unknown)
endif()
configure_file(${TEMPLATE} ${OUT} @ONLY)
