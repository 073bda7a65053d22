//! The structs that Rust and the kernels share: sizes and offsets as the C++ compiler measures
//! them, against those of the bindings (`csrc/bindings.sh`).

#![allow(dead_code, reason = "the device uses the rest")]

use std::fmt::Write as _;
use std::mem::offset_of;
use std::path::Path;
use std::process::Command;

#[path = "../src/device/cuda/bindings.rs"]
mod bindings;

use bindings::*;

/// Sizes and offsets of a struct, a line each.
macro_rules! measured {
    ($text:ident, $name:ident: $($field:ident)*) => {
        let _ = writeln!($text, "{} {}", stringify!($name), size_of::<$name>());
        $(
            let _ = writeln!(
                $text, "{}.{} {}", stringify!($name), stringify!($field), offset_of!($name, $field)
            );
        )*
    };
}

/// All of them, as Rust has them.
fn of_rust() -> String {
    let mut text = String::new();
    measured!(text, KvpoolKvGroup: base unit_bytes used_bytes layer_stride kv_stride head_stride scales_at row_bytes scales_per_row unit_tokens unit_shift units addressing sink_tokens ring_tokens num_layers num_kv_heads head_dim element_bytes format scale);
    measured!(text, KvpoolSeq: unit row_start rows first_position table_at reserved);
    measured!(text, KvpoolItem: seq first count split partial splits);
    measured!(text, KvpoolAppendParams: group pool k v token_slots num_tokens_at counts positions rope_cos rope_sin num_tokens layer rope rope_dims k_scale v_scale);
    measured!(text, KvpoolAttendParams: group pool q out lse seqs tables items num_items_at partial_acc partial_ml num_items max_partials layer window q_per_kv q_dtype out_dtype softmax_scale k_scale v_scale reserved);
    measured!(text, KvpoolCombineParams: out lse seqs items num_items_at partial_acc partial_ml num_items max_partials num_kv_heads head_dim q_per_kv out_dtype);
    measured!(text, KvpoolCopyPair: src_unit dst_unit first_token num_tokens);
    measured!(text, KvpoolCopyParams: group pool pairs num_pairs reserved);
    measured!(text, KvpoolGatherParams: group pool out table unit first_position num_tokens layer is_v static_scale);
    measured!(text, KvpoolRange: offset bytes);
    measured!(text, KvpoolFillParams: pool ranges num_ranges value);
    text
}

/// A program that prints the same of `params.h`.
fn program(lines: &str) -> String {
    let prints = lines.lines().map(|line| {
        let name = line.split(' ').next().unwrap();
        let value = match name.split_once('.') {
            Some((of, field)) => format!("offsetof({of}, {field})"),
            None => format!("sizeof({name})"),
        };
        format!("    std::printf(\"{name} %zu\\n\", {value});\n")
    });
    let prints: String = prints.collect();
    format!(
        "#include <cstddef>\n#include <cstdio>\n#include \"params.h\"\nint main() {{\n{prints}}}\n"
    )
}

#[test]
fn the_bindings_have_the_sizes_and_offsets_of_params_h() {
    let ours = of_rust();
    // Nothing that the bindings have is left out above.
    let text = include_str!("../src/device/cuda/bindings.rs");
    let fields = text.lines().filter(|line| line.starts_with("    pub ")).count();
    let structs = text.lines().filter(|line| line.starts_with("pub struct ")).count();
    assert_eq!(ours.lines().count(), fields + structs, "a struct or a field is not measured");

    let folder = tempfile::tempdir().unwrap();
    let (source, binary) = (folder.path().join("measure.cpp"), folder.path().join("measure"));
    std::fs::write(&source, program(&ours)).unwrap();
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("csrc/kernels");
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    let built = Command::new(compiler)
        .args(["-std=c++17", "-I"])
        .arg(kernels)
        .arg("-o")
        .arg(&binary)
        .arg(&source)
        .output()
        .unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let theirs = Command::new(&binary).output().unwrap();
    assert_eq!(String::from_utf8(theirs.stdout).unwrap(), ours);
}
