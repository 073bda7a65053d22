#!/usr/bin/env python3
"""Perplexity of a model over a text by a program that shares nothing with kvpool: what `kvpool quality` must give.

Usage: benches/peers/perplexity.py MODEL.gguf TEXT [--windows 8] [--window-tokens 1024] [--begin yes|no]

Needs gguf, numpy and llama-cpp-python (which makes the tokens). The weights are expanded to f32, and every
window is computed at once, from the formulas, without a cache. Llama and Gemma-3. Windows follow each
other from the text's first token on; with --begin (left out: as the model's file says) each begins with the
token that texts begin with. Takes minutes.
"""

import argparse

import numpy as np


class Model:
    """The weights of a GGUF file in f32."""

    def __init__(self, path):
        from gguf import GGUFReader, dequantize

        reader = GGUFReader(path)
        self.weights = {one.name: dequantize(one.data, one.tensor_type).astype(np.float32) for one in reader.tensors}
        fields = {name: field.contents() for name, field in reader.fields.items() if name.count(".") < 4}
        name = fields["general.architecture"]
        of = lambda key, default=None: fields.get(f"{name}.{key}", default)
        self.gemma = name == "gemma3"
        assert self.gemma or name == "llama", f"{name} is not known"
        self.layers, self.dim = of("block_count"), of("embedding_length")
        self.heads, self.kv_heads = of("attention.head_count"), of("attention.head_count_kv")
        self.head_dim = of("attention.key_length", self.dim // self.heads)
        self.eps, self.theta = of("attention.layer_norm_rms_epsilon"), of("rope.freq_base", 10000.0)
        self.window = of("attention.sliding_window", 0)
        self.begins = fields.get("tokenizer.ggml.add_bos_token", self.gemma)
        self.output = self.weights.get("output.weight", self.weights["token_embd.weight"])

    def norm(self, x, weights):
        squares = (x * x).mean(-1, keepdims=True, dtype=np.float64)
        return (x / np.sqrt(squares + self.eps)).astype(np.float32) * weights

    def rotate(self, x, theta):
        """`x`: [tokens, heads, head_dim]. Llama's pairs are adjacent, Gemma's half a vector apart."""
        angle = np.arange(len(x))[:, None] * theta ** (-np.arange(0, self.head_dim, 2) / self.head_dim)
        cos, sin = np.cos(angle).astype(np.float32)[:, None], np.sin(angle).astype(np.float32)[:, None]
        half = self.head_dim // 2
        first, second = (slice(half), slice(half, None)) if self.gemma else (slice(0, None, 2), slice(1, None, 2))
        out = np.empty_like(x)
        out[..., first] = x[..., first] * cos - x[..., second] * sin
        out[..., second] = x[..., first] * sin + x[..., second] * cos
        return out

    def attention(self, q, k, v, window):
        q_at, k_at = np.indices((len(q), len(q)))
        seen = (k_at <= q_at) & ((q_at - k_at < window) if window else True)
        out = np.empty_like(q)
        for head in range(self.heads):
            of = head // (self.heads // self.kv_heads)
            scores = q[:, head] @ k[:, of].T / np.float32(self.head_dim**0.5)
            scores = np.where(seen, scores, -np.inf)
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, head] = shares / shares.sum(-1, keepdims=True) @ v[:, of]
        return out.reshape(len(q), -1)

    def layer(self, index, x):
        weight = lambda part: self.weights[f"blk.{index}.{part}.weight"]
        # Of Gemma-3's layers every sixth sees everything.
        windowed = self.gemma and (index + 1) % 6 != 0
        theta = 10000.0 if windowed else self.theta
        normed = self.norm(x, weight("attn_norm"))
        split = lambda part, heads: (normed @ weight(part).T).reshape(len(x), heads, self.head_dim)
        q, k, v = split("attn_q", self.heads), split("attn_k", self.kv_heads), split("attn_v", self.kv_heads)
        if self.gemma:
            q, k = self.norm(q, weight("attn_q_norm")), self.norm(k, weight("attn_k_norm"))
        out = self.attention(self.rotate(q, theta), self.rotate(k, theta), v, self.window if windowed else 0)
        out = out @ weight("attn_output").T
        x = x + (self.norm(out, weight("post_attention_norm")) if self.gemma else out)
        normed = self.norm(x, weight("ffn_norm"))
        gate, up = normed @ weight("ffn_gate").T, normed @ weight("ffn_up").T
        if self.gemma:
            gate = 0.5 * gate * (1 + np.tanh(np.float32((2 / np.pi) ** 0.5) * (gate + 0.044715 * gate**3)))
        else:
            gate = gate / (1 + np.exp(-gate))
        out = (gate * up) @ weight("ffn_down").T
        return x + (self.norm(out, weight("post_ffw_norm")) if self.gemma else out)

    def losses(self, tokens):
        """The negative logarithm of each token's share but the first's."""
        x = self.weights["token_embd.weight"][tokens[:-1]]
        if self.gemma:
            x = x * np.float32(self.dim**0.5)
        for index in range(self.layers):
            x = self.layer(index, x)
        x = self.norm(x, self.weights["output_norm.weight"])
        losses = []
        for at in range(0, len(x), 128):
            scores = x[at : at + 128] @ self.output.T
            most = scores.max(-1, keepdims=True)
            sums = np.log(np.exp(scores - most).sum(-1, dtype=np.float64)) + most[:, 0]
            rows = np.arange(len(scores))
            losses.append(sums - scores[rows, tokens[at + 1 + rows]])
        return np.concatenate(losses)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--window-tokens", type=int, default=1024)
    parser.add_argument("--begin", choices=["yes", "no"])
    args = parser.parse_args()
    import llama_cpp

    model = Model(args.model)
    tokenizer = llama_cpp.Llama(args.model, vocab_only=True, verbose=False)
    with open(args.text, encoding="utf-8") as file:
        tokens = tokenizer.tokenize(file.read().encode(), add_bos=False)
    begins = args.begin == "yes" if args.begin else model.begins
    begin = [tokenizer.token_bos()] if begins else []
    of_text = args.window_tokens - len(begin)
    losses = []
    for window in range(args.windows):
        part = begin + tokens[window * of_text : (window + 1) * of_text]
        losses.append(model.losses(np.array(part)))
        print(f"window {window + 1}: {np.exp(losses[-1].mean()):.3f}", flush=True)
    losses = np.concatenate(losses)
    error = losses.std(ddof=1) / len(losses) ** 0.5
    print(f"{len(losses)} predicted, perplexity {np.exp(losses.mean()):.4f} ± {np.exp(losses.mean()) * error:.2f}")


if __name__ == "__main__":
    main()
