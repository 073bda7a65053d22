"""AMD's zentorch: its attention kernel over the same caches as PyTorch's, in bf16 (it has no f16).

- sdpa: as models call it.
- folded: the query heads of a group laid into the query's length.
"""

import sys
from pathlib import Path

import torch

# Installed beside the environment's packages, not among them: vLLM would load it as a plugin.
sys.path.append(str(Path(sys.prefix) / "zentorch"))

import zentorch  # noqa: E402

from bench_torch import AttentionCase  # noqa: E402
from rig import Data, main  # noqa: E402


def attention(case):
    """Both ways."""
    sdpa_op = torch.ops.zentorch.zentorch_sdpa
    causal = case.starts_empty
    mask = None if causal else case.mask

    def sdpa(layer):
        k, v = case.k[layer], case.v[layer]
        return sdpa_op(case.q, k, v, is_causal=causal, attn_mask=mask)[0]

    def folded(layer):
        k, v = case.k[layer], case.v[layer]
        return sdpa_op(case.folded_q, k, v, attn_mask=case.folded_mask)[0]

    ways = {"sdpa": sdpa, "folded": folded}
    if case.shape.group == 1:
        del ways["folded"]
    return [case.variant(label, "bf16", call) for label, call in ways.items()]


class Zentorch:
    name = "zentorch"

    def __init__(self, threads):
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)

    def versions(self):
        return {"zentorch": zentorch.__version__}

    def variants(self, shape):
        if shape.operation == "append":
            return []
        return attention(AttentionCase(Data(shape), torch.bfloat16))


if __name__ == "__main__":
    main(Zentorch)
