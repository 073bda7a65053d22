#!/usr/bin/env python3
"""Measures `kvpool bench` and the peers side by side and prints peer time / our time.

All programs stay open while a shape is measured and take turns, so that what else happens on
the machine meets all of them alike. See README.md.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path

from shapes import SHAPES

HERE = Path(__file__).resolve().parent
RUNNERS = ("bench_torch.py", "bench_zentorch.py", "bench_vllm.py", "bench_ggml.py")
# After the first round only what can still win is run: within this factor of the fastest.
KEPT_WITHIN = 1.5
# Lets the threads of the one before fall asleep.
PAUSE_SECONDS = 0.2


class Runner:
    """A peer's process, and the conversation with it."""

    def __init__(self, script, python, threads):
        self.name = script.removeprefix("bench_").removesuffix(".py")
        self.errors = tempfile.TemporaryFile("w+")
        command = [python, HERE / script, "--serve", "--threads", str(threads)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
            text=True,
        )
        self.versions = self.answer()["versions"]

    def answer(self):
        line = self.process.stdout.readline()
        if line:
            return json.loads(line)
        self.process.wait()
        self.errors.seek(0)
        said = self.errors.read().strip().splitlines() or ["no message"]
        raise RuntimeError(said[-1])

    def ask(self, **request):
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return self.answer()

    def end(self):
        self.process.stdin.close()
        self.process.wait()


class Contest:
    """The peers that still answer, at one thread count."""

    def __init__(self, python, threads):
        self.threads = threads
        self.runners = []
        for script in RUNNERS:
            try:
                self.runners.append(Runner(script, python, threads))
            except (OSError, RuntimeError) as error:
                note(f"{script} is left out: {error}")

    def versions(self):
        return {name: v for runner in self.runners for name, v in runner.versions.items()}

    def each(self, action):
        """Calls `action(runner)`; a peer that fails takes no further part."""
        for runner in list(self.runners):
            try:
                action(runner)
            except (OSError, RuntimeError) as error:
                note(f"{runner.name} fails and is left out from here on: {error}")
                self.runners.remove(runner)

    def end(self):
        for runner in self.runners:
            runner.end()


def note(text):
    print(text, file=sys.stderr, flush=True)


def run_ours(args, shape, threads):
    """The results of one short run of our own program for one shape."""
    variants = len(args.formats.split(",")) * len(args.modes.split(","))
    command = [args.kvpool, "bench", shape.operation, "--json", "--filter", shape.name]
    command += ["--threads", str(threads), "--seconds", str(args.seconds * variants)]
    command += ["--formats", args.formats, "--modes", args.modes]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    results = json.loads(done.stdout)["results"]
    return [one for one in results if one["shape"] == shape.name]


def in_the_race(rounds):
    """The peers' variants that one round left within reach of the fastest of as many bits."""
    fastest = {}
    for one in rounds:
        fastest[one["bits"]] = min(fastest.get(one["bits"], one["median_us"]), one["median_us"])
    return [
        (one["peer"], one["label"])
        for one in rounds
        if one["median_us"] <= KEPT_WITHIN * fastest[one["bits"]]
    ]


def peers_turn(args, contest, kept):
    """Lets every peer time its variants, or those that are kept."""
    results = []

    def ask(runner):
        time.sleep(PAUSE_SECONDS)
        labels = kept and [label for peer, label in kept if peer == runner.name]
        found = runner.ask(do="time", seconds=args.seconds, labels=labels)
        results.extend({"peer": runner.name, **one} for one in found)

    contest.each(ask)
    return results


def compare_shape(args, contest, shape):
    """All rounds of one shape: what was measured of us, and of the peers."""
    ours, peers = [], []
    contest.each(lambda runner: runner.ask(do="open", shape=shape.name))
    kept = None
    for number in range(args.rounds):
        time.sleep(PAUSE_SECONDS)
        ours += [{"round": number, **one} for one in run_ours(args, shape, contest.threads)]
        of_peers = peers_turn(args, contest, kept)
        peers += [{"round": number, **one} for one in of_peers]
        kept = kept or in_the_race(of_peers)
    contest.each(lambda runner: runner.ask(do="close"))
    return ours, peers


