#!/usr/bin/env python3
"""Makes what is published from what `compare.py --out` wrote.

    report.py FILE... [--results FOLDER]

writes `peers-DATE.md` and `peers-DATE.json` (benches/results, unless another folder is named) and
prints the table of the README. Several files, say of one operation each, become one report.
"""

import argparse
import json
from pathlib import Path

from shapes import SHAPES

RESULTS = Path(__file__).resolve().parents[1] / "results"
FORMAT_BITS = {"int8": 8}  # all others are compared with 16
# bf16 with kernel = "avx512-bf16": queries and weights are rounded to bf16, as peers in bf16 do.
ONE_TERM = "bf16 (one term)"
INTRODUCTION = """\
Made by `benches/peers/report.py`; `benches/peers/README.md` says what is measured and how. Ratios
above 1: we are faster. *error*: how far the result of ours, and of the peer, is off, in % of its largest
value. *bf16 (one term)* is bf16 with `kernel = "avx512-bf16"`: queries and weights are rounded to
bf16 before they are multiplied, as by peers in bf16; all else of ours keeps 16 bits of them or more.
Of several threads *ns* is how long a cache line takes from one core to the other and back: this machine's
cores move, and two that are near share their way to memory. Rows compare what was measured at one distance.
"""


def medians(rounds, key):
    """For each key the entry of its median round, by median time."""
    return {name: entries[(len(entries) - 1) // 2] for name, entries in by(rounds, key).items()}


def by(rounds, key):
    """For each key its entries, fastest first."""
    groups = {}
    for one in sorted(rounds, key=lambda one: one["median_us"]):
        groups.setdefault(key(one), []).append(one)
    return groups


def fastest_peers(peers):
    """By bits, the fastest of the variants that took part in the last round."""
    best = {}
    for bits, group in by(peers, lambda one: one["bits"]).items():
        last = max(one["round"] for one in group)
        stayed = {(one["peer"], one["label"]) for one in group if one["round"] == last}
        middle = medians(group, lambda one: (one["peer"], one["label"]))
        best[bits] = min((middle[name] for name in stayed), key=lambda one: one["median_us"])
    return best


def threads_of(one):
    """How many threads, and how far from each other."""
    line_ns = one.get("line_ns")
    return f"{one['threads']}, {line_ns} ns" if line_ns else str(one["threads"])


def rows_of(place, ours, peers):
    """A row of the table for each of our formats and modes, at each distance of the cores. `place`: shape
    and threads."""
    rows = []
    for line_ns in sorted({one["line_ns"] for one in ours}):
        here = lambda one: one["line_ns"] == line_ns  # noqa: E731
        at = place | {"line_ns": line_ns}
        rows += rows_at(at, list(filter(here, ours)), list(filter(here, peers)))
    return rows


def rows_at(place, ours, peers):
    """Those of one distance."""
    best = fastest_peers(peers)
    rows = []
    for (mode, form), one in medians(ours, lambda one: (one["mode"], one["format"])).items():
        row = place | {"format": form, "mode": mode}
        names = ("path", "error", "median_us", "gbps", "dram_gbps", "fraction")
        row |= {name: one[name] for name in names}
        for bits in (16, 8):
            peer = best.get(bits)
            row[f"peer_{bits}"] = peer and {
                "name": peer["peer"],
                "label": peer["label"],
                "median_us": peer["median_us"],
                "error": peer["error"],
                "ratio": peer["median_us"] / one["median_us"],
            }
        rows.append(row)
    order = [(one["format"], one["mode"]) for one in ours]
    return sorted(rows, key=lambda row: order.index((row["format"], row["mode"])))


def microseconds(value):
    digits = 2 if value < 10 else 1 if value < 1000 else 0
    return f"{value:,.{digits}f}"


def per_cent(value):
    return "" if value is None else f"{100 * value:.2g}"


def table(columns, rows):
    """Lines of a table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def opponent(row):
    """The fastest peer with as many bits, or none."""
    return row[f"peer_{FORMAT_BITS.get(row['format'], 16)}"]


def fraction(row):
    """How near memory's speed: means nothing where arithmetic or a cache is the limit."""
    return f"{100 * row['fraction']:.0f}" if row["shape"].startswith("decode") else ""


def contest_lines(rows):
    """Ours, each beside the fastest peer."""
    columns = ("shape", "threads", "ours", "error %", "us", "% of DRAM")
    columns += ("fastest peer with as many bits", "error %", "us", "ratio")
    lines = []
    for row in rows:
        cells = [row["shape"], threads_of(row), f"{row['format']} {row['mode']}"]
        cells += [per_cent(row["error"]), microseconds(row["median_us"]), fraction(row)]
        peer = opponent(row)
        if peer is None:
            lines.append([*cells, "-", "", "", ""])
            continue
        cells += [f"{peer['name']} {peer['label']}", per_cent(peer["error"])]
        lines.append([*cells, microseconds(peer["median_us"]), f"{peer['ratio']:.2f}"])
    return table(columns, lines)


def peers_lines(peers):
    """Every peer's fastest variant, whether it came to the last round or not."""
    kinds = sorted({(-one["bits"], one["peer"]) for one in peers})
    lines = []
    for (shape, threads), group in by(peers, lambda one: (one["shape"], threads_of(one))).items():
        middle = medians(group, lambda one: (one["bits"], one["peer"], one["label"])).values()
        best = by(middle, lambda one: (-one["bits"], one["peer"]))
        times = [best[kind][0]["median_us"] if kind in best else None for kind in kinds]
        cells = ["-" if time is None else microseconds(time) for time in times]
        lines.append([shape, threads, *cells])
    order = [shape.name for shape in SHAPES]
    lines.sort(key=lambda cells: (order.index(cells[0]), cells[1]))
    return table(("shape", "threads", *(f"{peer}, {-bits} bits" for bits, peer in kinds)), lines)


def readme_lines(rows):
    """The short table: f16 and INT8, slots and blocks; and bf16 as the peers multiply."""
    columns = ["µs for one layer", "threads"]
    for form, bits in (("f16", "16-bit"), ("INT8", "8-bit")):
        columns += [f"{form}: contiguous / paged", f"fastest {bits} peer", "ratio"]
    lines = []
    for shape in SHAPES:
        for threads in sorted({threads_of(row) for row in rows if row["shape"] == shape.name}):
            here = [row for row in rows if (row["shape"], threads_of(row)) == (shape.name, threads)]
            cells = [*readme_cells(here, "f16"), *readme_cells(here, "int8")]
            lines.append([shape.title, threads, *cells])
            if any(row["format"] == ONE_TERM for row in here):
                cells = [*readme_cells(here, ONE_TERM), "", "", ""]
                lines.append([f"{shape.title}, {ONE_TERM} instead of f16", threads, *cells])
    return table(columns, lines)


def readme_cells(rows, form):
    """Of the modes of one format: our times, the peer's, the ratios."""
    modes = {row["mode"]: row for row in rows if row["format"] == form}
    rows = [modes[mode] for mode in ("contiguous", "paged") if mode in modes]
    if not rows:
        return ["-", "-", "-"]
    ours = [microseconds(row["median_us"]) for row in rows]
    ours = [f"{us} ({fraction(row)} %)" if fraction(row) else us for us, row in zip(ours, rows)]
    peer = opponent(rows[0])
    if peer is None:
        return [" / ".join(ours), "-", "-"]
    ratios = [f"{opponent(row)['ratio']:.2f}" for row in rows]
    name = f"{microseconds(peer['median_us'])} ({peer['name']})"
    return [" / ".join(ours), name, " / ".join(ratios)]


def over_rounds(rounds, names):
    """For each variant its median round, and how far the rounds lie apart."""
    found = []
    for key, group in by(rounds, lambda one: tuple(one.get(name) for name in names)).items():
        one = group[(len(group) - 1) // 2]
        kept = {name: one[name] for name in ("median_us", "error", "checksum") if name in one}
        times = [one["median_us"] for one in group]
        spread = {"rounds": len(group), "fastest_us": times[0], "slowest_us": times[-1]}
        found.append({name: value for name, value in zip(names, key) if value} | kept | spread)
    return found


def document(runs, rows, peers):
    """The text of the results' file."""
    lines = [f"# Beside other programs, {runs[0]['date'][:10]}", "", INTRODUCTION]
    for run in runs:
        versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
        lines += [
            f"- {run['date']}, `{run['command']}`:",
            f"  {run['cores']} cores of {run['cpu']}, {run['system']},",
            f"  load before {run['load_average']:.2f}, DRAM read at {dram(run)};",
            f"  {versions}",
        ]
    lines += ["", *contest_lines(rows), "", "## Every peer at its fastest, µs", ""]
    lines += ["What the first round left far behind was not run again.", "", *peers_lines(peers)]
    return "\n".join(lines) + "\n"


def dram(run):
    """What plain loads read, by threads."""
    speeds = run["dram_gbps"].items()
    return ", ".join(f"{gbps:.1f} GB/s (threads: {threads})" for threads, gbps in speeds)


def rounded(value):
    """Four figures are more than the machine is good for."""
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def lines_of(entries):
    return "[\n  " + ",\n  ".join(json.dumps(rounded(one)) for one in entries) + "\n ]"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, help="made by compare.py --out")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    args = parser.parse_args()
    reports = [json.loads(path.read_text()) for path in args.files]
    rows, ours, peers = (
        [one for report in reports for one in report[part]] for part in ("table", "kvpool", "peers")
    )
    runs = [{k: v for k, v in r.items() if not isinstance(v, list)} for r in reports]
    variants = {
        "runs": runs,
        "table": rows,
        "kvpool": over_rounds(ours, ("shape", "threads", "line_ns", "format", "mode", "path")),
        "peers": over_rounds(peers, ("shape", "threads", "line_ns", "bits", "peer", "label")),
    }
    parts = ",\n ".join(f'"{name}": {lines_of(entries)}' for name, entries in variants.items())
    target = args.results / f"peers-{runs[0]['date'][:10]}"
    target.with_suffix(".json").write_text("{\n " + parts + "\n}\n")
    target.with_suffix(".md").write_text(document(runs, rows, peers))
    print("\n".join(readme_lines(rows)))


if __name__ == "__main__":
    main()
