#!/usr/bin/env bash
# dialects.sh PATH: a formula that is written once more in another dialect (vector instructions, device
# code) is named by its header, and names its header. Fails and prints the places where the tree at PATH
# breaks that.
#   in the header:    // Dialect: <file>: <function>
#   at the function:  // Dialect of <header as it is included>: <formula>
set -uo pipefail
export LC_ALL=C
cd "$1" || exit 2
failures=0
found=0

fail() {
  echo "$*"
  failures=$((failures + 1))
}

# The header `name` of an include directive.
header_of() {
  local root
  for root in include src; do
    [ -f "$root/$1" ] && { echo "$root/$1"; return; }
  done
}

# Headers name what exists.
while IFS=: read -r header _ file function; do
  file=${file# } function=${function# }
  found=$((found + 1))
  included=${header#include/}
  included=${included#src/}
  if [ ! -f "$file" ]; then
    fail "$header: there is no file '$file'"
  elif ! grep -qw -- "$function" "$file"; then
    fail "$header: $file has no '$function'"
  elif ! grep -qF "// Dialect of $included:" "$file"; then
    fail "$file: '$function' does not say '// Dialect of $included:'"
  fi
done < <(grep -rE '^// Dialect: [^ ]+: [^ ]+$' --include=*.hpp include src)

# Dialects name a header that knows them.
while IFS= read -r line; do
  file=${line%%:*}
  included=$(sed -E 's|^.*// Dialect of ([^: ]+):.*$|\1|' <<<"$line")
  header=$(header_of "$included")
  if [ -z "$header" ]; then
    fail "$file: there is no header '$included'"
  elif ! grep -q "^// Dialect: $file: " "$header"; then
    fail "$header: does not name its dialect in $file"
  fi
done < <(grep -rE '// Dialect of ' --include=*.hpp --include=*.cpp --include=*.cu --include=*.cuh include src cuda)

# Lines that nearly say it would never be looked at.
while IFS= read -r line; do
  fail "$line: write '// Dialect: <file>: <function>' or '// Dialect of <header>: <formula>'"
done < <(grep -rniE 'dialect( of|:)' --include=*.hpp --include=*.cpp --include=*.cu --include=*.cuh include src cuda |
  grep -vE '[^ ]*:[0-9]+:// Dialect: [^ ]+: [^ ]+$|// Dialect of [^: ]+\.hpp: [^ ]')

[ "$found" -gt 0 ] || fail "no header names a dialect"
[ "$failures" -eq 0 ]
