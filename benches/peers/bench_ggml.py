"""llama.cpp on the CPU: ggml's operations, through the library built by `setup.sh`.

- flash: flash attention over llama.cpp's own layout, in which a token's heads are neighbours.
- flash by head: the same operation over caches in which a head's tokens are neighbours. This is
  not how llama.cpp stores them; it shows the operation at its best.
- matmul: llama.cpp with flash attention switched off; V is stored transposed (f16 only).
- set rows: new K and V in f32 written into the caches. Short writes go into one graph for
  several layers, as llama.cpp has all layers in one: what it costs to start is not theirs.
"""

import ctypes
import math
import sys
from ctypes import POINTER, c_bool, c_float, c_int, c_int64, c_size_t, c_uint8, c_void_p
from pathlib import Path

import numpy as np

from rig import APPEND_TOKENS, Data, Variant, layer_count, main

LIBRARIES = Path(sys.prefix) / "ggml"

# ggml's numbers for types and for the precision of sums.
F32, F16, Q8_0, I64 = 0, 1, 8, 27
PRECISION_F32 = 10
# Tokens that one graph writes at least when appending is measured, all its layers together.
GRAPH_TOKENS = 256
FORMATS = {"f16": (F16, 16), "q8_0": (Q8_0, 8)}


class InitParams(ctypes.Structure):
    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]


# Functions by library: result, then arguments.
BASE = {
    "ggml_version": (ctypes.c_char_p,),
    "ggml_init": (c_void_p, InitParams),
    "ggml_free": (None, c_void_p),
    "ggml_row_size": (c_size_t, c_int, c_int64),
    "ggml_nbytes": (c_size_t, c_void_p),
    "ggml_get_data": (c_void_p, c_void_p),
    "ggml_new_tensor": (c_void_p, c_void_p, c_int, c_int, POINTER(c_int64)),
    "ggml_view_4d": (c_void_p, c_void_p, c_void_p, *[c_int64] * 4, *[c_size_t] * 4),
    "ggml_permute": (c_void_p, c_void_p, c_void_p, *[c_int] * 4),
    "ggml_cont": (c_void_p, c_void_p, c_void_p),
    "ggml_flash_attn_ext": (c_void_p, *[c_void_p] * 5, *[c_float] * 3),
    "ggml_mul_mat": (c_void_p, *[c_void_p] * 3),
    "ggml_soft_max_ext": (c_void_p, *[c_void_p] * 3, *[c_float] * 2),
    "ggml_set_rows": (c_void_p, *[c_void_p] * 4),
    "ggml_prec_set_acc": (c_bool, c_void_p, c_int),
    "ggml_new_graph_custom": (c_void_p, c_void_p, c_size_t, c_bool),
    "ggml_build_forward_expand": (None, c_void_p, c_void_p),
    "ggml_quantize_chunk": (
        *[c_size_t, c_int, POINTER(c_float), c_void_p],
        *[c_int64, c_int64, c_int64, POINTER(c_float)],
    ),
    "ggml_backend_alloc_ctx_tensors": (c_void_p, c_void_p, c_void_p),
    "ggml_backend_buffer_free": (None, c_void_p),
    "ggml_backend_buffer_clear": (None, c_void_p, c_uint8),
    "ggml_backend_graph_compute": (c_int, c_void_p, c_void_p),
}
CPU = {
    "ggml_backend_cpu_init": (c_void_p,),
    "ggml_backend_cpu_set_n_threads": (None, c_void_p, c_int),
}


class Library:
    """The C functions as attributes."""

    def __init__(self):
        for file, functions in (("libggml-base.so", BASE), ("libggml-cpu.so", CPU)):
            library = ctypes.CDLL(str(LIBRARIES / file), mode=ctypes.RTLD_GLOBAL)
            for name, (result, *arguments) in functions.items():
                function = getattr(library, name)
                function.restype, function.argtypes = result, arguments
                setattr(self, name.removeprefix("ggml_"), function)


ggml = Library()


