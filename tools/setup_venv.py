"""Make the virtual environment with every package pinned, or keep one whose pins still match.

    python3 tools/setup_venv.py VENV PINS...

Standard library only: it runs before anything is installed. The first file of PINS is the lock
file. A digest of all PINS and of the interpreter is left in the environment; when it matches,
nothing is done.

Packages are installed by uv, which pip fetches first; where the package index has no uv, by pip.
uv does not read pip's configuration, so it is given pip's indexes and find-links here.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

STAMP = "opd-pins.sha256"
OLDEST, TESTED = (3, 11), (3, 11)
PIPS_INDEX = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"
# What breaks when a wheel of the wrong kind was taken: CUDA's libraries, a bundled C library.
RUNS = "import torch, soundfile; assert torch.version.cuda is None"
NO_CPU_TORCH = """\
setup: no CPU build of torch {version} was found: pip's indexes and find-links have none, and \
PyTorch's own index does not answer. Put its wheel, torch-{version}+cpu-*.whl, into a folder and \
run PIP_FIND_LINKS=FOLDER make setup"""


class SetupError(Exception):
    """What is printed as the last line."""


@dataclass(frozen=True)
class Sources:
    """Where packages come from, as pip is configured on this machine.

    indexes: the main one first. links: folders or pages of wheels.
    """

    indexes: tuple[str, ...]
    links: tuple[str, ...] = ()
    no_index: bool = False
    certificates: str | None = None

    def uv_options(self) -> list[str]:
        """The same sources as options of `uv pip`.

        Of equal versions uv takes the earlier index's file, even where a later one has a better
        build for this machine, and its default index is always the last: so the main one must be
        named like the others.
        """
        *first, last = self.indexes
        options = [word for url in first for word in ("--index", url)]
        options += ["--default-index", last, "--index-strategy", "unsafe-best-match"]
        options += [word for place in self.links for word in ("--find-links", place)]
        return [*options, "--no-index"] if self.no_index else options

    def environment(self) -> dict[str, str]:
        """The variables that uv runs with."""
        trusted = {"SSL_CERT_FILE": self.certificates} if self.certificates else {}
        return {**trusted, **os.environ}


def _output(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def read_sources(python: str) -> Sources:
    """What `pip config list` says; the environment's settings win, as they do in pip."""
    listed = _output([python, "-m", "pip", "config", "list"]).splitlines()
    found: dict[str, str] = {}
    for line in sorted(listed, key=lambda line: line.startswith(":env:")):
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if section in ("global", "install", ":env:"):
            found[key] = str(ast.literal_eval(value))
    main = found.get("index-url") or _output([python, "-c", PIPS_INDEX])
    return Sources(
        indexes=(main, *found.get("extra-index-url", "").split()),
        links=tuple(found.get("find-links", "").split()),
        no_index=found.get("no-index", "").lower() in ("1", "true", "yes", "on"),
        certificates=found.get("cert"),
    )


def pins_digest(pins: list[Path]) -> str:
    """Digest of the pinned files and of the running interpreter's version."""
    digest = hashlib.sha256(sys.version.encode())
    for path in pins:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def pinned(lock: Path, package: str) -> str | None:
    """The version that the lock file names."""
    found = re.search(rf"^{re.escape(package)}==(\S+)", lock.read_text(), re.MULTILINE)
    return None if found is None else found[1]


def create(venv: Path) -> None:
    """An environment of a Python that is new enough; uv brings one where this one is not."""
    version = ".".join(map(str, sys.version_info[:2]))
    tested = ".".join(map(str, TESTED))
    if sys.version_info[:2] > TESTED:
        print(f"setup: Python {version} is newer than the tested {tested}; if a package has no "
              f"build for it, run make setup PYTHON=python{tested}", flush=True)  # fmt: skip
    if (venv / "bin" / "python").exists():
        return
    if sys.version_info[:2] >= OLDEST:
        command = [sys.executable, "-m", "venv", str(venv)]
    elif (uv := shutil.which("uv")) is not None:
        command = [uv, "venv", "--seed", "--python", tested, str(venv)]
    else:
        raise SetupError(f"setup: Python {tested} or newer is needed, this is {version}; install "
                         f"it, or uv, which brings its own")  # fmt: skip
    subprocess.run(command, check=True)


def cpu_torch(uv: list[str], version: str) -> list[str]:
    """Arguments of `uv pip install` that make it take a CPU build of torch.

    A wheel that is marked +cpu first, from wherever pip looks; then PyTorch's own index, which uv
    knows. Only Linux has CUDA builds under the plain version.
    """
    if not sys.platform.startswith("linux"):
        return []
    wanted = f"torch=={version}+cpu"
    for arguments in ([wanted], [wanted, "--torch-backend", "cpu"]):
        tried = subprocess.run([*uv, "--dry-run", "--no-deps", *arguments], capture_output=True)
        if tried.returncode == 0:
            return arguments
    raise SetupError(NO_CPU_TORCH.format(version=version))


def install(venv: Path, lock: Path) -> None:
    """Install the lock file and this project into `venv`; --no-deps: see the lock file's head."""
    python = str(venv / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    sources = read_sources(python)
    torch = pinned(lock, "torch")
    uv_version = pinned(lock, "uv")
    bootstrap = [*pip, "install", "--quiet", f"uv=={uv_version}"]
    if uv_version and subprocess.run(bootstrap).returncode == 0:
        uv = [str(venv / "bin" / "uv"), "pip", "install", "--python", python, "--quiet"]
        uv += sources.uv_options()
        os.environ.update(sources.environment())
        chosen = cpu_torch(uv, torch) if torch else []
        uv += ["--no-deps", "--compile-bytecode"]
        subprocess.run([*uv, "-r", str(lock), *chosen], check=True)
        subprocess.run([*uv, "--no-build-isolation", "-e", "."], check=True)
        return
    print("setup: the package index has no uv; pip takes minutes", flush=True)
    wanted = [f"torch=={torch}+cpu"] if torch and sys.platform.startswith("linux") else []
    install = [*pip, "install", "--quiet", "--no-deps"]
    if wanted and subprocess.run([*install, *wanted]).returncode != 0:
        raise SetupError(NO_CPU_TORCH.format(version=torch))
    subprocess.run([*install, "-r", str(lock)], check=True)
    subprocess.run([*install, "--no-build-isolation", "-e", "."], check=True)


def main() -> int:
    """Entry point."""
    venv, *pins = (Path(argument) for argument in sys.argv[1:])
    digest, stamp = pins_digest(pins), venv / STAMP
    if stamp.exists() and stamp.read_text().strip() == digest:
        return 0
    print(f"setup: installing pinned packages into {venv} (3 GB)", flush=True)
    started = time.monotonic()
    stamp.unlink(missing_ok=True)
    try:
        create(venv)
        install(venv, pins[0])
        subprocess.run([str(venv / "bin" / "python"), "-c", RUNS], check=True)
    except SetupError as error:
        print(error, file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"setup failed: {' '.join(map(str, error.cmd))}", file=sys.stderr)
        return 1
    stamp.write_text(digest + "\n")
    print(f"setup: done in {time.monotonic() - started:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
