#!/usr/bin/env python3
"""Prompts of a chat, for `kvpool generate --batch`: several users over one system prompt, in turns.

Usage: scripts/chat-prompts.py [USERS [TURNS]] > chat.jsonl    (8 users, 4 turns)

Each turn's prompt is the whole conversation so far, as a chat server sends it. What was answered is
fixed, so that every run reads the same tokens.
"""

import json
import sys

SYSTEM = (
    "You are the assistant of a public library. You answer in one or two sentences, in plain words. "
    "You know the opening hours: Monday to Friday from nine to seven, Saturday from ten to four, and "
    "never on Sundays. Books can be borrowed for four weeks and extended twice, unless somebody waits "
    "for them. Films and games can be borrowed for one week. A card is free for children and costs ten "
    "euros a year for everybody else. The reading room on the second floor is quiet; the cafe on the "
    "ground floor is not. Printing costs ten cents a page. Rooms for groups are booked at the desk, for "
    "two hours at most. If you do not know something, say so, and name the desk's telephone number. "
) * 3

THINGS = ["a novel", "a map", "a film", "a game", "a score", "a newspaper", "an atlas", "a picture book"]
QUESTIONS = [
    "How long may I keep {}?",
    "And may I extend that, if nobody waits for it?",
    "Where can I read in peace until you close?",
    "What does it cost to print ten pages of {}?",
]
ANSWER = "Certainly. That is as the house rules say, and the desk will gladly help you with it."


def main():
    users = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    turns = int(sys.argv[2]) if len(sys.argv) > 2 else 4
    for turn in range(turns):
        for user in range(users):
            text = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"
            for past in range(turn + 1):
                question = QUESTIONS[past % len(QUESTIONS)].format(THINGS[user % len(THINGS)])
                text += f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
                if past < turn:
                    text += f"{ANSWER}<|im_end|>\n"
            print(json.dumps({"id": f"user {user}, turn {turn}", "prompt": text, "max_tokens": 16}))


if __name__ == "__main__":
    main()
