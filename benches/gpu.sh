#!/usr/bin/env bash
# The CUDA device's speed on this machine's GPU, beside a copy in its memory and, where they are
# installed, beside PyTorch and FlashInfer on the same shapes.
#
#   benches/gpu.sh [--tiny] [--filter TEXT] [--out FILE.json]
#
# On a GPU that these kernels have never run on, run the tests of P5 on it first:
#   KVPOOL_CUDA=require KVPOOL_TEST_DEVICE=cuda cargo test --release --locked --test main one_answer::
# This program looks for itself only whether a few answers are right and the same in every mode, and
# whether a row is the same alone, in a chunk, and beside a long prompt.
#
# Needs a GPU with its driver, and either Rust and nvcc, to build, or a program that was built
# elsewhere: KVPOOL_GPU_BENCH=PATH (what `cargo bench --bench gpu --no-run` names). Nothing is
# downloaded but the crates that are built.
#
# --tiny       small sizes, so that it gets through on the emulated driver:
#                LD_LIBRARY_PATH=<folder of csrc/emulator's libcuda.so> benches/gpu.sh --tiny
#              (the figures then mean nothing, and the report says so)
# --filter     only shapes whose name contains this, such as decode or batch64
# --out        the results as JSON (default benches/results/gpu-<card>-<date>.json; none with --tiny)
# PYTHON       the Python that has PyTorch or FlashInfer (default python3)
set -euo pipefail
cd "$(dirname "$0")/.."

tiny=() filter=() out=""
while [ $# -gt 0 ]; do
    case $1 in
    --tiny) tiny=(--tiny) ;;
    --filter) filter=(--filter "${2:?--filter needs a text}") && shift ;;
    --out) out=${2:?--out needs a file} && shift ;;
    *)
        sed -n '2,/^set /p' "$0" | sed '$d; s/^# \{0,1\}//' >&2
        exit 2
        ;;
    esac
    shift
done

program=${KVPOOL_GPU_BENCH:-}
if [ -z "$program" ]; then
    command -v cargo >/dev/null || {
        echo "gpu.sh: no cargo to build with; install Rust, or set KVPOOL_GPU_BENCH to a built program" >&2
        exit 2
    }
    # The emulated driver needs no kernels of nvcc's.
    if [ ${#tiny[@]} -eq 0 ]; then export KVPOOL_CUDA=${KVPOOL_CUDA:-require}; fi
    program=$(cargo bench --locked --bench gpu --no-run --message-format=json-render-diagnostics |
        grep '"kind":\["bench"\]' |
        sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -n 1)
fi
[ -x "$program" ] || {
    echo "gpu.sh: $program is no program" >&2
    exit 2
}

results=$(mktemp)
trap 'rm -f "$results"' EXIT
"$program" "${tiny[@]}" "${filter[@]}" --out "$results"
"${PYTHON:-python3}" benches/gpu/peers.py "$results" "${tiny[@]}"

if [ -z "$out" ] && [ ${#tiny[@]} -eq 0 ]; then
    card=$(sed -n 's/^ *"name": "\(.*\)",*$/\1/p' "$results" | head -n 1 | tr -cs 'A-Za-z0-9\n' '-')
    out=benches/results/gpu-${card%-}-$(date +%F).json
fi
if [ -n "$out" ]; then
    mkdir -p "$(dirname "$out")"
    cp "$results" "$out"
    echo "results in $out"
fi
