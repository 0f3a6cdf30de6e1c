#!/usr/bin/env bash
# check.sh FILE COMPILER OPTION...: with VERKV_MISUSE defined FILE must not compile, and the compiler must
# say what FILE expects in its comment "// Expected: " (a regular expression).
set -uo pipefail
file=$1
shift
expected=$(sed -n 's|^// Expected: ||p' "$file")
[ -n "$expected" ] || { echo "$file: no '// Expected: '"; exit 1; }
if text=$("$@" -DVERKV_MISUSE -fsyntax-only "$file" 2>&1); then
  echo "$file: the misuse compiles"
  exit 1
fi
if ! grep -qE -- "error: .*($expected)" <<<"$text"; then
  printf '%s: the compiler does not say "%s", but:\n%s\n' "$file" "$expected" "$text"
  exit 1
fi