def medians(rounds, key):
    """For each key the entry of its median round, by median time."""
    groups = {}
    for one in rounds:
        groups.setdefault(key(one), []).append(one)
    middle = {}
    for name, entries in groups.items():
        entries.sort(key=lambda one: one["median_us"])
        middle[name] = entries[(len(entries) - 1) // 2]
    return middle


def fastest_peers(peers):
    """The fastest variant that took part in all rounds, by bits."""
    last = max((one["round"] for one in peers), default=0)
    stayed = {(one["peer"], one["label"]) for one in peers if one["round"] == last}
    best = {}
    for name, one in medians(peers, lambda one: (one["peer"], one["label"])).items():
        bits = one["bits"]
        if name in stayed and (bits not in best or one["median_us"] < best[bits]["median_us"]):
            best[bits] = one
    return best


def rows_of(shape, threads, ours, peers):
    """A row of the table for each of our formats and modes."""
    best = fastest_peers(peers)
    rows = []
    for (mode, form), one in medians(ours, lambda one: (one["mode"], one["format"])).items():
        row = {
            "shape": shape.name,
            "threads": threads,
            "format": form,
            "mode": mode,
            "path": one["path"],
            "median_us": one["median_us"],
            "gbps": one["gbps"],
            "dram_gbps": one["dram_gbps"],
            "fraction": one["fraction"],
        }
        for bits in (16, 8):
            peer = best.get(bits)
            row[f"peer_{bits}"] = peer and {
                "name": f"{peer['peer']} {peer['label']}",
                "median_us": peer["median_us"],
                "error": peer["error"],
                "ratio": peer["median_us"] / one["median_us"],
            }
        rows.append(row)
    return rows


COLUMNS = (
    *("shape", "threads", "ours", "us", "% of DRAM"),
    *("fastest f16/bf16 peer", "us", "ratio", "fastest 8-bit peer", "us", "ratio"),
)


def print_cells(cells):
    print("| " + " | ".join(cells) + " |", flush=True)


def microseconds(value):
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def peer_cells(peer):
    if peer is None:
        return ["-", "", ""]
    return [peer["name"], microseconds(peer["median_us"]), f"{peer['ratio']:.2f}"]


def print_row(row):
    # How near memory's speed: means nothing where arithmetic or a cache is the limit.
    fraction = f"{100 * row['fraction']:.0f}" if row["shape"].startswith("decode") else ""
    cells = [row["shape"], str(row["threads"]), f"{row['format']} {row['mode']}"]
    cells += [microseconds(row["median_us"]), fraction]
    cells += peer_cells(row["peer_16"]) + peer_cells(row["peer_8"])
    print_cells(cells)


def cpu_model():
    """The name, and the numbers that tell generations apart where the name does not."""
    first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    facts = dict(map(str.strip, line.split(":", 1)) for line in first.splitlines())
    return "{model name}, family {cpu family}, model {model}".format_map(facts)


def our_version(kvpool):
    done = subprocess.run([kvpool, "--version"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def machine(args):
    """When, where, and with what this was measured."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "load_average": os.getloadavg()[0],
        "command": " ".join(sys.argv),
        "rounds": args.rounds,
        "seconds": args.seconds,
        "versions": {"kvpool": our_version(args.kvpool), "python": platform.python_version()},
    }


def dram_speed(ours):
    """The median of what was read per second, by thread count."""
    speeds = {}
    for one in ours:
        speeds.setdefault(str(one["threads"]), []).append(one["dram_gbps"])
    return {threads: statistics.median(values) for threads, values in speeds.items()}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kvpool", nargs="?", default="target/release/kvpool", help="our program")
    parser.add_argument("--venv", type=Path, default=HERE / ".venv", help="made by setup.sh")
    parser.add_argument("--filter", default="", help="part of the shapes' names")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--formats", default="f16,bf16,int8", help="ours")
    parser.add_argument("--modes", default="paged", help="ours")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3, help="for a variant in a round")
    parser.add_argument("--quick", action="store_true", help="one round of 0.05 seconds")
    parser.add_argument("--out", type=Path, help="where to write everything as JSON")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.seconds = 1, 0.05
    return args


def main():
    args = arguments()
    report = machine(args)
    rows, ours, peers = [], [], []
    print_cells(COLUMNS)
    print_cells(["---"] * len(COLUMNS))
    for threads in map(int, args.threads.split(",")):
        contest = Contest(str(args.venv / "bin" / "python"), threads)
        report["versions"] |= contest.versions()
        for shape in SHAPES:
            if args.filter not in shape.name:
                continue
            of_us, of_peers = compare_shape(args, contest, shape)
            place = {"shape": shape.name, "threads": threads}
            ours += of_us
            peers += [place | one for one in of_peers]
            for row in rows_of(shape, threads, of_us, of_peers):
                print_row(row)
                rows.append(row)
        contest.end()
    report["dram_gbps"] = dram_speed(ours)
    report |= {"table": rows, "kvpool": ours, "peers": peers}
    read = ", ".join(f"{t} threads {gbps:.1f} GB/s" for t, gbps in report["dram_gbps"].items())
    print(f"\n{report['date']}, {report['cpu']}, DRAM read at {read}\n{report['versions']}")
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
