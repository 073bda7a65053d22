#!/usr/bin/env python3
"""Measures `kvpool bench` and the peers side by side and prints peer time / our time.

The peers stay open while a shape is measured and take turns with ours, so that what else happens
on the machine meets all of them alike. See README.md.
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

from report import ONE_TERM, contest_lines, dram, rows_of, threads_of
from shapes import SHAPES

HERE = Path(__file__).resolve().parent
RUNNERS = (
    *("bench_torch.py", "bench_zentorch.py", "bench_vllm.py"),
    *("bench_ggml.py", "bench_openvino.py"),
)
# After the first round only what can still win is run: within this factor of the fastest.
KEPT_WITHIN = 1.5
# What errs by more computes something else, and its time means nothing. fp8 at scale 1 stays below.
ERROR_MAX = 0.5
# Huge pages for the peers' caches, as ours has them.
PEERS_ENV = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
# Lets the threads of the one before fall asleep.
PAUSE_SECONDS = 0.2
# Cores are as far from each other as before while a cache line takes less than so many times as long: what
# is near here takes 50 to 130 ns, what is far 330 to 410.
SAME_DISTANCE = 2.3
# Rounds that are begun anew, for each that is wanted, because the cores moved.
TRIES = 6


class Runner:
    """A peer's process, and the conversation with it."""

    def __init__(self, script, python, threads):
        self.errors = tempfile.TemporaryFile("w+")
        command = [python, HERE / script, "--serve", "--threads", str(threads)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=os.environ | PEERS_ENV | {"OMP_NUM_THREADS": str(threads)},
            text=True,
        )
        hello = self.answer()
        self.name, self.versions = hello["name"], hello["versions"]

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


class Moved(Exception):
    """The cores are nearer each other, or farther apart, than when the round began."""


class Distance:
    """How far the cores are from each other, as `kvpool bench cores` finds it.

    A virtual machine's cores move: those that share a chiplet share its way to memory, and two threads on
    them read half as much. Only what was measured at one distance is compared.
    """

    def __init__(self, args, threads):
        self.command = threads > 1 and [args.kvpool, "bench", "cores", "--json"]
        self.line_ns = self.measure()

    def measure(self):
        if not self.command:
            return None
        done = subprocess.run(self.command, stdout=subprocess.PIPE, text=True, check=True)
        return json.loads(done.stdout)["results"][0]["line_ns"]

    def check(self):
        """Raises `Moved`, unless it is the same as in the beginning."""
        if not self.command:
            return
        # Where the machine was too busy to tell, nothing is known.
        now = self.measure()
        if now is None or self.line_ns is None:
            raise Moved
        if max(now, self.line_ns) > SAME_DISTANCE * min(now, self.line_ns):
            raise Moved


def run_ours(args, shape, threads):
    """The results of short runs of our own program for one shape.

    Where arithmetic is the limit, bf16 runs once more as peers in bf16 multiply.
    """
    results = run_kernels(args, shape, threads, args.formats, "auto")
    if shape.operation == "prefill" and "bf16" in args.formats.split(","):
        try:
            one_term = run_kernels(args, shape, threads, "bf16", "avx512-bf16")
        except subprocess.CalledProcessError:
            note(f"{ONE_TERM} is left out")  # the program has said why
        else:
            results += [one | {"format": ONE_TERM} for one in one_term]
    return results


def run_kernels(args, shape, threads, formats, kernel):
    """The results of one short run of our own program for one shape and choice of kernels."""
    variants = len(formats.split(",")) * len(args.modes.split(","))
    command = [args.kvpool, "bench", shape.operation, "--json", "--filter", shape.name]
    command += ["--threads", str(threads), "--seconds", str(args.seconds * variants)]
    command += ["--formats", formats, "--modes", args.modes, "--kernel", kernel]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    results = json.loads(done.stdout)["results"]
    return [one for one in results if one["shape"] == shape.name]


def in_the_race(rounds):
    """The peers' variants that one round left within reach of the fastest of as many bits.

    By the fastest call, which a neighbour's work disturbs least.
    """
    fastest = {}
    for one in rounds:
        fastest[one["bits"]] = min(fastest.get(one["bits"], one["min_us"]), one["min_us"])
    return [
        (one["peer"], one["label"])
        for one in rounds
        if one["min_us"] <= KEPT_WITHIN * fastest[one["bits"]]
    ]


def peers_turn(args, contest, kept, distance):
    """Lets every peer time its variants, or those that are kept."""
    results = []

    def ask(runner):
        time.sleep(PAUSE_SECONDS)
        labels = kept and [label for peer, label in kept if peer == runner.name]
        timed = runner.ask(do="time", seconds=args.seconds, labels=labels)
        distance.check()
        for one in timed:
            error = one["error"]
            if error is None or error <= ERROR_MAX:
                results.append({"peer": runner.name, **one})
            else:
                note(f"{runner.name} {one['label']} is left out: it errs by {error}")

    contest.each(ask)
    return results


