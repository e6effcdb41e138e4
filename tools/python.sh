#!/usr/bin/env bash
# Runs a Python script that needs packages: `tools/python.sh PACKAGE,... SCRIPT [ARGUMENT...]`.
#
# Takes .venv where it has the packages, else the python3 on the path. Where neither has them the
# script does not run: exit 77, which ctest counts as skipped; exit 1 if CADRE_REQUIRE=1.
set -u
top=$(cd "$(dirname "$0")/.." && pwd)
packages=$1
shift
for python in "$top/.venv/bin/python3" python3; do
  "$python" -c "import $packages" 2>/dev/null && exec "$python" "$@"
done
echo "skipped: $1 needs the Python packages $packages; \`make test\` installs them from PyPI"
[ "${CADRE_REQUIRE:-0}" = 1 ] && exit 1
exit 77
