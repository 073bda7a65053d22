#!/usr/bin/env python3
"""Does literally what README.md says in "From C++", in a new folder outside the repository.

    csrc/tests/readme.py [FOLDER]     FOLDER of the built libraries (default target/release)

Nothing is changed in the commands but where the repository and its libraries are.
"""

import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
LIBRARY = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "target/release").resolve()
VERSION = re.search(r'KVPOOL_VERSION "(.*)"', (ROOT / "csrc/include/kvpool.h").read_text())[1]
SAID = f"kvpool {VERSION}: the attention of the third token begins with 1.000"


def blocks():
    """The indented blocks of the section, in order."""
    section = (ROOT / "README.md").read_text().split("\n## From C++\n")[1].split("\n## ")[0]
    found, block = [], []
    for line in section.splitlines() + ["end"]:
        if line.startswith("    ") or (block and not line):
            block.append(line[4:])
        elif block:
            found.append("\n".join(block).strip("\n") + "\n")
            block = []
    return found


def main():
    program, by_hand, install, project, build = blocks()
    example = (ROOT / "csrc/examples/hello.cpp").read_text()
    assert example.endswith(program), "the README's program is not csrc/examples/hello.cpp"
    commands = "\n".join(["set -e", by_hand, install, build])
    assert commands.count("K=/path/to/kvpool\n") == 1
    commands = commands.replace("K=/path/to/kvpool\n", f"K={ROOT}\n").replace("$K/target/release", str(LIBRARY))
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "hello.cpp").write_text(program)
        (pathlib.Path(folder) / "CMakeLists.txt").write_text(project)
        done = subprocess.run(["bash", "-c", commands], cwd=folder, stdout=subprocess.PIPE, text=True)
    programs = len(re.findall(r"^\./", commands, re.M))
    said = done.stdout.count(SAID)
    if done.returncode != 0 or said != programs:
        sys.exit(f"{done.stdout}\nthe README's way failed ({done.returncode}); {said} of {programs} programs ran")
    print(f"README, From C++: {said} programs built and run")


main()
