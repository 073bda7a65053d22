#!/usr/bin/env bash
# The C interface under sanitizers, valgrind and load, its packages, and its binary interface. What tests/capi
# runs in `cargo test` runs here once more, slower and closer.
#
#   csrc/tests/capi.sh [FOLDER] [PART...]     FOLDER of the built libraries (default target/release);
#                                             parts: abi asan valgrind tsan soak load packages cinstall
#                                             readme (default: all)
#
# Needs a C and a C++ compiler (CC, CXX) and Python; without valgrind, cmake, pkg-config or cargo-c their part is
# skipped, and that is printed.
set -euo pipefail
cd "$(dirname "$0")/../.."
library=$(realpath "${1:-${CARGO_TARGET_DIR:-target}/release}")
shift || true
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(abi asan valgrind tsan soak load packages cinstall readme)
out=$(mktemp -d)
service_pid=
# The service that is running, if any, ends with the script.
trap '[ -z "$service_pid" ] || kill "$service_pid" 2>/dev/null || true; rm -rf "$out"' EXIT
test -e "$library/libkvpool.so" || { echo "no libkvpool.so in $library: cargo build --release" >&2; exit 1; }

step() { printf '\n-- %s\n' "$*"; }
# What does not end is a failure too, and says which program it was.
limited() { timeout --kill-after=10 300 "$@" || { echo "exit status $?: $*" >&2; return 1; }; }
skip() { printf 'skipped: %s\n' "$*"; }

# linked PROGRAM TEXT: whether what it is linked with has TEXT. Not `ldd | grep -q`: grep ends at the first match, and
# ldd, when it writes on after that, fails.
linked() {
    local libraries
    libraries=$(ldd "$1")
    [[ $libraries == *"$2"* ]] || { echo "not linked with $2: $1"; echo "$libraries"; return 1; }
}
# unlinked PROGRAM TEXT: the contrary.
unlinked() {
    local libraries
    libraries=$(ldd "$1")
    [[ $libraries != *"$2"* ]] || { echo "linked with $2: $1"; echo "$libraries"; return 1; }
}

