#!/usr/bin/env bash
# docs.sh RULE TREE: fails and prints the offending places when a page of TREE names what is not there.
#   links  links inside the project and their anchors, paths and file names in code spans; the cases of a
#          test, as in `tests/FILE_test.cpp`: beginning of a case; up to the end of the cell of the table
#   names  identifiers in code spans; docs/lab.md and the changelog may name what is gone
set -uo pipefail
export LC_ALL=C
rule=$1
cd "$2" || exit 2
pages=()
for page in README.md CHANGELOG.md docs/*.md docs/math/*.md; do
  [ -f "$page" ] && pages+=("$page")
done
[ ${#pages[@]} -gt 0 ] || { echo "no pages in $2"; exit 2; }
code=()
for place in include src cuda tests bench examples cmake CMakeLists.txt CMakePresets.json; do
  [ -e "$place" ] && code+=("$place")
done
scratch=$(mktemp -d) || exit 2
trap 'rm -rf "$scratch"' EXIT
bad=$scratch/bad
: >"$bad"

# The page without its code blocks.
prose() { awk '/^ *```/ { inside = !inside; next } !inside' "$1"; }

# The code spans of a page, one a line.
spans() { prose "$1" | tr '\n' ' ' | grep -oE '`[^`]+`' | tr -d '`'; }

# The anchors that code hosts make of a page's headings.
anchors() {
  prose "$1" | sed -nE 's/^#+ +//p' | tr 'A-Z' 'a-z' | sed -E 's/[^a-z0-9 _-]//g; s/ /-/g'
}

case $rule in
  links)
    find "${code[@]}" docs -type f 2>/dev/null | sed 's|.*/||' | sort -u >"$scratch/files"
    for page in "${pages[@]}"; do
      folder=$(dirname "$page")
      prose "$page" | tr '\n' ' ' | grep -oE '\]\([^) ]+\)' | sed 's/^](//; s/)$//' | sort -u | while read -r link; do
        case $link in http:* | https:* | mailto:*) continue ;; esac
        target=${link%%#*}
        file=$folder/$target
        [ -n "$target" ] || file=$page
        if [ ! -e "$file" ]; then
          echo "$page: $link: there is no $file"
        elif [ "$link" != "$target" ] && ! anchors "$file" | grep -qxF -- "${link#*#}"; then
          echo "$page: $link: $file has no such heading"
        fi
      done >>"$bad"
      spans "$page" | tr ' ' '\n' | sort -u | while read -r span; do
        case $span in
          include/* | src/* | cuda/* | tests/* | bench/* | examples/* | cmake/* | docs/*)
            compgen -G "$span" >/dev/null || echo "$page: \`$span\` is not there" ;;
          */*) ;;
          *.cpp | *.hpp | *.cu | *.cuh | *.py | *.sh)
            [ "$page" = docs/lab.md ] || grep -qxF -- "$span" "$scratch/files" ||
              echo "$page: there is no file \`$span\`" ;;
        esac
      done >>"$bad"
      prose "$page" | grep -oE '`tests/[a-z0-9_/]+_test\.cpp`: [^;|]+' | while IFS= read -r cited; do
        file=${cited#?} name=$(sed -E 's/^[^:]*: *//; s/ *$//' <<<"$cited")
        grep -qF -- "(\"$name" "${file%%\`*}" 2>/dev/null || echo "$page: no case of ${file%%\`*} begins with: $name"
      done >>"$bad"
    done
    ;;
  names)
    grep -rhoEI --exclude-dir=golden --exclude="*self_test.sh" --exclude=docs.sh '[A-Za-z_][A-Za-z0-9_]*' "${code[@]}" | sort -u >"$scratch/words"
    # Tests are registered under the stem of their file, behind the name of their folder.
    find tests -name '*_test.cpp' | sed -E 's|.*/||; s|_test\.cpp$||' | sed -E 's|.*|&_test\ncuda_&\ncpu_device_&|' \
      >>"$scratch/words"
    # Names of other projects.
    printf '%s\n' CUDAToolkit FLASH_ATTN_EXT save_file verkv_DIR >>"$scratch/words"
    sort -u -o "$scratch/words" "$scratch/words"
    for page in "${pages[@]}"; do
      case $page in docs/lab.md | CHANGELOG.md) continue ;; esac
      # Identifiers: two or more parts, joined by _ or by a capital. The symbols of formulas end in an
      # index of one letter, or in "hat". Tests whose names CMake puts together are left out.
      spans "$page" | sed 's/-D//g' | grep -oE '[A-Za-z0-9_]+' | grep -E '[A-Za-z0-9]_[A-Za-z0-9]|[a-z][A-Z]' |
        grep -vE '^_|^[0-9]|_(.|hat)$|^(hygiene|gpu|cuda_manager)_' | sort -u | comm -23 - "$scratch/words" |
        sed "s|^|$page: nothing in the code is called |" >>"$bad"
    done
    ;;
  *)
    echo "unknown rule $rule"
    exit 2
    ;;
esac
[ ! -s "$bad" ] || { cat "$bad"; exit 1; }
