"""PyTorch on the CPU: attention over contiguous caches, [sequence, head, token, element].

- sdpa: scaled_dot_product_attention with `enable_gqa`.
- folded: the same function, the query heads of a group laid into the query's length. The
  result is the same and faster; no framework does it by itself.
- matmul: two matrix products and a softmax. Only in bf16: in f16 PyTorch's products take more
  than ten times as long.
- copy: new K and V copied into the cache.
"""

import math

import torch
import torch.nn.functional as F

from rig import APPEND_TOKENS, Data, Variant, layer_count, main

FORMATS = {"bf16": torch.bfloat16, "f16": torch.float16}


def head_major(values, dtype):
    """[sequence, token, head, element] to a tensor [sequence, head, token, element]."""
    return torch.from_numpy(values).to(dtype).permute(0, 2, 1, 3).contiguous()


class AttentionCase:
    """Caches of enough layers in one dtype, and q as each way of computing wants it."""

    def __init__(self, data, dtype):
        self.data = data
        shape = self.shape = data.shape
        k, v = head_major(data.k, dtype), head_major(data.v, dtype)
        layers = layer_count(shape, 2 * k.numel(), k.element_size())
        self.k = [k.clone() for _ in range(layers)]
        self.v = [v.clone() for _ in range(layers)]
        self.q = head_major(data.q, dtype)
        folded = (shape.seqs, shape.kv_heads, shape.group * shape.rows, shape.head_dim)
        self.folded_q = self.q.view(folded)
        self.mask = self.folded_mask = None
        if shape.rows > 1:
            self.mask = torch.from_numpy(data.causal_mask()).to(dtype)
            self.folded_mask = self.mask.repeat(shape.group, 1)

    @property
    def starts_empty(self):
        """Whether the mask is the plain triangle, which kernels know without being given it."""
        return self.shape.rows > 1 and self.shape.cached == 0

    def error(self, out):
        """Of an output in either layout."""
        shape = self.shape
        by_head = out.float().reshape(shape.seqs, shape.q_heads, shape.rows, shape.head_dim)
        return self.data.error(by_head.permute(0, 2, 1, 3).numpy())

    def variant(self, label, name, call):
        """A variant that calls `call(layer)` for each layer in turn."""
        calls = [lambda layer=layer: call(layer) for layer in range(len(self.k))]
        return Variant(f"{label} {name}", name, 16, calls, error=self.error(calls[0]()))


def attention(case, name):
    """The ways of a dtype."""
    shape = case.shape
    causal = case.starts_empty
    mask = None if causal else case.mask
    grouped = shape.group > 1

    def sdpa(layer):
        k, v = case.k[layer], case.v[layer]
        return F.scaled_dot_product_attention(
            case.q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped
        )

    def folded(layer):
        k, v = case.k[layer], case.v[layer]
        return F.scaled_dot_product_attention(case.folded_q, k, v, attn_mask=case.folded_mask)

    scaled = case.folded_q / math.sqrt(shape.head_dim)

    def matmul(layer):
        scores = torch.matmul(scaled, case.k[layer].transpose(-1, -2)).float()
        if case.folded_mask is not None:
            scores += case.folded_mask
        return torch.matmul(scores.softmax(-1).to(scaled.dtype), case.v[layer])

    ways = {"sdpa": sdpa, "folded": folded, "matmul": matmul}
    if not grouped:
        del ways["folded"]
    if name == "f16":
        del ways["matmul"]
    return [case.variant(label, name, call) for label, call in ways.items()]


def append(data, name, dtype):
    """Copies into [head, token, element] caches, at a new place each time."""
    shape = data.shape
    k, v = head_major(data.k, dtype)[0], head_major(data.v, dtype)[0]
    size = (shape.kv_heads, APPEND_TOKENS, shape.head_dim)
    layers = layer_count(shape, 2 * math.prod(size), k.element_size())
    caches = [
        (torch.zeros(size, dtype=dtype), torch.zeros(size, dtype=dtype)) for _ in range(layers)
    ]

    def copy(k_cache, v_cache, at):
        k_cache[:, at : at + shape.rows] = k
        v_cache[:, at : at + shape.rows] = v

    calls = [
        lambda cache=cache, at=at: copy(*cache, at)
        for at in range(0, APPEND_TOKENS, shape.rows)
        for cache in caches
    ]
    return Variant(f"copy {name}", name, 16, calls)


class Torch:
    name = "PyTorch"

    def __init__(self, threads):
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)

    def versions(self):
        return {"torch": torch.__version__}

    def variants(self, shape):
        data = Data(shape)
        if shape.operation == "append":
            return [append(data, name, dtype) for name, dtype in FORMATS.items()]
        found = []
        for name, dtype in FORMATS.items():
            found += attention(AttentionCase(data, dtype), name)
        return found


if __name__ == "__main__":
    main(Torch)
