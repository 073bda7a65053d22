#!/usr/bin/env bash
# Builds the kernels for the emulator, and runs the tests of kernels on it. Needs a C++17 compiler only.
#
#   csrc/tests/run.sh [FOLDER] [TEST…]     FOLDER for what is built (default target/kernel-tests)
#
# CXX and CXXFLAGS are heeded, so that sanitizers can be asked for; JOBS compilers run at once (default 2).
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-target/kernel-tests}
shift || true
mkdir -p "$out"
export CXX=${CXX:-g++}
export FLAGS="-std=c++17 -O2 -g -ffp-contract=off -DKVPOOL_EMULATED -Wall -Wextra ${CXXFLAGS:-}"
tests=("$@")
[ ${#tests[@]} -gt 0 ] || tests=(append_bytes blocks attend_answers attend_same attend_random traffic)

# An object is built anew when any header or its own source is newer.
newest=$(ls -t csrc/kernels/* csrc/emulator/*.hpp csrc/tests/*.hpp | head -n 1)
build() {
    [ "$2" -nt "$1" ] && [ "$2" -nt "$3" ] || $CXX $FLAGS -x c++ -c "$1" -o "$2"
}
export -f build
{
    for source in csrc/inst/*.cu; do
        echo "$source $out/$(basename "$source").o $newest"
    done
    for test in "${tests[@]}"; do
        echo "csrc/tests/$test.cpp $out/$test.o $newest"
    done
} | xargs -P "${JOBS:-2}" -L 1 bash -c 'build "$@"' build

# What they say, one after the other, also when one of them fails.
run() {
    { $CXX $FLAGS "$2/$1.o" "$2"/*.cu.o -o "$2/$1" && "$2/$1"; } > "$2/$1.log" 2>&1
}
export -f run
failed=0
printf '%s\n' "${tests[@]}" | xargs -P "${JOBS:-2}" -I {} bash -c 'run "$@"' run {} "$out" || failed=1
for test in "${tests[@]}"; do
    echo "== $test"
    cat "$out/$test.log"
done
exit $failed
