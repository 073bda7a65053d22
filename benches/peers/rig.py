"""What all runners share: the data, the check against a reference, the clock, the conversation.

A runner is a class with

- `name`: the peer,
- `__init__(threads)`,
- `versions()`: names and versions of what is measured,
- `variants(shape)`: a list of `Variant`, empty where the peer has nothing to offer.

`main` runs it alone and prints a line for each variant, or, with `--serve`, answers the
requests of `compare.py`: one JSON object a line on standard input, one on standard output.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shapes import SHAPES

# Caches of all layers together, for each variant: far more than any L3. Prefill computes on each
# byte for long, so what the caches hold hardly matters, and its layers have large outputs.
FOOTPRINT = {"decode": 512_000_000, "append": 512_000_000, "prefill": 64_000_000}
# Tokens that each layer's cache holds when appending is measured.
APPEND_TOKENS = 4096
CALLS_MIN = 3
# Seconds after which fewer calls must do.
PATIENCE = 1.0


@dataclass
class Variant:
    """One way in which a peer can do the work of a shape."""

    label: str
    format: str
    bits: int  # 16 or 8: which column it competes in; more than 16 bits compete with 16
    calls: list[Callable[[], object]]  # visited in turn
    layers_per_call: int = 1
    error: float | None = None  # largest error / largest value, against the values before storage


def layer_count(shape, values, bytes_per_value):
    """Layers whose K and V, `values` numbers in all for each, fill the footprint; at least 2."""
    return max(2, math.ceil(FOOTPRINT[shape.operation] / (values * bytes_per_value)))


class Data:
    """Normally distributed q, k and v of a shape: [sequence, token, head, element]."""

    def __init__(self, shape):
        self.shape = shape
        # A prime period, so that no two heads or tokens hold the same row.
        normal = np.random.default_rng(7).standard_normal(1_000_003, dtype=np.float32)
        tokens = shape.rows if shape.operation == "append" else shape.context
        kv = (shape.seqs, tokens, shape.kv_heads, shape.head_dim)
        self.k = np.resize(normal, kv)
        self.v = np.resize(np.roll(normal, 500_009), kv)
        q = (shape.seqs, shape.rows, shape.q_heads, shape.head_dim)
        self.q = np.resize(normal[::-1], q)

    def causal_mask(self):
        """[row, key]: 0 where the new token sees the key, -inf elsewhere."""
        shape = self.shape
        keys = np.arange(shape.context)
        last = shape.cached + np.arange(shape.rows)
        return np.where(keys <= last[:, None], 0.0, -np.inf).astype(np.float32)

    def reference(self, seq, row):
        """Attention of one new token: [query head, element]."""
        shape = self.shape
        seen = shape.cached + row + 1
        k, v = self.k[seq, :seen], self.v[seq, :seen]
        q = self.q[seq, row].reshape(shape.kv_heads, shape.group, shape.head_dim)
        scores = np.einsum("hgd,shd->hgs", q, k) / math.sqrt(shape.head_dim)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return np.einsum("hgs,shd->hgd", weights, v).reshape(shape.q_heads, -1)

    def error(self, out):
        """Compares the first and the last token of `out`, [sequence, row, head, element]."""
        worst = 0.0
        for seq, row in ((0, 0), (self.shape.seqs - 1, self.shape.rows - 1)):
            right = self.reference(seq, row)
            worst = max(worst, np.abs(out[seq, row] - right).max() / np.abs(right).max())
        return float(worst)


def time_variant(variant, seconds):
    """Times the calls in turn; gives the figures of one layer."""
    clock = time.perf_counter
    variant.calls[-1]()  # wakes threads and clocks; is not counted
    times = []
    spent = 0.0
    while spent < seconds or (len(times) < CALLS_MIN and spent < PATIENCE):
        call = variant.calls[len(times) % len(variant.calls)]
        before = clock()
        call()
        times.append(clock() - before)
        spent += times[-1]
    times.sort()
    scale = 1e6 / variant.layers_per_call
    return {
        "label": variant.label,
        "format": variant.format,
        "bits": variant.bits,
        "median_us": times[len(times) // 2] * scale,
        "min_us": times[0] * scale,
        "calls": len(times),
        "error": variant.error,
    }


def measure(variants, seconds, labels=None):
    """Times the named variants, or all, one after the other."""
    chosen = [v for v in variants if labels is None or v.label in labels]
    return [time_variant(variant, seconds) for variant in chosen]


def serve(peer, requests, answers):
    """Answers `open` a shape, `time` it, `close` it, until the input ends."""

    def answer(value):
        print(json.dumps(value), file=answers, flush=True)

    answer({"name": peer.name, "versions": peer.versions()})
    shapes = {shape.name: shape for shape in SHAPES}
    variants = []
    for line in requests:
        request = json.loads(line)
        if request["do"] == "open":
            variants = peer.variants(shapes[request["shape"]])
            answer([variant.label for variant in variants])
        elif request["do"] == "time":
            answer(measure(variants, request["seconds"], request["labels"]))
        elif request["do"] == "close":
            variants = []
            answer([])


def run_alone(peer, name_part, seconds):
    """Prints a line for each variant of each chosen shape."""
    print(peer.name, peer.versions())
    for shape in SHAPES:
        if name_part not in shape.name:
            continue
        for got in measure(peer.variants(shape), seconds):
            error = "" if got["error"] is None else f"  error {got['error']:.4f}"
            print(
                f"{shape.name:28} {got['label']:24} {got['median_us']:10.1f} us"
                f"  ({got['calls']} calls){error}",
                flush=True,
            )


def main(peer_class):
    """The command line of a runner."""
    parser = argparse.ArgumentParser(description=f"times {peer_class.name}")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each variant")
    parser.add_argument("--filter", default="", help="part of the shapes' names")
    parser.add_argument("--serve", action="store_true", help="answer compare.py")
    args = parser.parse_args()
    if not args.serve:
        run_alone(peer_class(args.threads), args.filter, args.seconds)
        return
    # Libraries that print must not disturb the conversation.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(peer_class(args.threads), sys.stdin, answers)
