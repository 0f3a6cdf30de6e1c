#!/usr/bin/env bash
# shape.sh RULE PATH: rules about the shape of the library's sources (include, src and cuda of the tree at
# PATH). They read code as clang-format leaves it. Fails and prints the places that break the rule.
#   files         no file over 500 lines, unless its first 10 lines say "Long because ..."
#   functions     no function over 80 lines, unless the comment above it says "Long because ..."
#   enumerations  a switch over an enumeration names every value: it has no default, so that the compiler
#                 tells where a new value is missing
set -uo pipefail
export LC_ALL=C
rule=$1
cd "$2" || exit 2

mapfile -t files < <(find include src cuda -name '*.h' -o -name '*.hpp' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' 2>/dev/null | sort)
[ ${#files[@]} -gt 0 ] || { echo "no source was found"; exit 2; }

case $rule in
  files)
    found=$(awk '
      function close_file() { if (file != "" && lines > 500 && !reason) print file ": " lines " lines" }
      FNR == 1 { close_file(); file = FILENAME; reason = 0 }
      FNR <= 10 && /Long because/ { reason = 1 }
      { lines = FNR }
      END { close_file() }' "${files[@]}")
    ;;
  functions)
    found=$(awk '
      function start_statement() { statement = ""; reason = comment_reason; comment_reason = 0; begin = FNR }
      FNR == 1 { inside = 0; statement = ""; comment_reason = 0 }
      inside {
        if (match($0, "^" margin "}")) {
          if (FNR - begin + 1 > 80 && !reason) print FILENAME ":" begin ": " FNR - begin + 1 " lines: " statement
          inside = 0
          statement = ""
        }
        next
      }
      /^[ \t]*$/ || /^#/ { statement = ""; comment_reason = 0; next }
      /^[ \t]*\/\// { if (/Long because/) comment_reason = 1; next }
      {
        if (statement == "") start_statement()
        line = $0
        sub(/[ \t]*\/\/.*$/, "", line)
        sub(/^[ \t]+/, "", line)
        statement = statement (statement == "" ? "" : " ") line
        if (line ~ /\{$/) {
          # Not a class, a namespace, a list of initial values.
          if (statement ~ /\(/ && statement !~ /^(namespace|struct|class|enum|union|extern "C" \{)/ && statement !~ /= \{$/) {
            inside = 1
            match($0, /^[ ]*/)
            # The margin is that of the first line, of which later ones may be indented.
            margin = first_margin(begin)
          } else {
            statement = ""
          }
        } else if (line ~ /[;}:]$/ || line ~ /^[{}]/) {
          statement = ""
        }
      }
      { if (statement != "" && begin == FNR) { match($0, /^[ ]*/); own = substr($0, 1, RLENGTH) } }
      function first_margin(at,    found) {
        if (at == FNR) { match($0, /^[ ]*/); return substr($0, 1, RLENGTH) }
        return own
      }' "${files[@]}")
    ;;
  enumerations)
    found=$(awk '
      FNR == 1 { depth = 0 }
      {
        match($0, /^[ ]*/)
        margin = RLENGTH
        while (depth > 0 && margin <= at[depth] && $0 !~ /^[ ]*$/) --depth
      }
      /^[ ]*(}? *else )?switch \(/ { at[++depth] = margin; scoped[depth] = 0 }
      depth > 0 && /^[ ]*case [A-Za-z_:]*::/ { scoped[depth] = 1 }
      depth > 0 && /^[ ]*default:/ && scoped[depth] { print FILENAME ":" FNR ": default in a switch over an enumeration" }' "${files[@]}")
    ;;
  *)
    echo "no rule '$rule'"
    exit 2
    ;;
esac
[ -z "$found" ] || { printf '%s:\n%s\n' "$rule" "$found"; exit 1; }
