#!/usr/bin/env bash
# keep_ptxas.sh COMPILER OPTION... -o OBJECT...: compiles. What ptxas says of each kernel goes to
# OBJECT.ptxas, for spills.cmake; the rest is shown.
set -uo pipefail
object=
for ((i = 1; i < $#; ++i)); do
  [ "${!i}" != -o ] || { ((++i)); object=${!i}; }
done
"$@" 2>"$object.ptxas"
status=$?
grep -vE '^ptxas info |bytes stack frame' "$object.ptxas" >&2
exit $status
