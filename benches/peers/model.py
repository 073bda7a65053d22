#!/usr/bin/env python3
"""New tokens a second of one model, beside llama.cpp on the same file with the same threads, in turns.

Usage: benches/peers/model.py CONFIG MODEL.gguf [--context 128,4096] [--tokens 32] [--rounds 7]
       [--threads 2] [--kvpool target/release/kvpool] [--json FILE]

CONFIG names MODEL.gguf. Needs llama-cpp-python (pip install llama-cpp-python numpy). In each round
kvpool writes with an f16 and an INT8 cache, then llama.cpp with f16, f16 with flash attention, and
q8_0 with flash attention; medians over the rounds. Tokens are fixed, nothing is sampled. llama.cpp has read a
text; kvpool's context is made up (`kvpool bench model --made-up`), which takes as long to attend to.
llama.cpp does not say what its attention takes: "grown" is what a token takes more than with the
shortest context, which is attention's growth in either program.
"""

import argparse
import json
import statistics
import subprocess
import time

# llama.cpp's types of K and V.
PEERS = [("llama.cpp f16", 1, False), ("llama.cpp f16, flash", 1, True), ("llama.cpp q8_0, flash", 8, True)]


def llama_writer(path, context, tokens, threads, kind, flash):
    """A function that writes some tokens behind a context, and gives the milliseconds of one."""
    import llama_cpp

    model = llama_cpp.Llama(
        path, n_ctx=context + tokens + 8, n_threads=threads, n_threads_batch=threads, n_batch=256,
        n_ubatch=256, verbose=False, type_k=kind, type_v=kind, flash_attn=flash,
    )
    text = "The harbour was quiet in the early morning, and the boats lay side by side at the pier. "
    prompt = model.tokenize(text.encode() * (context // 15 + 1), add_bos=False)[:context]
    assert len(prompt) == context
    model.eval(prompt)
    ctx = model._ctx.ctx
    memory = llama_cpp.llama_get_memory(ctx)

    def write():
        began = time.perf_counter()
        for at in range(tokens):
            one = (llama_cpp.llama_token * 1)(prompt[at % context])
            assert llama_cpp.llama_decode(ctx, llama_cpp.llama_batch_get_one(one, 1)) == 0
            llama_cpp.llama_get_logits(ctx)
        took = time.perf_counter() - began
        llama_cpp.llama_memory_seq_rm(memory, 0, context, -1)
        return 1000 * took / tokens

    write.model = model
    return write


def kvpool(args, context):
    """Milliseconds of a token, and of attention in it, for each format."""
    command = [
        args.kvpool, "bench", "model", args.config, "--json", "--made-up", "--formats", "f16,int8", "--rounds", "3",
        "--context", str(context), "--tokens", str(args.tokens), "--set", f"device.threads={args.threads}",
    ]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {f"kvpool {one['format']}": (one["write_ms"], one["attention_ms"]) for one in json.loads(out)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("model")
    parser.add_argument("--context", default="128,4096")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kvpool", default="target/release/kvpool")
    parser.add_argument("--json")
    args = parser.parse_args()
    contexts = [int(context) for context in args.context.split(",")]
    writers = {
        (name, context): llama_writer(args.model, context, args.tokens, args.threads, kind, flash)
        for context in contexts
        for name, kind, flash in PEERS
    }
    times, attention = {}, {}
    for _ in range(args.rounds):
        for context in contexts:
            for name, (took, of_it) in kvpool(args, context).items():
                times.setdefault((name, context), []).append(took)
                attention.setdefault((name, context), []).append(of_it)
            for name, _, _ in PEERS:
                times.setdefault((name, context), []).append(writers[name, context]())
    median = {key: statistics.median(all_of_them) for key, all_of_them in times.items()}
    rows = []
    print(f"{'':24} {'context':>8} {'tokens/s':>9} {'ms':>7} {'(least, most)':>16} {'attention':>10} {'grown':>7}")
    for (name, context), took in median.items():
        grown = took - median[name, contexts[0]]
        of_it = statistics.median(attention[name, context]) if (name, context) in attention else None
        least, most = min(times[name, context]), max(times[name, context])
        share = "-" if of_it is None else f"{of_it:.2f}"
        print(
            f"{name:24} {context:8} {1000 / took:9.1f} {took:7.2f} {f'({least:.2f}, {most:.2f})':>16} {share:>10} {grown:7.2f}"
        )
        rows.append({
            "name": name, "context": context, "ms": took, "least_ms": least, "most_ms": most,
            "attention_ms": of_it, "grown_ms": grown,
        })
    if args.json:
        with open(args.json, "w", encoding="utf-8") as out:
            json.dump({"model": args.model.split("/")[-1], "threads": args.threads, "rounds": args.rounds, "rows": rows}, out, indent=1)


if __name__ == "__main__":
    main()
