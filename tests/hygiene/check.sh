#!/usr/bin/env bash
# check.sh RULE PATH: fails and prints the offending places when the tree (or library) at PATH breaks
# the rule.
set -uo pipefail
# Bytes, not characters: a file in a foreign encoding must not pass as binary.
export LC_ALL=C
rule=$1
path=$2
code=(include src cuda tests bench examples cmake CMakeLists.txt CMakePresets.json .ci)

# Searches the named parts of the tree, those that exist, and fails on a match.
forbid() {
  local reason=$1 pattern=$2
  shift 2
  local places=() place
  for place in "$@"; do
    [ -e "$path/$place" ] && places+=("$place")
  done
  [ ${#places[@]} -gt 0 ] || { echo "nothing to search in $path"; exit 2; }
  local found
  found=$(cd "$path" && grep -rnIP --exclude-dir=hygiene --exclude-dir=build -- "$pattern" "${places[@]}")
  case $? in
    0) printf '%s:\n%s\n' "$reason" "$found"; exit 1 ;;
    1) exit 0 ;;
    *) echo "grep failed"; exit 2 ;;
  esac
}

case $rule in
  fast_math)
    # A certificate is a statement about IEEE arithmetic.
    forbid "flags that change floating-point results" \
      '-Ofast|-?-f?fast-math|use_fast_math|-funsafe-math|-fassociative-math|-ffinite-math|-freciprocal-math|-fno-signed-zeros|pragma.*(fast_?math|optimize)' \
      "${code[@]}"
    ;;
  cuda_includes)
    forbid "CUDA headers in public headers" '#\s*include\s*[<"](cuda|cub/|thrust/|cooperative_groups|device_)' include
    ;;
  ascii)
    forbid "bytes that are not ASCII" '[^\x00-\x7F]' "${code[@]}" docs README.md CHANGELOG.md CITATION.cff .clang-format .clang-tidy
    ;;
  terminal)
    # A library neither prints nor ends the process: its caller decides about both.
    forbid "printing or ending the process in a library" \
      '\bstd::(cout|cerr|clog|abort|exit|_Exit|quick_exit|terminate|print)\b|\bf?printf\s*\(|\b(abort|exit|puts)\s*\(|\bfmt::print|#\s*include\s*<iostream>' \
      include src cuda
    ;;
  machine)
    # What is written down must be true elsewhere, too.
    forbid "paths of a machine, or the host of a package registry" \
      '(?<![\w.~])/(work|root|home|Users|mnt|tmp/w)/|\b(pypi|pythonhosted|npmjs|deb\.debian|archive\.ubuntu|crates|golang|anaconda|rubygems)\.(org|com|io)\b' \
      "${code[@]}" docs README.md CHANGELOG.md CITATION.cff LICENSE .clang-format .clang-tidy .gitignore .gitattributes
    ;;
  top_level)
    allowed=' CMakeLists.txt include src cuda tests bench examples docs cmake LICENSE README.md CMakePresets.json CHANGELOG.md CITATION.cff build '
    # In a checkout, what git ignores does not count.
    if ! entries=$(git -C "$path" ls-files -co --exclude-standard 2>/dev/null) || [ -z "$entries" ]; then
      entries=$(ls -A "$path")
    fi
    bad=$(cut -d/ -f1 <<<"$entries" | sort -u | while read -r entry; do
      case $entry in .*) continue ;; esac
      case $allowed in *" $entry "*) ;; *) echo "$entry" ;; esac
    done)
    [ -z "$bad" ] || { printf 'not part of the layout of the top level:\n%s\n' "$bad"; exit 1; }
    ;;
  symbols)
    symbols=$(nm -C "$path") || exit 2
    [ -n "$symbols" ] || { echo "no symbols in $path"; exit 2; }
    if found=$(grep -E ' (U|T|W) (abort|exit|printf|puts|putchar|std::(cout|cerr|clog))(@.*)?$' <<<"$symbols"); then
      printf 'the library prints or ends the process:\n%s\n' "$found"
      exit 1
    fi
    ;;
  exports)
    # The names of private dependencies would clash with another copy of them in the same program.
    symbols=$(nm -DC --defined-only "$path") || exit 2
    [ -n "$symbols" ] || { echo "no symbols in $path"; exit 2; }
    if found=$(grep -E '^[0-9a-f]* [A-Za-z] (typeinfo (name )?for |vtable for )?(fmt|nlohmann|hwy)::' <<<"$symbols"); then
      printf 'exported, but private:\n%s\n' "$found"
      exit 1
    fi
    ;;
  *)
    echo "unknown rule $rule"
    exit 2
    ;;
esac
