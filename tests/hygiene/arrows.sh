#!/usr/bin/env bash
# arrows.sh PATH: which room of the tree at PATH may include which, by the table below, and no circle of
# files. Fails and prints every arrow that the table does not allow. "Rooms" in docs/architecture.md says
# the same in prose.
set -uo pipefail
export LC_ALL=C
cd "$1" || exit 2

# room | its files | the rooms it may include, besides itself | the libraries, besides the standard one
# A file belongs to the first room that names it. "A < B < C" lists rooms of one file each, of which a
# later one may include an earlier one.
table='
words     | include/verkv/{config,types,view,error,philox}.hpp       |                         |
stages    | include/verkv/{inclusion < sample < sketch < shrinkage < certificate < fetch_plan < attention < sketch_error < clusters < importance}.hpp | words |
settings  | include/verkv/settings.hpp                               | words                   |
reports   | include/verkv/reports.hpp                                | words                   |
manager   | include/verkv/{kv_cache_manager,cuda_cache,metrics,row_attention}.hpp  | words settings reports  |
recorded  | include/verkv/recorded_cache.hpp                         | words                   |
border    | include/verkv/verkv.h                                    | words                   | stdbool.h stddef.h stdint.h
umbrella  | include/verkv/verkv.hpp                                  | words stages settings reports manager recorded |
front     | src/kv_cache_manager.* src/metrics.* src/cpu/cpu_backend.cpp src/cpu/row_attention.cpp | words stages settings reports manager src cpu  | fmt
face      | src/c_face*                                              | words settings reports manager border src | fmt
recording | src/recorded_cache.* src/safetensors_header.*            | words recorded src      | fmt nlohmann
ggml      | src/ggml/*                                               | words stages settings reports manager | fmt ggml
toy       | tests/ggml/*                                             | framework               | ggml
cpu       | src/cpu/*                                                | words stages settings reports src | fmt hwy
src       | src/*                                                    | words stages settings reports | fmt Eigen fcntl.h sys unistd.h
kernels   | cuda/*.cu cuda/*.cuh                                     | words stages src host   | cuda cub
factory   | cuda/cuda_cache.* cuda/cuda_backend.*                    | words stages settings reports manager src kernels host | cuda fmt
host      | cuda/*                                                   | words stages settings reports src | cuda fmt
common    | examples/common/*                                        | words stages settings reports manager recorded umbrella | fmt nlohmann unistd.h sys
replay    | examples/replay/*                                        | words stages settings reports manager recorded umbrella common | fmt nlohmann CLI unistd.h
c_decode  | examples/c_decode.c                                      | border                  | stdio.h stdlib.h
decode    | examples/decode_loop/*                                   | words stages settings reports manager umbrella | fmt
serving   | examples/serving_loop/*                                  | words stages settings reports manager umbrella | fmt
llama     | examples/llama_cpp/*                                     | words stages settings reports manager recorded umbrella common | fmt nlohmann CLI ggml llama Eigen unistd.h sys
quality   | bench/text_quality/*                                     | words stages settings reports manager recorded umbrella common llama | fmt nlohmann CLI ggml llama Eigen unistd.h sys
bench     | bench/*                                                  | words stages settings reports manager recorded front cpu src kernels host | fmt nlohmann Eigen benchmark cuda cub time.h
reference | tests/reference/*                                        | words stages settings src | Eigen
device    | tests/cpu_device/*                                       | framework               | cuda cub driver_types cxxabi
framework | tests/catch.hpp                                          |                         | catch
'

# The arrows: "from to", where `to` is a file of the tree or, with its brackets, of a library.
arrows() {
  local places=() place
  for place in include src cuda examples bench tests/reference tests/cpu_device tests/ggml; do
    [ -d "$place" ] && places+=("$place")
  done
  grep -rHoE '^[ \t]*#[ \t]*include[ \t]+[<"][^>"]+[>"]' --include=*.hpp --include=*.cpp --include=*.cu \
    --include=*.cuh --include=*.h --include=*.c "${places[@]}" | sed -E 's/^([^:]+):.*include[ \t]+(.*)$/\1 \2/' |
    while read -r from to; do
      local name=${to:1:-1} found= folder
      if [[ $name == verkv/* ]]; then
        found=include/$name
      elif [[ $to == \"* ]]; then
        for folder in "$(dirname "$from")" src cuda tests bench examples/common tests/cpu_device; do
          if [ -f "$folder/$name" ]; then
            found=$(realpath -m --relative-to=. "$folder/$name")
            break
          fi
        done
      fi
      echo "$from ${found:-$to}"
    done
}

arrows=$(arrows)
[ -n "$arrows" ] || { echo "no include was found"; exit 2; }
failed=0

found=$(awk -v table="$table" '
  function trim(text) { gsub(/^[ \t]+|[ \t]+$/, "", text); return text }
  # A pattern of files as a regular expression; braces hold names of which one counts.
  function expression(pattern) {
    gsub(/[ \t]*<[ \t]*/, ",", pattern)
    gsub(/\./, "\\.", pattern)
    gsub(/\*/, ".*", pattern)
    gsub(/\{/, "(", pattern)
    gsub(/\}/, ")", pattern)
    if (pattern ~ /\(/) gsub(/,/, "|", pattern)
    return "^" pattern "$"
  }
  # Of a file of an ordered room: which it is.
  function place(room, file,    names, i, count) {
    count = split(order[room], names, /[ \t]*<[ \t]*/)
    for (i = 1; i <= count; ++i)
      if (file ~ ("/" trim(names[i]) "\\.")) return i
    return 0
  }
  function room_of(file,    i) {
    for (i = 1; i <= rooms; ++i)
      if (file ~ files[i]) return i
    return 0
  }
  BEGIN {
    count = split(table, lines, "\n")
    for (i = 1; i <= count; ++i) {
      if (split(lines[i], field, "|") < 3) continue
      ++rooms
      name[rooms] = trim(field[1])
      if (match(field[2], /\{[^}]*<[^}]*\}/)) {
        order[rooms] = substr(field[2], RSTART + 1, RLENGTH - 2)
        files[rooms] = expression(trim(field[2]))
      } else {
        parts = split(trim(field[2]), pattern, /[ \t]+/)
        files[rooms] = expression(pattern[1])
        for (j = 2; j <= parts; ++j) files[rooms] = files[rooms] "|" expression(pattern[j])
      }
      allowed[rooms] = " " trim(field[3]) " " name[rooms] " "
      libraries[rooms] = trim(field[4])
    }
  }
  {
    room = room_of($1)
    if (!room) { print $1 ": belongs to no room"; next }
    if ($2 !~ /^[<"]/) {
      other = room_of($2)
      if (!other) print $1 ": includes " $2 ", which belongs to no room"
      else if (!index(allowed[room], " " name[other] " "))
        print $1 ": " name[room] " may not include " $2 " (" name[other] ")"
      else if (other == room && order[room] != "" && place(room, $2) >= place(room, $1))
        print $1 ": may not include the later stage " $2
      next
    }
    include = substr($2, 2, length($2) - 2)
    if ($2 ~ /^</ && include ~ /^[a-z_0-9]+$/) next  # of the standard library
    ok = 0
    parts = split(libraries[room], library, /[ \t]+/)
    for (j = 1; j <= parts; ++j) if (index(include, library[j]) == 1) ok = 1
    if (!ok) print $1 ": " name[room] " may not include " $2
  }' <<<"$arrows" | sort -u)
if [ -n "$found" ]; then
  printf 'arrows that the table does not allow:\n%s\n' "$found"
  failed=1
fi

# tsort prints a circle to the error output.
if ! circle=$(awk '$2 !~ /^[<"]/' <<<"$arrows" | tsort 2>&1 >/dev/null); then
  printf 'files that include each other in a circle:\n%s\n' "$circle"
  failed=1
fi
exit "$failed"
