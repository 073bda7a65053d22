#!/usr/bin/env bash
# Writes src/device/cuda/bindings.rs anew from csrc/kernels/params.h.
#
# Needs bindgen and libclang, neither of which a build needs:
#   cargo install bindgen-cli --version 0.72.1 --locked --root target/tools
#   python3 -m venv target/libclang && target/libclang/bin/pip install libclang==18.1.1
# Then:
#   PATH=target/tools/bin:$PATH LIBCLANG_PATH=$(dirname "$(find target/libclang -name 'libclang.so')") csrc/bindings.sh
set -euo pipefail
cd "$(dirname "$0")/.."
# libclang's wheel has no headers of the compiler; the C compiler's own do.
include=$(cc -print-file-name=include)
bindgen csrc/kernels/params.h \
    --use-core --no-layout-tests --no-prepend-enum-name --rust-target 1.85 \
    --allowlist-item 'Kvpool.*' --allowlist-item 'KVPOOL_.*' \
    --translate-enum-integer-types --merge-extern-blocks \
    --raw-line '//! The structs that the host hands to the kernels: made by csrc/bindings.sh from' \
    --raw-line '//! csrc/kernels/params.h, where they are described. `tests/params.rs` measures them.' \
    --raw-line '' \
    --raw-line '#![allow(missing_docs, unreachable_pub, dead_code, reason = "generated; see params.h")]' \
    --raw-line '#![allow(non_camel_case_types, reason = "generated: anonymous enums")]' \
    -- -x c -I"$include" > src/device/cuda/bindings.rs.new
mv src/device/cuda/bindings.rs.new src/device/cuda/bindings.rs
rustfmt --edition 2024 src/device/cuda/bindings.rs
