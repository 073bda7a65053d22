#!/usr/bin/env bash
# Builds the library without kernels twice, from two copies in folders of different length, and compares the bytes of
# libkvpool.so and libkvpool.a. The dependencies are built twice too: some minutes on two cores, so CI does it only when
# asked (KVPOOL_REPRODUCIBLE=1).
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
home=${CARGO_HOME:-$HOME/.cargo}
for folder in a a-second-folder; do
    mkdir -p "$work/$folder"
    git archive HEAD | tar -x -C "$work/$folder"
    (
        cd "$work/$folder"
        # What is compiled in of paths: the sources', and the registry's. One codegen unit, so that no race of threads
        # decides on the order of functions.
        export RUSTFLAGS="--remap-path-prefix=$PWD=/kvpool --remap-path-prefix=$home=/cargo -Ccodegen-units=1"
        export KVPOOL_CUDA=off CARGO_TARGET_DIR="$PWD/target" CARGO_INCREMENTAL=0 SOURCE_DATE_EPOCH=0
        cargo build --release --lib --no-default-features --locked --quiet
    )
done
status=0
for library in libkvpool.so libkvpool.a; do
    first="$work/a/target/release/$library" second="$work/a-second-folder/target/release/$library"
    if cmp "$first" "$second"; then
        echo "$library: the same $(stat -c %s "$first") bytes, sha256 $(sha256sum "$first" | cut -d' ' -f1)"
    else
        status=1
    fi
done
exit $status
