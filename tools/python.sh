#!/usr/bin/env bash
# Runs Python with packages: `tools/python.sh PACKAGE,... SCRIPT|-m MODULE [ARGUMENT...]`.
#
# Takes CADRE_PYTHON, else .venv, else the python3 on the path: the first that has the packages. Where
# none has them nothing runs: exit 77, which ctest counts as skipped; exit 1 if CADRE_REQUIRE=1.
set -u
top=$(cd "$(dirname "$0")/.." && pwd)
packages=$1
shift
# Looked for, not imported: torch takes seconds. Not from the source's folder, which has a `torch`.
has='import importlib.util as u, sys
specs = map(u.find_spec, sys.argv[1].split(","))
sys.exit(not all(spec and spec.origin for spec in specs))'
for python in ${CADRE_PYTHON:+"$CADRE_PYTHON"} "$top/.venv/bin/python3" python3; do
  (cd / && "$python" -c "$has" "$packages") 2>/dev/null && exec "$python" "$@"
done
echo "skipped: $* needs the Python packages $packages; \`make test\` installs them from PyPI"
[ "${CADRE_REQUIRE:-0}" = 1 ] && exit 1
exit 77
