#!/usr/bin/env python3
"""New tokens a second of one model, beside llama.cpp on the same file with the same threads, in turns.

Usage: benches/peers/model.py CONFIG MODEL.gguf [--context 128,4096] [--tokens 32] [--rounds 7]
       [--threads 2] [--kvpool target/release/kvpool] [--json FILE]

CONFIG names MODEL.gguf. Needs llama-cpp-python (pip install llama-cpp-python numpy). In each round
kvpool writes with an f16 and an INT8 cache, then llama.cpp with f16, f16 with flash attention, and
q8_0 with flash attention; medians over the rounds. Tokens are fixed, nothing is sampled. llama.cpp has read a
text; kvpool's context is made up (`kvpool bench model --made-up`), which takes as long to attend to.

"attention" is the time of storing K and V and of attending, in all layers. kvpool measures its own.
llama.cpp is asked in a second context with the same state, by its callback on computed nodes: it computes
a layer's nodes from the first that stores to the output of attention in one piece, which is timed; what
starting a piece costs, timed on pieces that compute nothing, is taken off. "grown" is what a token
takes more than with the shortest context: attention, and what it pushes out of the processor's caches.
"""

import argparse
import ctypes
import datetime
import json
import pathlib
import platform
import statistics
import subprocess
import sys
import time

# llama.cpp's types of K and V.
PEERS = [("llama.cpp f16", 1, False), ("llama.cpp f16, flash", 1, True), ("llama.cpp q8_0, flash", 8, True)]
TEXT = "The harbour was quiet in the early morning, and the boats lay side by side at the pier. "


class Pieces:
    """Has llama.cpp compute each layer's attention in a piece of its own, and times it.

    For every node of a step llama.cpp asks whether it may compute all up to it, and calls again when
    it has. So a piece lasts from the question that ends it to that call.
    """

    def __init__(self, llama_cpp):
        library = llama_cpp.llama_cpp._lib
        self.name, self.kind = library.ggml_get_name, library.ggml_op_desc
        for function in (self.name, self.kind):
            function.restype, function.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
        self.callback = llama_cpp.llama_cpp.ggml_backend_sched_eval_callback(self.call)
        self.nodes = []  # of a step, in order
        self.ends = {}  # which of them end a piece, and what it holds
        self.at, self.began, self.attention, self.empty = 0, 0.0, 0.0, []

    def call(self, node, ask, _):
        if not ask:
            what = self.ends[self.at - 1]
            if what == "attention":
                self.attention += time.perf_counter() - self.began
            elif what == "empty":
                self.empty.append(time.perf_counter() - self.began)
            return True
        self.at += 1
        if not self.ends:
            self.nodes.append((self.kind(node).decode(), self.name(node).decode()))
            return False
        if self.at - 1 in self.ends:
            self.began = time.perf_counter()
            return True
        return False

    def choose(self):
        """Cuts the step that was seen: before a layer's first store, and behind its attention."""
        stores = 0
        for at, (kind, name) in enumerate(self.nodes):
            if kind == "SET_ROWS":
                stores += 1
                if stores % 2 == 1:
                    self.ends[at - 1] = "before"
            elif name.startswith("kqv_out") and stores == 2 * (list(self.ends.values()).count("attention") + 1):
                # A second node of this name turns a quantised cache's output back, which is not timed.
                self.ends[at] = "attention"
            elif kind == "RESHAPE" and self.nodes[at - 1][0] == "MUL_MAT" and at - 1 not in self.ends:
                # A piece of one node that only names what is there.
                self.ends[at - 1] = "before"
                self.ends[at] = "empty"
        layers = list(self.ends.values()).count("attention")
        assert layers > 0 and stores == 2 * layers and "empty" in self.ends.values(), "an unknown graph"
        return layers


