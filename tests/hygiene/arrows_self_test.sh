#!/usr/bin/env bash
# arrows_self_test.sh SCRATCH: plants an arrow against each rule of arrows.sh in a tree of its own; each
# must be noticed there, and none in the clean tree.
set -euo pipefail
check=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/arrows.sh
tree=$1
failures=0

# write FILE INCLUDE...: a file with these includes.
write() {
  local file=$tree/$1
  shift
  mkdir -p "$(dirname "$file")"
  printf '#include %s\n' "$@" >>"$file"
}

fresh() {
  rm -rf "$tree"
  write include/verkv/types.hpp '<vector>'
  write include/verkv/sample.hpp '<verkv/types.hpp>'
  write include/verkv/certificate.hpp '<verkv/sample.hpp>'
  write include/verkv/settings.hpp '<verkv/types.hpp>'
  write include/verkv/kv_cache_manager.hpp '<verkv/settings.hpp>'
  write include/verkv/recorded_cache.hpp '<verkv/types.hpp>'
  write src/backend.hpp '<verkv/settings.hpp>'
  write src/rows.hpp '<verkv/types.hpp>'
  write src/kv_cache_manager.cpp '<verkv/kv_cache_manager.hpp>' '"backend.hpp"'
  write src/cpu/store.hpp '"rows.hpp"' '<fmt/format.h>'
  write cuda/store.hpp '"rows.hpp"' '<cuda_runtime_api.h>'
  write examples/common/examples.hpp '<vector>'
  write examples/decode_loop/main.cpp '<verkv/kv_cache_manager.hpp>'
  write examples/replay/main.cpp '<verkv/kv_cache_manager.hpp>' '<CLI/CLI.hpp>'
  write bench/step_bench.cpp '"cpu/store.hpp"' '<benchmark/benchmark.h>'
  write tests/reference/reference.hpp '<cmath>'
  write tests/cpu_device/device.hpp '<vector>'
}

expect() {
  local status=0
  "$check" "$tree" >/dev/null 2>&1 || status=$?
  if [ "$status" -ne "$1" ]; then
    echo "status $status instead of $1: $2"
    failures=$((failures + 1))
  fi
}

# breaks FILE INCLUDE...
breaks() {
  fresh
  write "$@"
  expect 1 "$*"
}

fresh
expect 0 "the clean tree"
breaks include/verkv/sample.hpp '<verkv/certificate.hpp>'         # a later stage
breaks include/verkv/sample.hpp '<Eigen/Dense>'                   # a library in a public header
breaks include/verkv/sample.hpp '<verkv/settings.hpp>'            # a stage knows no settings
breaks include/verkv/settings.hpp '<verkv/kv_cache_manager.hpp>'  # upwards
breaks src/rows.hpp '<verkv/kv_cache_manager.hpp>'                # only the manager and the factories
breaks src/rows.hpp '"cpu/store.hpp"'                             # the CPU backend is above
breaks src/rows.hpp '<cuda_runtime_api.h>'                        # no CUDA in src
breaks src/cpu/store.hpp '"kv_cache_manager.hpp"' '<verkv/kv_cache_manager.hpp>'
breaks cuda/store.hpp '"cpu/store.hpp"'                           # one backend knows nothing of the other
breaks cuda/store.hpp '<Eigen/Dense>'
breaks examples/replay/main.cpp '"../../src/rows.hpp"'            # examples see what is installed
breaks examples/replay/main.cpp '"rows.hpp"'
breaks src/rows.hpp '"../bench/step_bench.cpp"'                   # benchmarks are on top
breaks tests/reference/reference.hpp '<cuda_runtime_api.h>'
breaks tests/cpu_device/device.hpp '<verkv/types.hpp>'            # the device serves any kernel
breaks src/gpu/new.hpp '<vector>' '<hip/hip_runtime.h>'           # a library that nobody allowed
breaks elsewhere/../include/other/x.hpp '<vector>'                # a file in no room
breaks include/verkv/new.hpp '<vector>'                           # a public header in no room
breaks examples/decode_loop/main.cpp '"examples.hpp"'             # one file shows all there is
fresh
write src/rows.hpp '"backend.hpp"'
write src/backend.hpp '"rows.hpp"'
expect 1 "a circle"

rm -rf "$tree"
[ "$failures" -eq 0 ]
