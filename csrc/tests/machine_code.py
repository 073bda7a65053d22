#!/usr/bin/env python3
"""Looks at what nvcc made of the kernels: no warnings, no spills, no local memory, wide accesses,
matrix instructions.

    csrc/tests/machine_code.py FOLDER CUOBJDUMP

FOLDER is the build script's OUT_DIR, with a fatbin and a log of each file of csrc/inst.
"""

import re
import subprocess
import sys
from pathlib import Path

# What the machine code of a kernel must have, by its name. Each is an instruction of SASS.
WANTED = [
    # Asynchronous copies of 16 bytes into shared memory, and matrix instructions.
    (r"kvpool_attend_.*_t\d+x\d", [r"LDGSTS\.E\.(BYPASS\.)?(LTC128B\.)?128", r"[HI]MMA\."]),
    (r"kvpool_attend_f32_w128", [r"LDG(STS)?\.E\.(\S+\.)?128"]),
    (r"kvpool_append_.*_(f32|f16|bf16)", [r"LDG\.E\.(\S+\.)?128", r"STG\.E\.(\S+\.)?(128|64)"]),
    (r"kvpool_append_.*_i8", [r"LDG\.E\.(\S+\.)?128", r"STG\.E\.(\S+\.)?(64|128)"]),
    (r"kvpool_copy_pairs", [r"LDG\.E\.(\S+\.)?128", r"STG\.E\.(\S+\.)?128"]),
    (r"kvpool_gather_f32", [r"LDG\.E\.(\S+\.)?128", r"STG\.E\.(\S+\.)?128"]),
    (r"kvpool_fill", [r"STG\.E\.(\S+\.)?128"]),
]


def spills(log):
    """Warnings, and the kernels of a log that spill or have local memory, with what ptxas says."""
    found = []
    name = "?"
    for line in log.read_text().splitlines():
        compiled = re.search(r"Compiling entry function '(\w+)' for '(\w+)'", line)
        if compiled:
            name = " ".join(compiled.groups())
        stack = r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
        used = re.search(stack, line)
        if (used and used.groups() != ("0", "0", "0")) or re.search(r"\bwarning\b", line):
            found.append(f"{log.name}: {name}: {line.strip()}")
    return found


def functions(fatbin, cuobjdump):
    """(architecture, kernel, its machine code) of a fatbin."""
    shown = subprocess.run([cuobjdump, "-sass", fatbin], check=True, capture_output=True, text=True)
    arch, name, code = "?", None, []
    for line in shown.stdout.splitlines():
        header = re.match(r"\s*arch = (\w+)", line)
        begins = re.match(r"\s*Function : (\w+)", line)
        if header or begins:
            if name:
                yield arch, name, "\n".join(code)
            name, code = None, []
        if header:
            arch = header.group(1)
        elif begins:
            name = begins.group(1)
        else:
            code.append(line)
    if name:
        yield arch, name, "\n".join(code)


def main():
    folder, cuobjdump = Path(sys.argv[1]), sys.argv[2]
    logs, fatbins = sorted(folder.glob("*.log")), sorted(folder.glob("*.fatbin"))
    problems = [problem for log in logs for problem in spills(log)]
    seen, looked_at = set(), 0
    for fatbin in fatbins:
        for arch, name, code in functions(fatbin, cuobjdump):
            seen.add(arch)
            for pattern, wanted in WANTED:
                if re.fullmatch(pattern, name):
                    looked_at += 1
                    missing = [w for w in wanted if not re.search(w, code)]
                    problems += [f"{arch} {name}: no {w}" for w in missing]
    print(f"{len(fatbins)} images, {looked_at} hot kernels looked at, for {' '.join(sorted(seen))}")
    if not logs or not looked_at:
        problems.append(f"{folder}: nothing to look at")
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
