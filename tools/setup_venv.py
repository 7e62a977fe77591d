"""Make the virtual environment with every package pinned, or keep one whose pins still match.

    python3 tools/setup_venv.py VENV PINS...

Standard library only: it runs before anything is installed. The first file of PINS is the lock
file. A digest of all PINS and of the interpreter is left in the environment; when it matches,
nothing is done.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from pathlib import Path

STAMP = "opd-pins.sha256"


def pins_digest(pins: list[Path]) -> str:
    """Digest of the pinned files and of the running interpreter's version."""
    digest = hashlib.sha256(sys.version.encode())
    for path in pins:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def install(venv: Path, lock: Path) -> None:
    """Create `venv` and install the lock file and this project into it."""
    python = str(venv / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    if not (venv / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    # --no-deps: see the head of the lock file.
    subprocess.run([*pip, "--no-deps", "-r", str(lock)], check=True)
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "-e", "."], check=True)


def main() -> int:
    """Entry point."""
    venv, *pins = (Path(argument) for argument in sys.argv[1:])
    if sys.version_info < (3, 11):  # noqa: UP036  (the newcomer's python3 may be older)
        print(f"Python >= 3.11 is needed, this is {sys.version.split()[0]}", file=sys.stderr)
        return 2
    digest, stamp = pins_digest(pins), venv / STAMP
    if stamp.exists() and stamp.read_text().strip() == digest:
        return 0
    print(f"setup: installing pinned packages into {venv} (about 2 minutes, 3 GB)", flush=True)
    started = time.monotonic()
    stamp.unlink(missing_ok=True)
    try:
        install(venv, pins[0])
    except subprocess.CalledProcessError as error:
        print(f"setup failed: {' '.join(map(str, error.cmd))}", file=sys.stderr)
        return 1
    stamp.write_text(digest + "\n")
    print(f"setup: done in {time.monotonic() - started:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
