#!/usr/bin/env bash
# dialects.sh PATH: a formula that is written once more in another dialect (vector instructions, device
# code) is named by its header, and names its header. Fails and prints the places where the tree at PATH
# breaks that.
#   in the header:               // Dialect: <file>: <function>
#   right above that function:   // Dialect of <header as it is included>: <formula>
# Between the mark and the function there may be comments and a template's head only.
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

# Every mark of a file with the declaration under it: "<header> <declaration>", up to its first brace or
# semicolon.
marks() {
  awk '
    function close_marks(    i) {
      for (i = 1; i <= count; ++i) print header[i] " " text
      count = 0
      text = ""
    }
    /^[ \t]*\/\// {
      if (match($0, /\/\/ Dialect of [^: ]+:/)) header[++count] = substr($0, RSTART + 14, RLENGTH - 15)
      next
    }
    count == 0 { next }
    /^[ \t]*$/ { close_marks(); next }
    /^[ \t]*#/ { next }
    { text = text " " $0 }
    /[{;]/ { close_marks() }
    END { close_marks() }' "$1"
}

# is_marked FILE HEADER FUNCTION
is_marked() {
  marks "$1" | grep -F "$2 " | grep -qE "(^|[^A-Za-z0-9_])$3\("
}

# Headers name functions that exist and say so.
while IFS=: read -r header _ file function; do
  file=${file# } function=${function# }
  found=$((found + 1))
  included=${header#include/}
  included=${included#src/}
  if [ ! -f "$file" ]; then
    fail "$header: there is no file '$file'"
  elif ! grep -qw -- "$function" "$file"; then
    fail "$header: $file has no '$function'"
  elif ! is_marked "$file" "$included" "$function"; then
    fail "$file: right above '$function' there is no '// Dialect of $included:'"
  fi
done < <(grep -rE '^// Dialect: [^ ]+: [^ ]+$' --include=*.hpp include src)

# Dialects name a header that knows them.
while IFS= read -r file; do
  while read -r included declaration; do
    header=$(header_of "$included")
    if [ -z "$header" ]; then
      fail "$file: there is no header '$included'"
      continue
    fi
    known=0
    for function in $(sed -nE "s|^// Dialect: $file: ([A-Za-z0-9_]+)$|\1|p" "$header"); do
      grep -qE "(^|[^A-Za-z0-9_])$function\(" <<<"$declaration" && known=1
    done
    [ "$known" -eq 1 ] || fail "$header: does not name its dialect in $file: $declaration"
  done < <(marks "$file")
done < <(grep -rlE '// Dialect of ' --include=*.hpp --include=*.cpp --include=*.cu --include=*.cuh include src cuda)

# Lines that nearly say it would never be looked at.
while IFS= read -r line; do
  fail "$line: write '// Dialect: <file>: <function>' or '// Dialect of <header>: <formula>'"
done < <(grep -rniE 'dialect( of|:)' --include=*.hpp --include=*.cpp --include=*.cu --include=*.cuh include src cuda |
  grep -vE '[^ ]*:[0-9]+:// Dialect: [^ ]+: [^ ]+$|// Dialect of [^: ]+\.hpp: [^ ]')

[ "$found" -gt 0 ] || fail "no header names a dialect"
[ "$failures" -eq 0 ]
