#!/usr/bin/env python3
"""The binary interface as text: csrc/include/abi.txt.

    csrc/tests/abi.py --check     fails where kvpool.h has another binary interface than the file
    csrc/tests/abi.py             writes the file anew, if KVPOOL_ABI_VERSION has moved

Functions, sizes and offsets of structs, and all numbers are taken from the header and measured by a C program
made from it. A change without a new KVPOOL_ABI_VERSION is refused; before a release, remove the file first.
Needs a C compiler (CC).
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

INCLUDE = pathlib.Path(__file__).resolve().parent.parent / "include"
COMMITTED = INCLUDE / "abi.txt"


def header_code():
    """kvpool.h without comments and without what is for C++."""
    text = re.sub(r"/\*.*?\*/", " ", (INCLUDE / "kvpool.h").read_text(), flags=re.S)
    text = re.sub(r"#ifdef __cplusplus\n.*?(?:#else\n(.*?))?#endif", lambda m: m[1] or "", text, flags=re.S)
    return text


def functions(code):
    flat = " ".join(line for line in code.splitlines() if not line.startswith("#"))
    for statement in re.split(r"[;{}]", flat):
        found = re.fullmatch(r"\s*([\w\s*]+?\bkvpool_\w+\(.*\)) KVPOOL_NOEXCEPT\s*", statement)
        if found and "static inline" not in statement:
            yield re.sub(r"\s+", " ", found[1])


def structs(code):
    for name, body in re.findall(r"typedef struct (\w+) \{(.*?)\} \w+;", code, flags=re.S):
        fields = []
        for declaration in body.split(";")[:-1]:
            for part in declaration.split(","):
                fields.append(re.search(r"(\w+)(\[[^\]]*\])?\s*$", part)[1])
        yield name + "_t", fields


def numbers(code):
    for body in re.findall(r"enum \{(.*?)\}", code, flags=re.S):
        yield from re.findall(r"(KVPOOL_\w+) =", body)


def callbacks(code):
    return (re.sub(r"\s+", " ", text) for text in re.findall(r"typedef (void \(\*kvpool_\w+\)\([^;]*\));", code))


def aliases(code):
    return re.findall(r"typedef u?int32_t (kvpool_\w+_t);", code)


def program(code):
    lines = ["#include <kvpool.h>", "#include <stdio.h>", "int main(void) {"]
    show = lambda text, *values: lines.append(
        "    printf(\"%s\\n\"%s);" % (text, "".join(f", (long long)({value})" for value in values)))
    show("abi version %lld", "KVPOOL_ABI_VERSION")
    for function in sorted(functions(code), key=lambda f: re.search(r"kvpool_\w+(?=\()", f)[0]):
        show("function " + function)
    for callback in sorted(callbacks(code)):
        show("callback " + callback)
    for alias in sorted(aliases(code)):
        show(f"type {alias} %lld", f"sizeof({alias})")
    for name, fields in sorted(structs(code)):
        show(f"struct {name} size %lld align %lld", f"sizeof({name})", f"_Alignof({name})")
        for field in fields:
            member = f"(({name} *)0)->{field}"
            show(f"    {field} offset %lld size %lld", f"offsetof({name}, {field})", f"sizeof({member})")
    for number in sorted(numbers(code)):
        show(f"number {number} %lld", number)
    for macro in ("KEY_BYTES", "MAX_RETENTIONS", "PRIORITIES", "NO_NUMBER", "TO_END", "FOREVER", "NO_BLOCK"):
        show(f"macro KVPOOL_{macro} %lld", f"KVPOOL_{macro}")
    return "\n".join(lines + ["    return 0;", "}", ""])


def measured():
    with tempfile.TemporaryDirectory() as folder:
        source, binary = pathlib.Path(folder) / "abi.c", pathlib.Path(folder) / "abi"
        source.write_text(program(header_code()))
        compiler = os.environ.get("CC", "cc")
        subprocess.run([compiler, "-std=c11", "-Wall", "-Wextra", "-Werror", f"-I{INCLUDE}", source, "-o", binary],
                       check=True)
        return subprocess.run([binary], check=True, stdout=subprocess.PIPE, text=True).stdout


def main():
    now = measured()
    before = COMMITTED.read_text() if COMMITTED.exists() else ""
    counted = [sum(line.startswith(kind) for line in now.splitlines()) for kind in ("function", "struct", "number")]
    if now == before:
        print("abi.txt: %d functions, %d structs, %d numbers as they were" % tuple(counted))
        return
    moved = now.splitlines()[0] != (before.splitlines() or [""])[0]
    if "--check" in sys.argv or not moved:
        import difflib
        sys.stdout.writelines(difflib.unified_diff(before.splitlines(True), now.splitlines(True), "abi.txt", "kvpool.h"))
        sys.exit("the binary interface has changed: " + (
            "run csrc/tests/abi.py" if moved else "KVPOOL_ABI_VERSION must move (or abi.txt be removed, before a release)"))
    COMMITTED.write_text(now)
    print("abi.txt: %d functions, %d structs, %d numbers written" % tuple(counted))


main()
