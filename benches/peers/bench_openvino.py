"""OpenVINO on the CPU: its PagedAttention operation, in models that consist of nothing else.

One call appends the new tokens and attends to all, which the operation does not do apart: there
is nothing to compare with an append. Blocks have 32 tokens, the only size, in random order. The
caches of several layers are filled and read by one model, as in use: what a call costs to start
is not the attention's.

The names are the cache's format and, where q, k, v and the output are not in f32, theirs. Other
pairs do not exist: with bf16 activations an f16 cache becomes bf16.
"""

import math
from functools import partial

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from openvino.op import _PagedAttentionExtension as PagedAttention

from rig import Data, Variant, layer_count, main

BLOCK = 32
# Layers of one model: when one token of each sequence is new, and when many are.
DECODE_LAYERS, PREFILL_LAYERS = 8, 1
# Tokens that are stored by one call while the caches are filled.
FILL_TOKENS = 1024
# Label: format, dtype of q, k, v and the output, dtype of the cache, bits that it is compared
# with, bytes of a value.
FORMATS = {
    "f16": ("f16", ov.Type.f32, "f16", 16, 2),
    "bf16": ("bf16", ov.Type.bf16, "bf16", 16, 2),
    "f32": ("f32", ov.Type.f32, "f32", 16, 4),
    "u8": ("u8", ov.Type.f32, "u8", 8, 1),
    "u8, q in bf16": ("u8", ov.Type.bf16, "u8", 8, 1),
}
INDICES = ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins")


def tensor(values, dtype):
    """An array as a tensor; bf16 by its bits, rounded to the nearest, for numpy has no bf16."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    made = ov.Tensor(dtype, ov.Shape(values.shape))
    if dtype == ov.Type.bf16:
        bits = values.view(np.uint32)
        made.data.view(np.uint16)[...] = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    else:
        made.data[...] = values
    return made


def to_float(made):
    """The values of such a tensor."""
    if made.element_type == ov.Type.bf16:
        return (made.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return made.data


def empty(port, blocks):
    """A cache as a model's input wants it. Written, so that its memory is there."""
    sizes = [size.get_length() for size in list(port.partial_shape)[1:]]
    made = ov.Tensor(port.element_type, ov.Shape([blocks, *sizes]))
    made.data.view(np.uint8)[...] = 0
    return made


def absent(rank, dtype=np.int32):
    """The input of something that this comparison has no use for."""
    return ops.constant(np.zeros((0,) * rank), dtype=dtype)


def attention_op(shape, tensors, caches):
    """The operation for one layer."""
    zero = ops.constant(0, dtype=np.int32)
    inputs = [
        *(tensors["q"], tensors["k"], tensors["v"], *caches),
        *(tensors[name] for name in INDICES),
        ops.constant(1 / math.sqrt(shape.head_dim), dtype=np.float32),
        zero,  # sliding window
        absent(1, np.float32),  # slopes of ALiBi
        tensors["max_context_len"],
        absent(1),  # rows whose scores are wanted
        *(absent(1), absent(2), absent(2, np.float32)),  # rotation of cached keys
        *(absent(1, np.float32), zero, zero),  # sparse attention
        absent(4, np.float32),  # sinks
        *(zero, absent(1), absent(1), absent(1), absent(1)),  # eviction, token types
        *(absent(1, np.uint8), absent(1)),  # masks between new tokens
    ]
    node = PagedAttention([made.output(0) for made in inputs])
    facts = node.get_rt_info()
    facts["num_k_heads"] = facts["num_v_heads"] = shape.kv_heads
    facts["k_head_size"] = facts["v_head_size"] = shape.head_dim
    return node


def compiled(core, threads, shape, layers, dtype, cache_format):
    """A model of so many layers that all get the same q, k and v."""
    inputs = []

    def parameter(name, sizes, dtype):
        made = ops.parameter(sizes, dtype, name=name)
        made.output(0).tensor.set_names({name})
        inputs.append(made)
        return made

    row = {name: shape.kv_heads * shape.head_dim for name in "kv"}
    row["q"] = shape.q_heads * shape.head_dim
    tensors = {name: parameter(name, [-1, row[name]], dtype) for name in "qkv"}
    tensors |= {name: parameter(name, [-1], ov.Type.i32) for name in INDICES}
    tensors["max_context_len"] = parameter("max_context_len", [], ov.Type.i32)
    results = []
    for layer in range(layers):
        rank_4 = ov.PartialShape.dynamic(4)
        caches = [parameter(f"{name}_{layer}", rank_4, ov.Type.dynamic) for name in "kv"]
        results.append(ops.result(attention_op(shape, tensors, caches).output(0)))
    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": dtype,
        "KV_CACHE_PRECISION": cache_format,
    }
    return core.compile_model(ov.Model(results, inputs, "attention"), "CPU", settings)


