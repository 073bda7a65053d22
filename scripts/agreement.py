#!/usr/bin/env python3
"""How far completions of one cache format agree with those of another.

Usage: scripts/agreement.py REFERENCE.jsonl OTHER.jsonl…    (files of `kvpool generate --batch`)

For each other file: how many answers are equal to the letter, how much of an answer is equal on
average before the first difference, and BLEU and chrF of its answers against the reference's, by
sacrebleu (pip install sacrebleu).
"""

import json
import sys


def answers(path):
    """The texts of a file by line and number."""
    texts = {}
    with open(path, encoding="utf-8") as lines:
        for line in map(json.loads, lines):
            for number, one in enumerate(line["completions"]):
                texts[line["line"], number] = one["text"]
    return texts


def common(a, b):
    """The share of the longer text before the first difference."""
    length = max(len(a), len(b))
    same = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    return same / length if length else 1.0


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    import sacrebleu

    reference = answers(sys.argv[1])
    print(f"{'file':40} {'equal':>12} {'until first difference':>24} {'BLEU':>7} {'chrF':>7}")
    for path in sys.argv[2:]:
        other = answers(path)
        if other.keys() != reference.keys():
            sys.exit(f"{path}: has not the same prompts and answers as {sys.argv[1]}")
        keys = sorted(reference)
        ours, theirs = [other[key] for key in keys], [reference[key] for key in keys]
        equal = sum(a == b for a, b in zip(ours, theirs))
        prefix = sum(map(common, ours, theirs)) / len(keys)
        bleu = sacrebleu.corpus_bleu(ours, [theirs]).score
        chrf = sacrebleu.corpus_chrf(ours, [theirs]).score
        print(
            f"{path:40} {equal:5} of {len(keys):3} {100 * prefix:22.1f} % {bleu:7.2f} {chrf:7.2f}"
        )


if __name__ == "__main__":
    main()