# build NAME SOURCE... [-- FLAG...]
build() {
    local name=$1 sources=() flags=()
    shift
    while [ $# -gt 0 ] && [ "$1" != -- ]; do sources+=("$1"); shift; done
    [ $# -eq 0 ] || { shift; flags=("$@"); }
    local compiler=${CXX:-c++} standard=-std=c++17
    case ${sources[0]} in *.c) compiler=${CC:-cc} standard=-std=c11 ;; esac
    $compiler $standard -g -O1 -Wall -Wextra -Werror -pedantic -pthread -Icsrc/include "${flags[@]}" \
        "${sources[@]}" "-L$library" "-Wl,-rpath,$library" -lkvpool -o "$out/$name"
}

programs() {
    build "every_c$1" csrc/tests/capi/{every_function,second_unit}.c -- "${@:2}"
    build "every_cpp$1" csrc/tests/capi/{every_function,second_unit}.cpp -- "${@:2}"
    build "handles$1" csrc/tests/capi/handles.c -- "${@:2}"
    build "pointers$1" csrc/tests/capi/pointers.c -- "${@:2}"
    build "threads$1" csrc/tests/capi/threads.cpp -- "${@:2}"
    build "braces$1" csrc/tests/capi/braces.cpp -- "${@:2}"
}

# serve SERVICE LOAD [SERVICE ARGUMENT...] -- LOAD ARGUMENT...
serve() {
    local service=$1 load=$2 arguments=() port=
    shift 2
    while [ "$1" != -- ]; do arguments+=("$1"); shift; done
    shift
    : > "$out/service.log"
    "$out/$service" csrc/examples/service.toml "${arguments[@]}" > "$out/service.log" &
    service_pid=$!
    for _ in $(seq 200); do
        port=$(sed -n 's/^serving on 127.0.0.1:\([0-9]*\),.*/\1/p' "$out/service.log")
        [ -z "$port" ] || break
        sleep 0.1
    done
    limited "$out/$load" --port "$port" "$@"
    kill -TERM "$service_pid"
    wait "$service_pid"
    service_pid=
    tail -n +2 "$out/service.log"
    grep -qx "nothing leaked" "$out/service.log"
}

part_abi() {
    step "the binary interface is the committed one"
    csrc/tests/abi.py --check
}

part_asan() {
    step "AddressSanitizer and UndefinedBehaviorSanitizer"
    # GCC takes optional values for uninitialised ones when it sanitizes.
    local flags=(-fsanitize=address,undefined -fno-sanitize-recover=all -Wno-maybe-uninitialized)
    programs _asan "${flags[@]}"
    # Openings are few, because memory that was freed is kept back.
    for program in every_c every_cpp braces handles "pointers 200" "threads 500"; do
        echo "${program}:"
        limited "$out/${program%% *}_asan" $([[ $program != *\ * ]] || echo "${program##* }")
    done
    build service_asan csrc/examples/service.cpp -- "${flags[@]}"
    build load_asan csrc/examples/load.cpp -- "${flags[@]}"
    serve service_asan load_asan --verify --threads 2 -- --requests 1000 --clients 32
    serve service_asan load_asan --set pool.capacity=blocks:30 -- --requests 300 --clients 24
}

part_valgrind() {
    step "valgrind"
    command -v valgrind > /dev/null || { skip "valgrind is not there"; return; }
    programs _plain
    # valgrind knows no AVX-512: the library sees a processor without. It runs one thread at a time, and only a
    # fair schedule lets each of them have its turn. The child of a fork is without its parent's other threads, and
    # what these held would count as lost.
    for program in every_c every_cpp braces handles "pointers 20" "threads 50"; do
        echo "${program}:"
        limited valgrind --quiet --fair-sched=yes --error-exitcode=99 --leak-check=full --show-leak-kinds=definite \
            --errors-for-leak-kinds=definite --child-silent-after-fork=yes \
            "$out/${program%% *}_plain" $([[ $program != *\ * ]] || echo "${program##* }")
    done
}

part_tsan() {
    step "ThreadSanitizer on the C++ side"
    # The library is not instrumented: what happens in it, and its calls of the C library, are not looked at.
    export TSAN_OPTIONS="halt_on_error=1 ignore_noninstrumented_modules=1"
    build threads_tsan csrc/tests/capi/threads.cpp -- -fsanitize=thread
    limited "$out/threads_tsan" 500
    build turns_tsan csrc/tests/capi/turns.cpp -- -fsanitize=thread
    limited "$out/turns_tsan"
    build service_tsan csrc/examples/service.cpp -- -fsanitize=thread
    build load_tsan csrc/examples/load.cpp -- -fsanitize=thread
    serve service_tsan load_tsan --verify --threads 2 -- --requests 500 --clients 16
}

part_soak() {
    step "eight threads in a full pool, for seconds (benches/results has the hours)"
    build soak csrc/tests/soak/soak.cpp -- -O2
    build soak_asan csrc/tests/soak/soak.cpp -- -O2 -fsanitize=address,undefined -fno-sanitize-recover=all
    local hybrid=(cache.mode=hybrid cache.hybrid.contiguous_layers=windowed cache.format=f16)
    local slots=(cache.mode=contiguous pool.capacity=worst-case limits.max_seqs=20)
    limited "$out/soak" 10 8 cache.event_buffer=1024 | tail -n 3
    limited "$out/soak" 5 8 "${slots[@]}" | tail -n 3
    limited "$out/soak_asan" 10 8 "${hybrid[@]}" | tail -n 3
}

part_load() {
    step "the service: 10,000 requests of 64 clients"
    build service csrc/examples/service.cpp -- -O2
    build load csrc/examples/load.cpp -- -O2
    serve service load --verify -- --requests 10000 --clients 64
    step "the same with a pool that preempts"
    serve service load --set pool.capacity=blocks:60 -- --requests 10000 --clients 64 --seed 2
    step "the same with a pool and a queue that are too small"
    serve service load --set pool.capacity=blocks:6 --set cache.watermark_blocks=0 --max-waiting 16 -- \
        --requests 10000 --clients 64 --seed 3 --may-refuse 1
}

part_packages() {
    step "the CMake package and pkg-config"
    command -v cmake > /dev/null || { skip "cmake is not there"; return; }
    local prefix=$out/prefix user=$out/user
    cmake -S csrc -B "$out/build" "-DKVPOOL_LIBRARY_DIR=$library" > "$out/cmake.log"
    cmake --build "$out/build" >> "$out/cmake.log"
    cmake --install "$out/build" --prefix "$prefix" >> "$out/cmake.log"
    # The tree may be moved.
    mv "$prefix" "$out/moved"
    prefix=$out/moved
    mkdir "$user"
    cp csrc/tests/capi/package/CMakeLists.txt csrc/examples/hello.{c,cpp} "$user"
    cmake -S "$user" -B "$user/build" "-DCMAKE_PREFIX_PATH=$prefix" >> "$out/cmake.log"
    cmake --build "$user/build" >> "$out/cmake.log"
    "$user/build/hello_shared"
    "$user/build/hello_static"
    linked "$user/build/hello_shared" "libkvpool.so.0 => $prefix"
    unlinked "$user/build/hello_static" libkvpool
    # As a part of another project, which says where the library is.
    mkdir "$out/whole"
    cp "$user/hello.cpp" "$out/whole"
    printf '%s\n' 'cmake_minimum_required(VERSION 3.21)' 'project(whole CXX)' \
        "set(KVPOOL_LIBRARY_DIR $library)" "add_subdirectory($PWD/csrc kvpool)" \
        'add_executable(hello hello.cpp)' 'target_link_libraries(hello kvpool::kvpool)' > "$out/whole/CMakeLists.txt"
    cmake -S "$out/whole" -B "$out/whole/build" >> "$out/cmake.log"
    cmake --build "$out/whole/build" >> "$out/cmake.log"
    "$out/whole/build/hello"
    (! grep -q cargo "$out/whole/build/CMakeFiles/Makefile2")
    command -v pkg-config > /dev/null || { skip "pkg-config is not there"; return; }
    export PKG_CONFIG_PATH
    PKG_CONFIG_PATH=$(dirname "$(find "$prefix" -name kvpool.pc)")
    local libdir
    libdir=$(pkg-config --variable=libdir kvpool)
    ${CXX:-c++} -std=c++17 "$user/hello.cpp" $(pkg-config --cflags --libs kvpool) "-Wl,-rpath,$libdir" \
        -o "$user/by_pkg_config"
    "$user/by_pkg_config"
    # Statically: the archive by its name, then what it needs.
    ${CC:-cc} -std=c11 "$user/hello.c" $(pkg-config --cflags kvpool) "$libdir/libkvpool.a" \
        $(pkg-config --static --libs-only-l kvpool | sed 's/-lkvpool//') -o "$user/by_pkg_config_static"
    "$user/by_pkg_config_static"
    unlinked "$user/by_pkg_config_static" libkvpool
}

part_cinstall() {
    step "cargo cinstall: what it installs, used through pkg-config"
    cargo cinstall --version > /dev/null 2>&1 || { skip "cargo-c is not there"; return; }
    command -v pkg-config > /dev/null || { skip "pkg-config is not there"; return; }
    local prefix=$out/by_cargo_c
    # Its target folder is kept, beside that of the library that the other parts test.
    CARGO_TARGET_DIR=$(dirname "$library")/cargo-c cargo cinstall --locked --release \
        "--prefix=$prefix" "--libdir=$prefix/lib" > "$out/cinstall.log" 2>&1 || { cat "$out/cinstall.log"; return 1; }
    local flags
    flags=$(PKG_CONFIG_PATH=$prefix/lib/pkgconfig pkg-config --cflags --libs kvpool)
    ${CC:-cc} -std=c11 csrc/examples/hello.c $flags "-Wl,-rpath,$prefix/lib" -o "$out/cinstalled_c"
    ${CXX:-c++} -std=c++17 csrc/examples/hello.cpp $flags "-Wl,-rpath,$prefix/lib" -o "$out/cinstalled_cpp"
    "$out/cinstalled_c"
    "$out/cinstalled_cpp"
    linked "$out/cinstalled_c" "libkvpool.so.0 => $prefix"
    flags=$(PKG_CONFIG_PATH=$prefix/lib/pkgconfig pkg-config --static --libs-only-l kvpool | sed 's/-lkvpool//')
    ${CC:-cc} -std=c11 csrc/examples/hello.c "-I$prefix/include" "$prefix/lib/libkvpool.a" $flags -o "$out/cinstalled_static"
    "$out/cinstalled_static"
}

part_readme() {
    step "README, From C++, literally, outside the repository"
    command -v cmake > /dev/null && command -v pkg-config > /dev/null || { skip "cmake or pkg-config"; return; }
    csrc/tests/readme.py "$library"
}

for part in "${parts[@]}"; do "part_$part"; done
