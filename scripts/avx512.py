#!/usr/bin/env python3
"""Runs tests of the AVX-512 kernels on a machine whose processor has none: in a machine that Bochs emulates.

    scripts/avx512.py [--minutes N] TEST_BINARY FILTER…

TEST_BINARY is what `cargo test --release --lib --no-run` names, each FILTER one run of it; the tests of the kernels
are `device::cpu`. The emulated processor (Ice Lake, Bochs 2.7) has AVX-512 F, BW, DQ, VL, VBMI and VNNI, and no
BF16. It is some 300 times as slow as a real one: `device::cpu::tests::edges` takes five minutes, the start one.

On Debian 12, as root: apt-get install bochs bochs-term bochsbios vgabios busybox-static isolinux syslinux-common
genisoimage cpio binutils; the kernel is fetched (apt-get download), not installed, or given by --kernel.
"""

import argparse
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tty
from pathlib import Path

LIBRARIES = ("libgcc_s.so.1", "libm.so.6", "libc.so.6", "libstdc++.so.6")
LOADER = "/lib64/ld-linux-x86-64.so.2"
APPLETS = ("sh", "mount", "echo", "grep", "head")
KERNEL_PACKAGE = "linux-image-cloud-amd64"

# What Bochs 2.7 claims of XSAVE does not hold together, and its XSAVEOPT overwrites page tables: the kernel is to use
# neither them nor anything else that it can do without.
WITHOUT = (
    "pku,ospke,xsavec,xsaves,xsaveopt,erms,fsrm,rdrand,rdseed,clflushopt,clwb,rdpid,aperfmperf,"
    "tsc_deadline_timer,x2apic,smap,smep,pcid,invpcid,umip"
)
ARGUMENTS = (
    "console=ttyS0 quiet mitigations=off nokaslr tsc=reliable lpj=1000000 nopku acpi=off nosmp noapic nolapic "
    f"lapic=notscdeadline nox2apic lsm=capability clearcpuid={WITHOUT}"
)

INIT = """#!/bin/sh
mount -t proc p /proc; mount -t sysfs s /sys; mount -t devtmpfs d /dev; mount -t tmpfs t /tmp
echo "processor: $(grep -o 'avx512[a-z_0-9]*' /proc/cpuinfo | tr '\\n' ' ')"
export RUST_BACKTRACE=1 RUST_TEST_THREADS=1
status=0
{runs}
echo "END $status"
while true; do sleep 1; done
"""

BOCHS = """display_library: term
megs: 2048
cpu: model=corei7_icelake_u, count=1, ips=100000000, reset_on_triple_fault=0
romimage: file=/usr/share/bochs/BIOS-bochs-latest
vgaromimage: file=/usr/share/vgabios/vgabios.bin
boot: cdrom
ata0: enabled=1, ioaddr1=0x1f0, ioaddr2=0x3f0, irq=14
ata0-master: type=cdrom, path={work}/cd.iso, status=inserted
com1: enabled=1, mode=file, dev={work}/serial.txt
log: {work}/bochs.log
panic: action=report
error: action=ignore
info: action=ignore
"""


def kernel(work):
    """A kernel image of Debian's, unpacked into `work`."""
    depends = subprocess.run(["apt-cache", "depends", KERNEL_PACKAGE], check=True, capture_output=True, text=True)
    package = re.search(r"Depends: (linux-image-\S+)", depends.stdout)
    if not package:
        sys.exit(f"apt-cache knows no {KERNEL_PACKAGE}: run apt-get update, or give a kernel image with --kernel")
    subprocess.run(["apt-get", "-o", "APT::Sandbox::User=root", "download", "--quiet", package[1]], cwd=work, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["dpkg", "-x", next(work.glob("*.deb")), "kernel"], cwd=work, check=True)
    return next((work / "kernel/boot").glob("vmlinuz-*"))


