#!/usr/bin/env bash
# pkg_config.sh PKG_CONFIG PC_DIR SOURCE WORK VERSION COMPILER [FLAGS...]: builds and runs both consumers
# with nothing but what pkg-config says.
set -euo pipefail
pkg_config=$1 pc_dir=$2 source=$3 work=$4 version=$5
shift 5
export PKG_CONFIG_PATH=$pc_dir
mkdir -p "$work"

"$pkg_config" --validate verkv verkv-runtime
read -ra flags <<<"$("$pkg_config" --cflags --libs verkv)"
"$@" -std=c++20 "$source/header_only/main.cpp" "${flags[@]}" -o "$work/header_only"
"$work/header_only"

read -ra flags <<<"$("$pkg_config" --cflags --libs verkv-runtime)"
"$@" -std=c++20 -DPACKAGE_VERSION="\"$version\"" "$source/consumer/main.cpp" "${flags[@]}" -o "$work/consumer"
libdir=$(cd "$pc_dir/.." && pwd)
LD_LIBRARY_PATH=$libdir${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} "$work/consumer"

# The CUDA backend is linked by the CMake tests; here only that its file is sound.
if [ -f "$pc_dir/verkv-cuda.pc" ]; then
  "$pkg_config" --validate verkv-cuda
  [[ $("$pkg_config" --libs verkv-cuda) == *-lverkv_cuda*-lverkv_runtime* ]]
fi
