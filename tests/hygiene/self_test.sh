#!/usr/bin/env bash
# self_test.sh SCRATCH: breaks every rule of check.sh in a tree of its own; each must be noticed there,
# and none in the clean tree.
set -euo pipefail
check=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/check.sh
tree=$1
failures=0

fresh() {
  rm -rf "$tree"
  mkdir -p "$tree"/{include/verkv,src,docs}
  echo 'int f();' >"$tree/include/verkv/f.hpp"
  echo 'int f() { return 1; }' >"$tree/src/f.cpp"
}

# expect STATUS RULE [PATH]
expect() {
  local status=0
  "$check" "$2" "${3:-$tree}" >/dev/null || status=$?
  if [ "$status" -ne "$1" ]; then
    echo "rule $2: status $status instead of $1 ($(head -c 120 "$tree/broken" 2>/dev/null || true))"
    failures=$((failures + 1))
  fi
}

# breaks RULE FILE TEXT
breaks() {
  fresh
  expect 0 "$1"
  printf '%s\n' "$3" >>"$tree/$2"
  expect 1 "$1"
}

breaks fast_math CMakeLists.txt 'target_compile_options(x PRIVATE -ffast-math)'
breaks fast_math CMakeLists.txt 'target_compile_options(x PRIVATE -Ofast)'
breaks fast_math cmake 'string(APPEND flags --use_fast_math)'
breaks cuda_includes include/verkv/f.hpp '#include <cuda_runtime.h>'
breaks cuda_includes include/verkv/f.hpp '#include <cub/cub.cuh>'
breaks ascii src/f.cpp $'// \xce\xb5'
breaks ascii docs/f.md $'\xe2\x80\x94'
breaks terminal src/f.cpp 'void g() { std::cout << 1; }'
breaks terminal src/f.cpp 'void g() { printf("x"); }'
breaks terminal include/verkv/f.hpp 'inline void g() { std::abort(); }'
# Spliced, so that this file breaks no rule.
breaks machine src/f.cpp '// As in /wo''rk/main/src.'
breaks machine docs/f.json '{"file": "/tmp/''w/lab/f.safetensors"}'
breaks machine docs/f.md 'In `/ro''ot/.cache` it is.'
breaks machine CMakeLists.txt 'set(home /ho''me/user/f)'
breaks machine cmake 'curl https://pyp''i.org/simple/f'
breaks machine docs/f.md 'from http://deb.debi''an.org/debian'
breaks top_level notes.txt 'anything'

# A compiled program that prints, and one that does not, stand in for the library.
fresh
echo 'int f(); int f() { return 1; }' | "${CXX:-c++}" -x c++ -c - -o "$tree/quiet.o"
echo 'extern "C" int puts(const char*); int f(); int f() { return puts("x"); }' | "${CXX:-c++}" -x c++ -c - -o "$tree/loud.o"
expect 0 symbols "$tree/quiet.o"
expect 1 symbols "$tree/loud.o"
echo 'namespace app { int f(); int f() { return 1; } }' | "${CXX:-c++}" -shared -fPIC -x c++ - -o "$tree/quiet.so"
echo 'namespace fmt { int f(); int f() { return 1; } }' | "${CXX:-c++}" -shared -fPIC -x c++ - -o "$tree/loud.so"
expect 0 exports "$tree/quiet.so"
expect 1 exports "$tree/loud.so"

rm -rf "$tree"
[ "$failures" -eq 0 ]
