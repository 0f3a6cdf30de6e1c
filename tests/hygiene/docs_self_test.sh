#!/usr/bin/env bash
# docs_self_test.sh SCRATCH: breaks every rule of docs.sh in a tree of its own; each must be noticed
# there, and none in the clean tree.
set -euo pipefail
check=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/docs.sh
tree=$1
failures=0

# breaks RULE TEXT: the rule accepts the clean tree and refuses it with TEXT in a page.
breaks() {
  rm -rf "$tree"
  mkdir -p "$tree"/{include,tests,docs/math}
  echo 'int shrinkage_beta(int w_sketched);' >"$tree/include/f.hpp"
  echo 'TEST_CASE("Tokens come and go")' >"$tree/tests/f_test.cpp"
  printf '%s\n' '# A page' '## Its heading: one' >"$tree/docs/other.md"
  printf '%s\n' 'See [it](docs/other.md#its-heading-one) and `shrinkage_beta(w_sketched, rho_i)` in `f.hpp`.' \
    '| `tests/f_test.cpp`: Tokens come |' \
    '```' 'not_checked [x](y)' '```' >"$tree/README.md"
  local status=0
  "$check" "$1" "$tree" || failures=$((failures + 1))
  printf '%s\n' "$2" >>"$tree/README.md"
  "$check" "$1" "$tree" >/dev/null || status=$?
  if [ "$status" -ne 1 ]; then
    echo "rule $1: status $status with: $2"
    failures=$((failures + 1))
  fi
}

breaks links '[gone](docs/gone.md)'
breaks links '[no such heading](docs/other.md#its-heading)'
breaks links 'a picture: ![x](docs/x.svg)'
breaks links 'the file `gone.cpp`'
breaks links 'the path `include/gone.hpp`'
breaks links '| `tests/f_test.cpp`: Tokens go; `tests/f_test.cpp`: Tokens come back |'
breaks names 'the function `shrinkage_gamma`'
breaks names 'the type `FetchOrder`'

rm -rf "$tree"
[ "$failures" -eq 0 ]
