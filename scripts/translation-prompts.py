#!/usr/bin/env python3
"""Prompts of a translation set, for `kvpool run` with [generate]: English sentences into German.

Usage: scripts/translation-prompts.py > translation.jsonl

The first four pairs of examples/models/translation.tsv are the examples that every prompt begins
with, so that a model that was never taught to follow instructions knows what is asked; the others
are the set. The "reference" in each line's id comes through to the completions, where
scripts/agreement.py finds it.
"""

import json
import pathlib

PAIRS = pathlib.Path(__file__).parent.parent / "examples" / "models" / "translation.tsv"
SHOWN = 4


def main():
    lines = PAIRS.read_text(encoding="utf-8").splitlines()
    pairs = [line.split("\t") for line in lines]
    shown = "".join(f"English: {en}\nGerman: {de}\n\n" for en, de in pairs[:SHOWN])
    for english, german in pairs[SHOWN:]:
        prompt = {
            "id": {"reference": german},
            "prompt": f"{shown}English: {english}\nGerman:",
            "max_tokens": 40,
            "stop": ["\n"],
        }
        print(json.dumps(prompt, ensure_ascii=False))


if __name__ == "__main__":
    main()