def one_round(args, contest, shape, kept):
    """What was measured of us and of the peers in one round, all of it at one distance of the cores."""
    time.sleep(PAUSE_SECONDS)
    distance = Distance(args, contest.threads)
    ours = run_ours(args, shape, contest.threads)
    distance.check()
    peers = peers_turn(args, contest, kept, distance)
    place = {"line_ns": distance.line_ns}
    return [one | place for one in ours], [one | place for one in peers]


def compare_shape(args, contest, shape):
    """All rounds of one shape: what was measured of us, and of the peers."""
    ours, peers = [], []
    contest.each(lambda runner: runner.ask(do="open", shape=shape.name))
    kept, number, tries = None, 0, TRIES * args.rounds
    while number < args.rounds and tries:
        tries -= 1
        try:
            of_us, of_peers = one_round(args, contest, shape, kept)
        except Moved:
            continue
        ours += [{"round": number, **one} for one in of_us]
        peers += [{"round": number, **one} for one in of_peers]
        kept = kept or in_the_race(of_peers)
        number += 1
    if number < args.rounds:
        note(f"{shape.name}: {number} of {args.rounds} rounds, for the cores did not stay where they were")
    contest.each(lambda runner: runner.ask(do="close"))
    name_distances(ours + peers)
    return ours, peers


def name_distances(rounds):
    """Gives rounds at the same distance the same number: the least of them."""
    least = before = None
    for one in sorted(rounds, key=lambda one: one["line_ns"] or 0):
        now = one["line_ns"]
        if now is None:
            continue
        if before is None or now > SAME_DISTANCE * before:
            least = round(now)
        before = now
        one["line_ns"] = least


def cpu_model():
    """The name, and the numbers that tell generations apart where the name does not."""
    first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    facts = dict(map(str.strip, line.split(":", 1)) for line in first.splitlines())
    return "{model name}, family {cpu family}, model {model}".format_map(facts)


def our_version(kvpool):
    done = subprocess.run([kvpool, "--version"], capture_output=True, text=True, check=False)
    return done.stdout.strip().removeprefix("kvpool ") or "unknown"


def command(args):
    """What was asked for, without where things lie on this machine."""
    names = ("filter", "threads", "formats", "modes", "rounds", "seconds")
    asked = [(name, getattr(args, name)) for name in names]
    return " ".join(["compare.py", *(f"--{name} {value}" for name, value in asked if value)])


def machine(args):
    """When, where, and with what this was measured."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "load_average": os.getloadavg()[0],
        "command": command(args),
        "versions": {"kvpool": our_version(args.kvpool), "python": platform.python_version()},
    }


def dram_speed(ours):
    """The median of what was read per second, by thread count and distance of the cores."""
    speeds = {}
    for one in ours:
        speeds.setdefault(threads_of(one), []).append(one["dram_gbps"])
    return {threads: statistics.median(values) for threads, values in speeds.items()}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kvpool", nargs="?", default="target/release/kvpool", help="our program")
    parser.add_argument("--venv", type=Path, default=HERE / ".venv", help="made by setup.sh")
    parser.add_argument("--filter", default="", help="part of the shapes' names")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--formats", default="f16,bf16,int8", help="ours")
    parser.add_argument("--modes", default="contiguous,paged", help="ours")
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
    report = machine(args) | {"dram_gbps": {}, "table": [], "kvpool": [], "peers": []}
    print("\n".join(contest_lines([])), flush=True)
    for threads in map(int, args.threads.split(",")):
        contest = Contest(str(args.venv / "bin" / "python"), threads)
        report["versions"] |= contest.versions()
        for shape in SHAPES:
            if args.filter not in shape.name:
                continue
            ours, peers = compare_shape(args, contest, shape)
            place = {"shape": shape.name, "threads": threads}
            report["kvpool"] += ours
            report["peers"] += [place | one for one in peers]
            report["dram_gbps"] = dram_speed(report["kvpool"])
            rows = rows_of(place, ours, peers)
            report["table"] += rows
            print("\n".join(contest_lines(rows)[2:]), flush=True)
            if args.out:
                # After each shape: what was measured is not lost when the rest fails.
                args.out.write_text(json.dumps(report, indent=1) + "\n")
        contest.end()
    print(f"\n{report['date']}, {report['cpu']}, DRAM read at {dram(report)}\n{report['versions']}")


if __name__ == "__main__":
    main()
