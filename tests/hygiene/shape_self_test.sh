#!/usr/bin/env bash
# shape_self_test.sh SCRATCH: breaks each rule of shape.sh in a tree of its own; each must be noticed
# there, and none in the clean tree.
set -euo pipefail
check=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/shape.sh
tree=$1
failures=0

expect() {
  local status=0
  "$check" "$2" "$tree" >/dev/null || status=$?
  if [ "$status" -ne "$1" ]; then
    echo "rule $2: status $status instead of $1: $3"
    failures=$((failures + 1))
  fi
}

# write INDENT LINES HEAD...: a function with a head of these lines, LINES long with its braces.
write() {
  local margin=$1 lines=$2 i
  shift 2
  printf "$margin%s\n" "$@"
  for ((i = $# + 1; i < lines; ++i)); do echo "$margin  f();"; done
  echo "$margin}"
}

fresh() {
  rm -rf "$tree"
  mkdir -p "$tree/src"
  {
    echo 'namespace verkv {'
    echo 'constexpr int table[] = {'
    for _ in {1..90}; do echo '    1,'; done
    echo '};'
    write '' 80 'void plain() {'
    echo '// Long because it is a table.'
    write '' 120 'void excused() {'
    echo 'class Class {'
    echo ' public:'
    write '  ' 70 'int inside(int a,' '           int b) {'
    write '  ' 70 'int other() const {'
    echo '};'
    echo 'int of_number(int x) {'
    echo '  switch (x) {'
    echo '    case 1:'
    echo '      return 2;'
    echo '    default:'
    echo '      return 3;'
    echo '  }'
    echo '}'
    echo '}  // namespace verkv'
  } >"$tree/src/f.cpp"
  # This file is longer than a file may be without a reason.
  sed -i '1i // Long because the functions in it are.' "$tree/src/f.cpp"
}

# breaks RULE WHAT COMMAND...: the output of COMMAND is added.
breaks() {
  local rule=$1 what=$2
  shift 2
  fresh
  expect 0 "$rule" "the clean tree"
  "$@" >>"$tree/src/f.cpp"
  expect 1 "$rule" "$what"
}

switch_over() {
  printf '%s\n' 'int g(Type type) {' '  for (;;) {' '    switch (type) {' '      case Type::a: {' '        return 1;' \
    '      }' '      default:' '        return 2;' '    }' '  }' '}'
}

breaks functions "a long function" write '' 81 'void g() {'
breaks functions "a long head" write '' 81 'template <typename T>' 'void g(int a,' '       int b) {'
breaks functions "a long member" write '  ' 81 'int g() const {'
breaks enumerations "a default" switch_over
fresh
expect 0 files "a long file with its reason"
sed -i 1d "$tree/src/f.cpp"
for _ in {1..200}; do echo '// nothing' >>"$tree/src/f.cpp"; done
expect 1 files "a long file"

rm -rf "$tree"
[ "$failures" -eq 0 ]
