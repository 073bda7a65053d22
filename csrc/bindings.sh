#!/usr/bin/env bash
# Writes anew what Rust takes from C headers: src/device/cuda/bindings.rs from csrc/kernels/params.h, and
# src/capi/bindings.rs and src/capi/signatures.rs from csrc/include/kvpool.h. With --check it changes nothing, and
# fails if one of them is not what it would write.
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
new=$(mktemp -d)
trap 'rm -rf "$new"' EXIT
options=(--use-core --no-prepend-enum-name --rust-target 1.85
    --translate-enum-integer-types --merge-extern-blocks)

bindgen csrc/kernels/params.h "${options[@]}" --no-layout-tests \
    --allowlist-item 'Kvpool.*' --allowlist-item 'KVPOOL_.*' \
    --raw-line '//! The structs that the host hands to the kernels: made by csrc/bindings.sh from' \
    --raw-line '//! csrc/kernels/params.h, where they are described. `tests/params.rs` measures them.' \
    --raw-line '' \
    --raw-line '#![allow(missing_docs, unreachable_pub, dead_code, reason = "generated; see params.h")]' \
    --raw-line '#![allow(non_camel_case_types, reason = "generated: anonymous enums")]' \
    -- -x c -I"$include" > "$new/params.rs"

# With sizes and offsets, which are compared with Rust's when it is compiled.
# Statuses and kinds are int32_t in the header; C gives enumerators no type to go by.
bindgen csrc/include/kvpool.h "${options[@]}" \
    --allowlist-item 'kvpool_.*' --allowlist-item 'KVPOOL_.*' \
    --blocklist-function 'kvpool_.*' --blocklist-item DLManagedTensor \
    --raw-line '//! The types of the C interface: made by csrc/bindings.sh from csrc/include/kvpool.h, where they' \
    --raw-line '//! are described.' \
    --raw-line '' \
    --raw-line '#![allow(missing_docs, non_camel_case_types, dead_code, reason = "generated; see kvpool.h")]' \
    --raw-line '#![allow(clippy::unnecessary_operation, clippy::identity_op, reason = "sizes are checked so")]' \
    -- -x c -I"$include" |
    sed -E 's/: _bindgen_ty_[0-9]+ =/: i32 =/; /^pub type _bindgen_ty_/d; /^#\[allow\(clippy::unnecessary_operation/d' \
        > "$new/capi.rs"

# One line for each function: that of Rust has the signature of the header.
bindgen csrc/include/kvpool.h "${options[@]}" \
    --generate functions --allowlist-function 'kvpool_.*' --blocklist-item DLManagedTensor \
    -- -x c -I"$include" > "$new/functions.rs"
python3 - "$new/functions.rs" > "$new/signatures.rs" <<'EOF'
import re, sys

print("//! That every function has the signature that csrc/include/kvpool.h declares: made by csrc/bindings.sh.")
print()
print("use super::bindings::*;")
print("use super::dlpack::DLManagedTensor;")
print()
text = open(sys.argv[1]).read()
for name, inputs, output in re.findall(r"pub fn (kvpool_\w+)\((.*?)\)( -> [^;]+)?;", text, re.S):
    types = [re.sub(r"^\s*\w+: ", "", part) for part in inputs.split(",") if part.strip()]
    print(f"const _: unsafe extern \"C\" fn({', '.join(types)}){output} = super::{name};")
EOF

place() {
    rustfmt --edition 2024 --config-path . "$1"
    if [ "$check" = 1 ]; then
        diff -u "$2" "$1" || { echo "$2 is not what csrc/bindings.sh makes of the header: run it" >&2; exit 1; }
    else
        cp "$1" "$2"
    fi
}
check=0
[ "${1:-}" = --check ] && check=1
place "$new/params.rs" src/device/cuda/bindings.rs
place "$new/capi.rs" src/capi/bindings.rs
place "$new/signatures.rs" src/capi/signatures.rs
