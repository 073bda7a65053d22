"""The shapes that are compared: those of `kvpool bench`, under the same names.

Needs only the standard library, so that `compare.py` runs under any Python.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """One call for one layer: heads, sequences, tokens."""

    operation: str  # decode, append or prefill
    q_heads: int
    kv_heads: int
    seqs: int
    cached: int  # tokens of each sequence before the call
    rows: int  # new tokens of each sequence
    head_dim: int = 128

    @property
    def name(self):
        heads = f"q{self.q_heads}kv{self.kv_heads}d{self.head_dim}"
        tokens = {
            "decode": f"{self.seqs}x{self.context}",
            "append": f"{self.rows}",
            "prefill": f"{self.cached}+{self.rows}",
        }
        return f"{self.operation}/{heads}/{tokens[self.operation]}"

    @property
    def title(self):
        """The name for people."""
        heads = f"{self.q_heads}/{self.kv_heads} heads"
        return {
            "decode": f"decode, {heads}, {self.seqs} × {self.context:,}",
            "append": f"append, {self.kv_heads} heads, {self.rows} tokens",
            "prefill": f"prefill, {heads}, {self.rows} after {self.cached:,}",
        }[self.operation]

    @property
    def context(self):
        """Keys that the last new token sees."""
        return self.cached + self.rows

    @property
    def group(self):
        """Query heads that share one KV head."""
        return self.q_heads // self.kv_heads

    @property
    def tokens(self):
        """Tokens whose K and V one call reads (decode, prefill) or writes (append)."""
        per_seq = self.rows if self.operation == "append" else self.context
        return self.seqs * per_seq


SHAPES = (
    # The context counts the new token.
    Shape("decode", 32, 8, 1, 4095, 1),
    Shape("decode", 32, 8, 1, 32767, 1),
    Shape("decode", 32, 8, 16, 2047, 1),
    Shape("decode", 32, 32, 1, 2047, 1),
    Shape("decode", 32, 32, 8, 2047, 1),
    Shape("append", 32, 8, 1, 0, 16),
    Shape("append", 32, 8, 1, 0, 512),
    Shape("prefill", 32, 8, 1, 0, 512),
    Shape("prefill", 32, 8, 1, 4096, 512),
)
