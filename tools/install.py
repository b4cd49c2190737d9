"""Install the development environment: ``python -m tools.install``, called by ``make setup`` inside a new environment.

The files of ``locks/`` are installed with their SHA-256 checked where the locks are for this Python and machine;
elsewhere, and with ``--no-locks``, the versions of ``constraints.txt``. pip's output goes to a log file. A counter
shows how far the installation is; the last line says what failed and what to do. Only standard modules are imported.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tools.supply import LOCKS, ROOT, misfit, read_lock

PIP = (sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--progress-bar", "off")
HASHED = ("--require-hashes", "--no-deps")
PROJECT = ("-c", "constraints.txt", "-e", ".[dev]")
EVERY = 25  # packages between two lines of progress where the output is no terminal


class Progress:
    """Counts the packages that pip names."""

    def __init__(self, total: int) -> None:
        self.total, self.seen, self.start = total, set[str](), time.monotonic()

    def line(self, text: str) -> None:
        """Look at one line of pip's output."""
        match = re.match(r"(?:Collecting|Requirement already satisfied:) ([\w.-]+)", text)
        if match is None or match[1] in self.seen:
            return
        self.seen.add(match[1])
        count = min(len(self.seen), self.total)
        message = f"  {count} of {self.total} packages, {time.monotonic() - self.start:.0f} s"
        if sys.stdout.isatty():
            print(f"\r{message}", end="", flush=True)
        elif count % EVERY == 0 and len(self.seen) == count:
            print(message, flush=True)


def run_pip(arguments: Sequence[str], log: Path, progress: Progress) -> bool:
    """Run pip with its output in the log; whether it succeeded."""
    with log.open("a", encoding="utf-8") as file:
        pip = subprocess.Popen(
            [*PIP, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert pip.stdout is not None
        for line in pip.stdout:
            file.write(line)
            progress.line(line)
        return pip.wait() == 0


def install(*, locks: bool, log: Path) -> str | None:
    """Install everything; the reason if that failed."""
    progress = Progress(len(read_lock(LOCKS / "all.txt")) + len(read_lock(LOCKS / "build.txt")) + 1)
    reason = misfit() if locks else None
    if reason:
        print(f"  {reason}")
    if not locks or reason:
        return None if run_pip(PROJECT, log, progress) else failure(log)
    for name, further in (("build.txt", ()), ("all.txt", ("--no-build-isolation",))):
        if not run_pip([*HASHED, *further, "-r", f"locks/{name}"], log, progress):
            return failure(log)
    # torch may be there already, or its tested build may not be available: then its version is installed, unchecked.
    run_pip([*HASHED, "-r", "locks/torch.txt"], log, progress)
    return None if run_pip(["--no-build-isolation", *PROJECT], log, progress) else failure(log)


def failure(log: Path) -> str:
    """What pip said last about an error."""
    lines = log.read_text(encoding="utf-8").splitlines()
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return errors[-1] if errors else "pip failed without an error message"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-locks", action="store_true", help="install by version, without checking hashes")
    options = parser.parse_args()
    log = Path(sys.prefix) / "install.log"
    log.unlink(missing_ok=True)
    print("Installing about 215 packages (2 GB) into the environment: two to five minutes.", flush=True)
    reason = install(locks=not options.no_locks, log=log)
    if sys.stdout.isatty():
        print()
    if reason is not None:
        sys.exit(f"{reason}\nThe installation failed; see {log}. Mend the cause above and run `make setup` again.")
    print("Installed.")


if __name__ == "__main__":
    main()
