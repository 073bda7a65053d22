#!/usr/bin/env bash
# Builds the fuzz targets and runs them: fuzz/run.sh build | all SECONDS | TARGET SECONDS [libFuzzer's options]
set -euo pipefail
cd "$(dirname "$0")"
targets="capi restore trace config hf_config model_file"
host=$(rustc -vV | sed -n 's/^host: //p')
out=${CARGO_TARGET_DIR:-$PWD/target}/fuzz

build() {
    # As cargo-fuzz has them. AddressSanitizer is behind -Z in stable Rust too.
    # The portable kernels alone: those with vector instructions would take the most of the build.
    local flags="--cfg fuzzing --cfg kvpool_portable -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4"
    flags+=" -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table"
    flags+=" -Cllvm-args=-sanitizer-coverage-trace-compares -Zsanitizer=address"
    RUSTC_BOOTSTRAP=1 RUSTFLAGS="$flags" KVPOOL_CUDA=off CARGO_TARGET_DIR="$out" \
        cargo build --release --quiet --locked --target "$host"
}

# A target for some seconds, on a copy of its corpus.
fuzz() {
    local target=$1 seconds=$2
    shift 2
    local found="$out/corpus/$target" crashes="$out/artifacts/$target/"
    mkdir -p "$found" "$crashes"
    echo "fuzz: $target for $seconds s"
    ASAN_OPTIONS=detect_leaks=1:allocator_may_return_null=1:detect_odr_violation=0 \
        KVPOOL_FUZZ=$target "$out/$host/release/kvpool-fuzz" "$found" "corpus/$target" -max_total_time="$seconds" -artifact_prefix="$crashes" \
        -timeout=20 -rss_limit_mb=4096 -print_final_stats=1 "$@" 2>&1 | tail -n 40 >"$out/$target.log" ||
        { cat "$out/$target.log"; exit 1; }
    grep -E "number_of_executed_units|DONE" "$out/$target.log" || true
}

# Opens every cache that capi and restore choose from, once.
shapes() {
    echo "fuzz: the shapes of capi and restore"
    KVPOOL_FUZZ=shapes "$out/$host/release/kvpool-fuzz" README.md >"$out/shapes.log" 2>&1 ||
        { tail -n 40 "$out/shapes.log"; exit 1; }
}

case ${1:?build, all, or a target} in
build) build ;;
all)
    build
    shapes
    for target in $targets; do fuzz "$target" "${2:-10}"; done
    ;;
*)
    build
    fuzz "$@"
    ;;
esac
