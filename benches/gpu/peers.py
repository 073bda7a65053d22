#!/usr/bin/env python3
"""PyTorch and FlashInfer on the shapes of `benches/gpu.sh`, timed with the GPU's events.

    peers.py RESULTS.json [--tiny]

Reads what the benchmark of kvpool wrote, times each shape of decode, prefill and append that was
measured in f16 with whichever of the two is installed, prints the figures and adds them to the
file as "peers". Figures are of one layer; layers enough that no cache holds them take turns.
"""

import json
import re
import sys

FOOTPRINT = 1 << 30
PAGE = 64


def say_skipped(why):
    print(f"PyTorch and FlashInfer: skipped: {why}")


def parse(name):
    """The numbers of a shape's name, or None for a copy."""
    heads = re.match(r"(\w+)/q(\d+)kv(\d+)d(\d+)/", name)
    operation, q_heads, kv_heads, dim = heads[1], *map(int, heads.groups()[1:])
    shape = {"operation": operation, "q_heads": q_heads, "kv_heads": kv_heads, "dim": dim, "batch": 1}
    if operation == "decode":
        batch, context = re.search(r"batch(\d+)/context(\d+)", name).groups()
        return shape | {"batch": int(batch), "context": int(context), "rows": 1}
    if operation == "prefill":
        before, rows = re.search(r"(\d+)\+(\d+)$", name).groups()
        return shape | {"context": int(before) + int(rows), "rows": int(rows)}
    if operation == "append":
        rows = int(re.search(r"tokens(\d+)$", name)[1])
        return shape | {"context": rows, "rows": rows}
    return None


class Torch:
    """scaled_dot_product_attention over contiguous caches [sequence, head, token, element]."""

    name = "torch sdpa"

    def __init__(self, torch, shape, layers):
        self.torch, self.shape = torch, shape
        size = (shape["batch"], shape["kv_heads"], shape["context"], shape["dim"])
        self.caches = [[torch.randn(size, device="cuda", dtype=torch.float16) for _ in "kv"]
                       for _ in range(layers)]
        q = (shape["batch"], shape["q_heads"], shape["rows"], shape["dim"])
        self.q = torch.randn(q, device="cuda", dtype=torch.float16)
        self.new = torch.randn(size, device="cuda", dtype=torch.float16)
        self.mask = None
        if 1 < shape["rows"] < shape["context"]:
            before = shape["context"] - shape["rows"]
            ones = torch.ones(shape["rows"], shape["context"], device="cuda", dtype=torch.bool)
            self.mask = ones.tril(before)

    def layer(self, k, v):
        if self.shape["operation"] == "append":
            k.copy_(self.new)
            v.copy_(self.new)
            return
        self.torch.nn.functional.scaled_dot_product_attention(
            self.q, k, v, attn_mask=self.mask, enable_gqa=True,
            is_causal=self.shape["rows"] == self.shape["context"] > 1)

    def run(self):
        for k, v in self.caches:
            self.layer(k, v)


class FlashInfer:
    """Paged decode and prefill with pages of 64 tokens in no order."""

    name = "flashinfer"

    def __init__(self, torch, shape, layers):
        import flashinfer
        per_seq = -(-shape["context"] // PAGE)
        pages = shape["batch"] * per_seq
        size = (pages, 2, PAGE, shape["kv_heads"], shape["dim"])
        self.caches = [torch.randn(size, device="cuda", dtype=torch.float16) for _ in range(layers)]
        rows = shape["batch"] * shape["rows"]
        self.q = torch.randn((rows, shape["q_heads"], shape["dim"]), device="cuda",
                             dtype=torch.float16)
        def integers(numbers):
            return torch.tensor(numbers, device="cuda", dtype=torch.int32)
        indptr = integers([seq * per_seq for seq in range(shape["batch"] + 1)])
        indices = torch.randperm(pages, device="cuda").to(torch.int32)
        last = integers([shape["context"] - (per_seq - 1) * PAGE] * shape["batch"])
        room = torch.empty(128 << 20, device="cuda", dtype=torch.uint8)
        heads = (shape["q_heads"], shape["kv_heads"], shape["dim"], PAGE)
        if shape["operation"] == "decode":
            group = shape["q_heads"] // shape["kv_heads"]
            self.wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                room, "NHD", use_tensor_cores=group >= 4)
            self.wrapper.plan(indptr, indices, last, *heads, q_data_type=torch.float16,
                              kv_data_type=torch.float16)
        else:
            self.wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(room, "NHD")
            queries = integers([seq * shape["rows"] for seq in range(shape["batch"] + 1)])
            self.wrapper.plan(queries, indptr, indices, last, *heads, causal=True,
                              q_data_type=torch.float16)

    def run(self):
        for cache in self.caches:
            self.wrapper.run(self.q, cache)


def measure(torch, kind, shape, rounds):
    """Microseconds of one layer."""
    stored = shape["batch"] * shape["context"] * shape["kv_heads"] * shape["dim"] * 2 * 2
    layers = min(max(-(-FOOTPRINT // stored), 2), 32)
    case = kind(torch, shape, layers)
    times = []
    for _ in range(rounds + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        case.run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / layers)
    return sorted(times[3:])[rounds // 2], stored


def main():
    path, tiny = sys.argv[1], "--tiny" in sys.argv
    with open(path) as file:
        results = json.load(file)
    if results.get("emulated"):
        return say_skipped("the GPU is emulated")
    try:
        import torch
    except ImportError:
        return say_skipped("this Python has no torch")
    if not torch.cuda.is_available():
        return say_skipped("torch sees no GPU")
    peers = []
    names = dict.fromkeys(row["shape"] for row in results["measurements"])
    for name in names:
        shape = parse(name)
        if shape is None:
            continue
        for kind in (Torch, FlashInfer):
            if kind is FlashInfer and shape["operation"] == "append":
                continue
            try:
                us, stored = measure(torch, kind, shape, 2 if tiny else 20)
            except Exception as error:  # one that is missing or has no room for it
                print(f"{kind.name} {name}: skipped: {type(error).__name__}: {error}")
                continue
            moved = stored * (2 if shape["operation"] == "append" else 1)
            gbps = moved / us / 1e3
            print(f"{kind.name + ' ' + name:<58} {us:10.1f} us {gbps:8.1f} GB/s "
                  f"{gbps / results['copy_gbps']:6.3f} of a copy")
            peers.append({"peer": kind.name, "shape": name, "microseconds": us, "gbps": gbps})
            torch.cuda.empty_cache()
    results["peers"] = peers
    with open(path, "w") as file:
        json.dump(results, file, indent=2)
        file.write("\n")


if __name__ == "__main__":
    main()