class PagedCaches:
    """Requests of one model that each have caches of their own, all with the same blocks.

    What the layers give goes to the same places, as the memory of a model's layers does.
    """

    def __init__(self, core, threads, data, label):
        self.data, shape = data, data.shape
        self.name, self.dtype, cache_format, self.bits, value_bytes = FORMATS[label]
        per_seq = math.ceil(shape.context / BLOCK)
        blocks = np.random.default_rng(7).permutation(shape.seqs * per_seq)
        self.table = blocks.astype(np.int32).reshape(shape.seqs, per_seq)
        values = 2 * shape.seqs * shape.context * shape.kv_heads * shape.head_dim
        layers = layer_count(shape, values, value_bytes)
        most = DECODE_LAYERS if shape.rows == 1 else PREFILL_LAYERS
        self.layers = min(most, layers)
        model = compiled(core, threads, shape, self.layers, self.dtype, cache_format)
        self.requests = []
        for _ in range(math.ceil(layers / self.layers)):
            request = model.create_infer_request()
            for port in model.inputs:
                if port.any_name[:2] in ("k_", "v_"):
                    request.set_tensor(port, empty(port, blocks.size))
            self.requests.append(request)

    def set_step(self, tokens, past, new, blocks):
        """What each sequence has, gets, and in which blocks it lies. `tokens` chooses q, k, v."""
        arrays = {
            "past_lens": past,
            "subsequence_begins": np.concatenate(([0], np.cumsum(new))),
            "block_indices": np.concatenate(blocks),
            "block_indices_begins": np.concatenate(([0], np.cumsum([len(b) for b in blocks]))),
            "max_context_len": np.max(np.add(past, new)),
        }
        made = {name: ov.Tensor(np.array(a, dtype=np.int32)) for name, a in arrays.items()}
        made |= {name: tensor(values, self.dtype) for name, values in tokens.items()}
        for request in self.requests:
            for name, value in made.items():
                request.set_tensor(name, value)

    def fill(self):
        """Stores the cached tokens; each block as a sequence, so that attention costs little."""
        shape = self.data.shape
        pieces = [
            (seq, start, min(start + BLOCK, shape.cached))
            for seq in range(shape.seqs)
            for start in range(0, shape.cached, BLOCK)
        ]
        at_once = FILL_TOKENS // BLOCK
        for first in range(0, len(pieces), at_once):
            now = pieces[first : first + at_once]
            new = [end - start for _, start, end in now]
            tokens = {
                name: np.concatenate([values[seq, start:end] for seq, start, end in now])
                for name, values in (("k", self.data.k), ("v", self.data.v))
            }
            tokens = {name: values.reshape(sum(new), -1) for name, values in tokens.items()}
            tokens["q"] = np.zeros((sum(new), shape.q_heads * shape.head_dim))
            blocks = [self.table[seq, start // BLOCK, None] for seq, start, _ in now]
            self.set_step(tokens, [0] * len(now), new, blocks)
            for request in self.requests:
                request.infer(share_outputs=True)

    def set_timed_step(self):
        """The tokens of the shape's step, and where the outputs go."""
        data, shape = self.data, self.data.shape
        new = shape.seqs * shape.rows
        k, v = (values[:, shape.cached :].reshape(new, -1) for values in (data.k, data.v))
        tokens = {"q": data.q.reshape(new, -1), "k": k, "v": v}
        rows = [shape.rows] * shape.seqs
        self.set_step(tokens, [shape.cached] * shape.seqs, rows, list(self.table))
        outs = [tensor(tokens["q"], self.dtype) for _ in range(self.layers)]
        for request in self.requests:
            for number, out in enumerate(outs):
                request.set_output_tensor(number, out)


def attention(core, threads, data, label):
    shape = data.shape
    caches = PagedCaches(core, threads, data, label)
    caches.fill()
    caches.set_timed_step()
    # Shared: the output is not copied for Python.
    calls = [partial(request.infer, share_outputs=True) for request in caches.requests]
    for call in calls:
        call()  # a request's first call prepares it
    out = to_float(caches.requests[0].get_output_tensor(0))
    error = data.error(out.reshape(shape.seqs, shape.rows, shape.q_heads, shape.head_dim))
    return Variant(
        f"paged {BLOCK} {label}", caches.name, caches.bits, calls, caches.layers, error=error
    )


class Openvino:
    name = "OpenVINO"

    def __init__(self, threads):
        self.core, self.threads = ov.Core(), threads

    def versions(self):
        return {"openvino": ov.__version__.split("-")[0]}

    def variants(self, shape):
        if shape.operation == "append":
            return []
        data = Data(shape)
        return [attention(self.core, self.threads, data, label) for label in FORMATS]


if __name__ == "__main__":
    main(Openvino)