def build_disc(work, image, binary, filters):
    """A disc that starts the kernel and, as its first process, the tests."""
    root, disc = work / "root", work / "disc"
    for folder in ("bin", "lib64", "lib/x86_64-linux-gnu", "proc", "sys", "dev", "tmp"):
        (root / folder).mkdir(parents=True)
    (disc / "isolinux").mkdir(parents=True)
    shutil.copy("/bin/busybox", root / "bin/busybox")
    for applet in (*APPLETS, "tr", "sleep"):
        (root / "bin" / applet).symlink_to("busybox")
    subprocess.run(["strip", "--strip-debug", "-o", root / "bin/tests", binary], check=True)
    shutil.copy(LOADER, root / "lib64")
    for name in LIBRARIES:
        found = [Path(at) / name for at in ("/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu")]
        shutil.copy(next(path for path in found if path.exists()), root / "lib/x86_64-linux-gnu")
    runs = "\n".join(f"tests '{word}' || status=1" for word in filters)
    (root / "init").write_text(INIT.format(runs=runs))
    (root / "init").chmod(0o755)
    with (disc / "initrd.img").open("wb") as to:
        names = subprocess.run(["find", "."], cwd=root, check=True, capture_output=True).stdout
        subprocess.run(["cpio", "-o", "-H", "newc", "--quiet"], cwd=root, check=True, input=names, stdout=to)
    shutil.copy(image, disc / "vmlinuz")
    shutil.copy("/usr/lib/ISOLINUX/isolinux.bin", disc / "isolinux")
    shutil.copy("/usr/lib/syslinux/modules/bios/ldlinux.c32", disc / "isolinux")
    (disc / "isolinux/isolinux.cfg").write_text(
        f"DEFAULT l\nPROMPT 0\nLABEL l\n KERNEL /vmlinuz\n INITRD /initrd.img\n APPEND {ARGUMENTS}\n"
    )
    boot = ["-b", "isolinux/isolinux.bin", "-c", "isolinux/boot.cat", "-no-emul-boot"]
    boot += ["-boot-load-size", "4", "-boot-info-table"]
    subprocess.run(["genisoimage", "-quiet", "-o", work / "cd.iso", *boot, disc], check=True)


def terminal_of(process, fd):
    """The number of the terminal behind a file descriptor of a process, if it is one's other end."""
    info = Path(f"/proc/{process}/fdinfo/{fd}").read_text()
    index = re.search(r"tty-index:\s*(\d+)", info)
    return index and index[1]


def screen(pid, own):
    """The terminal that Bochs writes its screen to, which must be read or it stops; None before it has one."""
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            number = terminal_of(pid, fd.name)
            # Before it is Bochs the process has the same as we.
            if number and number != terminal_of("self", own):
                terminal = os.open(f"/dev/pts/{number}", os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK)
                # Otherwise nothing can be read before the end of a line, and there is none.
                tty.setraw(terminal)
                return terminal
        except OSError:
            continue
    return None


def run(work, seconds):
    """Starts the machine and prints what it says; the tests' status, or None when it said none in time."""
    (work / "bochsrc").write_text(BOCHS.format(work=work))
    # Debian's Bochs is a debugger that waits to be told to go on.
    (work / "commands").write_text("c\n")
    (work / "serial.txt").touch()
    pid, own = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm"
        os.execvp("bochs-bin", ["bochs-bin", "-q", "-f", str(work / "bochsrc"), "-rc", str(work / "commands")])
    until, shown, status = time.monotonic() + seconds, 0, None
    to_read = [own]
    try:
        while time.monotonic() < until and status is None:
            if len(to_read) == 1 and (extra := screen(pid, own)) is not None:
                to_read.append(extra)
            for fd in select.select(to_read, [], [], 1)[0]:
                try:
                    os.read(fd, 1 << 16)
                except BlockingIOError:
                    pass
                except OSError:
                    to_read.remove(fd)
            if own not in to_read:
                break
            text = (work / "serial.txt").read_text(errors="replace").replace("\r", "")
            print(text[shown:], end="", flush=True)
            shown = len(text)
            if end := re.search(r"^END (\d)", text, re.M):
                status = int(end[1])
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return status


def main():
    """Runs what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", type=Path)
    parser.add_argument("filters", nargs="+")
    parser.add_argument("--kernel", type=Path, help="a kernel image instead of Debian's")
    parser.add_argument("--minutes", type=float, default=60)
    options = parser.parse_args()
    needed = ("bochs-bin", "genisoimage", "cpio", "strip", "dpkg")
    missing = [name for name in needed if not shutil.which(name)]
    if missing or not Path("/usr/lib/ISOLINUX/isolinux.bin").exists():
        sys.exit(f"not installed: {' '.join(missing) or 'isolinux'}; --help says what is needed")
    if not options.binary.is_file():
        sys.exit(f"{options.binary}: no such file; cargo test --release --lib --no-run names it")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        build_disc(work, options.kernel or kernel(work), options.binary, options.filters)
        status = run(work, options.minutes * 60)
    if status is None:
        sys.exit(f"no end within {options.minutes:g} minutes; --minutes gives more")
    sys.exit(status)


if __name__ == "__main__":
    main()
