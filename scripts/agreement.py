#!/usr/bin/env python3
"""How far completions of one cache format agree with those of another, and with references.

Usage: scripts/agreement.py FIRST.jsonl OTHER.jsonl…
       (files of `kvpool run` with [generate], or of `kvpool generate --batch`)

For each file: BLEU and chrF against the references, where each line's id is an object with a
"reference"; then, compared with the first file's answers: how many are equal to the letter, how much
of an answer is equal on average before the first difference, BLEU and chrF. By sacrebleu
(pip install sacrebleu).
"""

import json
import sys


def answers(path):
    """The texts of a file by line and number, and the references by line."""
    texts, references = {}, {}
    try:
        with open(path, encoding="utf-8") as lines:
            for line in map(json.loads, lines):
                if isinstance(line.get("id"), dict) and "reference" in line["id"]:
                    references[line["line"]] = line["id"]["reference"]
                for number, one in enumerate(line["completions"]):
                    texts[line["line"], number] = one["text"].strip()
    except OSError as error:
        sys.exit(f"{path}: {error.strerror}")
    except (ValueError, KeyError, TypeError, AttributeError):
        sys.exit(f"{path}: is no file of completions")
    if not texts:
        sys.exit(f"{path}: has no completions")
    return texts, references


def common(a, b):
    """The share of the longer text before the first difference."""
    length = max(len(a), len(b))
    same = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    return same / length if length else 1.0


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    try:
        import sacrebleu
    except ModuleNotFoundError:
        sys.exit("sacrebleu is missing: pip install sacrebleu")

    def scores(ours, theirs):
        bleu = sacrebleu.corpus_bleu(ours, [theirs]).score
        return f"{bleu:8.2f} {sacrebleu.corpus_chrf(ours, [theirs]).score:7.2f}"

    first, references = answers(sys.argv[1])
    keys = sorted(first)
    scored = bool(references) and all(line in references for line, _ in keys)
    head = "against references" if scored else "no references"
    print(f"{'':40} {head:>16}   {'compared with the first file':>50}")
    print(f"{'file':40} {'BLEU':>8} {'chrF':>7} {'equal':>13} {'until difference':>18} {'BLEU':>8} {'chrF':>7}")
    for path in sys.argv[1:]:
        other, _ = answers(path)
        if other.keys() != first.keys():
            sys.exit(f"{path}: has not the same prompts and answers as {sys.argv[1]}")
        ours, theirs = [other[key] for key in keys], [first[key] for key in keys]
        equal = sum(a == b for a, b in zip(ours, theirs))
        prefix = 100 * sum(map(common, ours, theirs)) / len(keys)
        against = scores(ours, [references[line] for line, _ in keys]) if scored else f"{'-':>8} {'-':>7}"
        print(
            f"{path[-40:]:40} {against} {equal:6} of {len(keys):3} {prefix:16.1f} % {scores(ours, theirs)}"
        )


if __name__ == "__main__":
    main()