class Writer:
    """llama.cpp behind a context."""

    def __init__(self, path, context, tokens, threads, kind, flash):
        import llama_cpp

        self.lib, self.context, self.tokens = llama_cpp, context, tokens
        arguments = {
            "n_ctx": context + tokens + 8, "n_threads": threads, "n_threads_batch": threads, "n_batch": 256,
            "n_ubatch": 256, "verbose": False, "type_k": kind, "type_v": kind, "flash_attn": flash,
        }
        self.plain = llama_cpp.Llama(path, **arguments)
        self.prompt = self.plain.tokenize(TEXT.encode() * (context // 15 + 1), add_bos=False)[:context]
        assert len(self.prompt) == context
        self.plain.eval(self.prompt)
        # Another one with the same state, which computes in pieces. `Llama` has no argument for it.
        self.pieces = Pieces(llama_cpp)
        defaults = llama_cpp.llama_cpp.llama_context_default_params

        def with_callback():
            params = defaults()
            params.cb_eval = self.pieces.callback
            return params

        llama_cpp.llama_cpp.llama_context_default_params = with_callback
        try:
            self.watched = llama_cpp.Llama(path, **arguments)
        finally:
            llama_cpp.llama_cpp.llama_context_default_params = defaults
        self.watched.load_state(self.plain.save_state())
        self.pieces.nodes.clear()
        self.write(self.watched, 1)
        self.layers = self.pieces.choose()

    def write(self, model, tokens):
        """Milliseconds of one of some tokens. The context is as before afterwards."""
        lib, ctx = self.lib, model._ctx.ctx
        began = time.perf_counter()
        for at in range(tokens):
            self.pieces.at = 0
            one = (lib.llama_token * 1)(self.prompt[at % self.context])
            assert lib.llama_decode(ctx, lib.llama_batch_get_one(one, 1)) == 0
            lib.llama_get_logits(ctx)
        took = time.perf_counter() - began
        lib.llama_memory_seq_rm(lib.llama_get_memory(ctx), 0, self.context, -1)
        return 1000 * took / tokens

    def attention(self):
        """Milliseconds of a token's attention."""
        self.pieces.attention, self.pieces.empty = 0.0, []
        self.write(self.watched, self.tokens)
        # The median: a piece that was disturbed is no measure of what starting one costs.
        starting = statistics.median(self.pieces.empty) * self.layers
        return 1000 * (self.pieces.attention / self.tokens - starting)


def kvpool(args, context):
    """Milliseconds of a token, and of attention in it, for each format."""
    command = [
        args.kvpool, "bench", "model", args.config, "--json", "--made-up", "--formats", "f16,int8", "--rounds", "3",
        "--context", str(context), "--tokens", str(args.tokens), "--set", f"device.threads={args.threads}",
    ]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {f"kvpool {one['format']}": (one["write_ms"], one["attention_ms"]) for one in json.loads(out)}


def processor():
    """The processor, as Linux names it."""
    lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if sys.platform == "linux" else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} cores of {names[0]}" if names else platform.processor()


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
    import llama_cpp

    contexts = [int(context) for context in args.context.split(",")]
    writers = {
        (name, context): Writer(args.model, context, args.tokens, args.threads, kind, flash)
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
                writer = writers[name, context]
                times.setdefault((name, context), []).append(writer.write(writer.plain, args.tokens))
                attention.setdefault((name, context), []).append(writer.attention())
    median = {key: statistics.median(all_of_them) for key, all_of_them in times.items()}
    rows = []
    print(f"{'':24} {'context':>8} {'tokens/s':>9} {'ms':>7} {'(least, most)':>16} {'attention':>10} {'share':>6} {'grown':>7}")
    for (name, context), took in median.items():
        grown = took - median[name, contexts[0]]
        of_it = statistics.median(attention[name, context])
        least, most = min(times[name, context]), max(times[name, context])
        print(
            f"{name:24} {context:8} {1000 / took:9.1f} {took:7.2f} {f'({least:.2f}, {most:.2f})':>16} {of_it:10.2f}"
            f" {100 * of_it / took:4.0f} % {grown:7.2f}"
        )
        rows.append({
            "name": name, "context": context, "ms": took, "least_ms": least, "most_ms": most,
            "attention_ms": of_it, "least_attention_ms": min(attention[name, context]),
            "most_attention_ms": max(attention[name, context]), "grown_ms": grown,
        })
    if args.json:
        result = {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "machine": f"{processor()}, {platform.system()} {platform.release()}",
            "command": " ".join(["benches/peers/model.py", *sys.argv[1:]]),
            "llama_cpp_python": llama_cpp.__version__, "model": args.model.split("/")[-1],
            "threads": args.threads, "tokens": args.tokens, "rounds": args.rounds, "rows": rows,
        }
        with open(args.json, "w", encoding="utf-8") as out:
            json.dump(result, out, indent=1)
            out.write("\n")


if __name__ == "__main__":
    main()
