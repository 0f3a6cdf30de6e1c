#!/usr/bin/env bash
# dialects_self_test.sh SCRATCH: breaks the rule of dialects.sh in a tree of its own; each breach must
# be noticed there, and none in the clean tree.
set -euo pipefail
check=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/dialects.sh
tree=$1
failures=0

fresh() {
  rm -rf "$tree"
  mkdir -p "$tree"/{include/verkv,src/cpu,cuda}
  printf '// Dialect: cuda/f.cuh: f_of\nfloat f(float x);\n' >"$tree/include/verkv/f.hpp"
  printf '// Dialect: src/cpu/g.cpp: g_of\nfloat g(float x);\n' >"$tree/src/g.hpp"
  printf '// Dialect of verkv/f.hpp: f.\nfloat f_of(float x);\n' >"$tree/cuda/f.cuh"
  printf '// Dialect of g.hpp: g, for vectors.\n// It says more.\ntemplate <int k>\nfloat g_of(float x);\n' \
    >"$tree/src/cpu/g.cpp"
}

expect() {
  local status=0
  "$check" "$tree" >/dev/null || status=$?
  if [ "$status" -ne "$1" ]; then
    echo "$2: status $status instead of $1"
    failures=$((failures + 1))
  fi
}

fresh
expect 0 'clean tree'
rm "$tree/cuda/f.cuh"
expect 1 'a file that is gone'
fresh
sed -i 's/f_of/other/' "$tree/cuda/f.cuh"
expect 1 'a function of another name'
fresh
sed -i '1d' "$tree/src/cpu/g.cpp"
expect 1 'a function that does not name its header'
fresh
sed -i '1d' "$tree/src/g.hpp"
expect 1 'a header that does not know its dialect'
fresh
sed -i '1a struct S {};' "$tree/cuda/f.cuh"
expect 1 'a mark above something else'
fresh
printf '// Dialect of verkv/f.hpp: f.\nfloat other(float x) {\n  return f_of(x);\n}\nfloat f_of(float x);\n' \
  >"$tree/cuda/f.cuh"
expect 1 'a mark above another function of the file'
fresh
printf '// Dialect of verkv/f.hpp: f.\nfloat more(float x);\n' >>"$tree/cuda/f.cuh"
expect 1 'a function that its header does not name, in a file that it names'
fresh
mv "$tree/src/g.hpp" "$tree/src/h.hpp"
expect 1 'a header that is gone'
fresh
echo '// A dialect of verkv/f.hpp.' >>"$tree/cuda/f.cuh"
expect 1 'a dialect that is named in passing'
fresh
sed -i '1d' "$tree"/{include/verkv/f.hpp,src/g.hpp,cuda/f.cuh,src/cpu/g.cpp}
expect 1 'no dialect at all'
rm -rf "$tree"
[ "$failures" -eq 0 ]
