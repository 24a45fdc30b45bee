"""Install packages with pip, and say meanwhile what is going on: package, number of packages, time.

    python tools/install.py WHAT EXPECTED ARGUMENT...

    WHAT        what is installed, in words
    EXPECTED    seconds that it usually takes, for the time left
    ARGUMENT    arguments of pip install

On a terminal the line is replaced; elsewhere a line is printed every 10 seconds. If pip fails, its output is printed.
"""

import shutil
import subprocess
import sys
import threading
import time

INTERVALS = {True: 0.2, False: 10.0}  # seconds between two lines, by whether there is a terminal


def summary(lines: list[str]) -> str:
    """State of an installation, from the output of pip so far."""
    collected = [line.split()[1] for line in lines if line.startswith("Collecting ")]
    if any(line.startswith("Installing collected packages") for line in lines):
        names = lines[-1].partition(":")[2] if lines[-1].startswith("Installing") else ""
        return f"writing {len(names.split(',')) if names else len(collected)} packages"
    return f"{len(collected)} packages, now {collected[-1]}" if collected else "looking for packages"


def status(what: str, expected: float, seconds: float, lines: list[str]) -> str:
    """One line: what is installed, how far it is, and the time left by the usual duration."""
    left = expected - seconds
    rest = f"about {left:.0f} s left" if left > 0 else "longer than usual"
    return f"{what}: {summary(lines)}; {seconds:.0f} s, {rest}"


def main(what: str, expected: str, *arguments: str) -> int:
    """Run pip and report until it ends; return its exit status."""
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off"]
    process = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(process.stdout), daemon=True)
    reader.start()
    start, terminal = time.monotonic(), sys.stderr.isatty()
    columns = shutil.get_terminal_size().columns - 1
    while reader.is_alive():
        reader.join(INTERVALS[terminal])
        if reader.is_alive():
            line = status(what, float(expected), time.monotonic() - start, list(lines))
            print(f"\r{line[:columns]:<{columns}}" if terminal else line, end="" if terminal else "\n", file=sys.stderr)
    if process.wait() != 0:
        print("".join(lines), file=sys.stderr)
    ending = "done" if process.returncode == 0 else f"failed with status {process.returncode}"
    line = f"{what}: {ending}, {time.monotonic() - start:.0f} s"
    print(f"\r{line:<{columns}}" if terminal else line, file=sys.stderr)
    return process.returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