class Context:
    """Tensors and graphs, and the memory of their data once `allocate` was called."""

    def __init__(self, backend):
        self.backend = backend
        self.buffer = None
        self.raw = ggml.init(InitParams(64 << 20, None, True))

    def __del__(self):
        ggml.backend_buffer_free(self.buffer)
        ggml.free(self.raw)

    def tensor(self, kind, *sizes):
        """Sizes from the innermost dimension outwards."""
        return ggml.new_tensor(self.raw, kind, len(sizes), (c_int64 * len(sizes))(*sizes))

    def graph(self, *results):
        graph = ggml.new_graph_custom(self.raw, 256, False)
        for result in results:
            ggml.build_forward_expand(graph, result)
        return graph

    def allocate(self):
        self.buffer = ggml.backend_alloc_ctx_tensors(self.raw, self.backend)
        if not self.buffer:
            raise MemoryError("ggml could not allocate its tensors")
        # The first touch of memory is the system's time, not the peer's.
        ggml.backend_buffer_clear(self.buffer, 0)

    def compute(self, graph):
        ggml.backend_graph_compute(self.backend, graph)


def store(tensor, kind, values):
    """Converts f32 values into a tensor's memory."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    row = values.shape[-1]
    source = values.ctypes.data_as(POINTER(c_float))
    ggml.quantize_chunk(kind, source, ggml.get_data(tensor), 0, values.size // row, row, None)


def copy(target, source):
    ctypes.memmove(ggml.get_data(target), ggml.get_data(source), ggml.nbytes(source))


def load(tensor, shape):
    """The values of an f32 tensor."""
    pointer = ctypes.cast(ggml.get_data(tensor), POINTER(c_float))
    return np.ctypeslib.as_array(pointer, shape)


class Layout:
    """How the elements of a cache follow each other.

    Arrays are [sequence, token, head, element]; `by_head` has the tokens inside the heads.
    """

    def __init__(self, by_head, kind, shape):
        self.by_head, self.kind, self.shape = by_head, kind, shape

    def arrange(self, values):
        return values.transpose(0, 2, 1, 3) if self.by_head else values

    def view(self, context, tensor):
        """[element, token, head, sequence], as the attention operations want it."""
        shape = self.shape
        head = ggml.row_size(self.kind, shape.head_dim)
        tokens, heads = shape.context, shape.kv_heads
        sequence = tokens * heads * head
        if self.by_head:
            sizes, steps = (tokens, heads), (head, tokens * head)
            return ggml.view_4d(
                context.raw, tensor, shape.head_dim, *sizes, shape.seqs, *steps, sequence, 0
            )
        sizes, steps = (heads, tokens), (head, heads * head)
        view = ggml.view_4d(
            context.raw, tensor, shape.head_dim, *sizes, shape.seqs, *steps, sequence, 0
        )
        return ggml.permute(context.raw, view, 0, 2, 1, 3)


def query(context, shape):
    """The tensor [element, head, row, sequence], and its view [element, row, head, sequence]."""
    q = context.tensor(F32, shape.head_dim, shape.q_heads, shape.rows, shape.seqs)
    return q, ggml.permute(context.raw, q, 0, 2, 1, 3)


def new_caches(context, kind, shape):
    """K and V of every layer, one dimension each."""
    values = shape.seqs * shape.context * shape.kv_heads * shape.head_dim
    bytes_per_value = ggml.row_size(kind, 1024) / 1024
    layers = range(layer_count(shape, 2 * values, bytes_per_value))
    return [(context.tensor(kind, values), context.tensor(kind, values)) for _ in layers]


def fill(layers, kind, k, v):
    store(layers[0][0], kind, k)
    store(layers[0][1], kind, v)
    for k_tensor, v_tensor in layers[1:]:
        copy(k_tensor, layers[0][0])
        copy(v_tensor, layers[0][1])


def attention_variant(context, label, name, results, data):
    """One graph for each layer; `results` give [element, head, row, sequence]."""
    shape = data.shape
    graphs = [context.graph(result) for result in results]
    calls = [lambda graph=graph: context.compute(graph) for graph in graphs]
    calls[0]()
    out = load(results[0], (shape.seqs, shape.rows, shape.q_heads, shape.head_dim))
    return Variant(f"{label} {name}", name, FORMATS[name][1], calls, error=data.error(out))


def flash(backend, data, name, by_head):
    shape = data.shape
    kind = FORMATS[name][0]
    context = Context(backend)
    q, q_view = query(context, shape)
    mask = context.tensor(F16, shape.context, shape.rows, 1, 1)
    layout = Layout(by_head, kind, shape)
    layers = new_caches(context, kind, shape)
    scale = 1 / math.sqrt(shape.head_dim)
    results = []
    for pair in layers:
        k, v = (layout.view(context, tensor) for tensor in pair)
        result = ggml.flash_attn_ext(context.raw, q_view, k, v, mask, scale, 0, 0)
        ggml.prec_set_acc(result, PRECISION_F32)
        results.append(result)
    context.allocate()
    store(q, F32, data.q)
    store(mask, F16, data.causal_mask())
    fill(layers, kind, layout.arrange(data.k), layout.arrange(data.v))
    label = "flash by head" if by_head else "flash"
    return attention_variant(context, label, name, results, data)


def matmul(backend, data):
    shape = data.shape
    context = Context(backend)
    q, q_view = query(context, shape)
    mask = context.tensor(F32, shape.context, shape.rows, 1, 1)
    layout = Layout(False, F16, shape)
    layers = new_caches(context, F16, shape)
    scale = 1 / math.sqrt(shape.head_dim)
    row = 2 * shape.context
    steps = (row, row * shape.head_dim, row * shape.head_dim * shape.kv_heads)
    results = []
    for k, v in layers:
        sizes = (shape.context, shape.head_dim, shape.kv_heads, shape.seqs)
        v_view = ggml.view_4d(context.raw, v, *sizes, *steps, 0)
        scores = ggml.mul_mat(context.raw, layout.view(context, k), q_view)
        ggml.prec_set_acc(scores, PRECISION_F32)
        weights = ggml.soft_max_ext(context.raw, scores, mask, scale, 0)
        by_head = ggml.mul_mat(context.raw, v_view, weights)
        results.append(ggml.cont(context.raw, ggml.permute(context.raw, by_head, 0, 2, 1, 3)))
    context.allocate()
    store(q, F32, data.q)
    store(mask, F32, data.causal_mask())
    fill(layers, F16, data.k, data.v.transpose(0, 2, 3, 1))
    return attention_variant(context, "matmul", "f16", results, data)


def append(backend, data, name):
    """Some layers in each graph, at a new place each time."""
    shape = data.shape
    kind, bits = FORMATS[name]
    row = shape.kv_heads * shape.head_dim
    context = Context(backend)
    new = [context.tensor(F32, row, shape.rows) for _ in range(2)]
    places = context.tensor(I64, shape.rows)
    layers = layer_count(shape, 2 * row * APPEND_TOKENS, ggml.row_size(kind, row) / row)
    per_graph = max(1, GRAPH_TOKENS // shape.rows)
    graphs = []
    for _ in range(math.ceil(layers / per_graph)):
        targets = [context.tensor(kind, row, APPEND_TOKENS) for _ in range(2 * per_graph)]
        pairs = zip(targets, new * per_graph, strict=True)
        writes = [ggml.set_rows(context.raw, target, source, places) for target, source in pairs]
        graphs.append(context.graph(*writes))
    context.allocate()
    store(new[0], F32, data.k)
    store(new[1], F32, data.v)

    def call(graph, rows):
        ctypes.memmove(ggml.get_data(places), rows.ctypes.data, rows.nbytes)
        context.compute(graph)

    calls = [
        lambda graph=graph, rows=rows: call(graph, rows)
        for rows in np.arange(APPEND_TOKENS, dtype=np.int64).reshape(-1, shape.rows)
        for graph in graphs
    ]
    return Variant(f"set rows {name}", name, bits, calls, layers_per_call=per_graph)


class Ggml:
    name = "llama.cpp"

    def __init__(self, threads):
        self.backend = ggml.backend_cpu_init()
        ggml.backend_cpu_set_n_threads(self.backend, threads)

    def versions(self):
        return {"ggml": ggml.version().decode()}

    def variants(self, shape):
        data = Data(shape)
        if shape.operation == "append":
            return [append(self.backend, data, name) for name in FORMATS]
        found = [
            flash(self.backend, data, name, by_head)
            for name in FORMATS
            for by_head in (False, True)
        ]
        return [*found, matmul(self.backend, data)]


if __name__ == "__main__":
    main(Ggml)
