"""Make the virtual environment with every package pinned, or keep one whose pins still match.

    python3 tools/setup_venv.py VENV PINS...

Standard library only: it runs before anything is installed. The first file of PINS is the lock
file, whose name says for which machine: cpu.lock or gpu.lock. A digest of all PINS and of the
interpreter is left in the environment; when it matches, nothing is done.

Packages are installed by uv, which pip fetches first; where the package index has no uv, by pip.
uv does not read pip's configuration, so it is given pip's indexes and find-links here.
"""

from __future__ import annotations

import ast
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

STAMP = "opd-pins.sha256"
COMPILE_IMPORTS = Path(__file__).with_name("compile_imports.py")
PIPS_INDEX = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"
NO_CPU_TORCH = """\
setup: no CPU build of torch {version} was found: pip's indexes and find-links have none, and \
PyTorch's own index does not answer. Put its wheel, torch-{version}+cpu-*.whl, into a folder and \
run PIP_FIND_LINKS=FOLDER make setup"""


NO_COMPILER = """\
setup: no C++ compiler (g++) was found on PATH: TransformerEngine's torch extension has no wheel \
and is compiled here. Install g++ (apt-get install g++), or use the Dockerfile"""
NO_HEADERS = """\
setup: Python's headers are missing ({place}): TransformerEngine's torch extension is compiled \
against them. Install python{version}-dev, or use a Python of uv, which brings them"""
# TransformerEngine's build would take a ready wheel from elsewhere, which the lock has no hash of.
BUILD = {"NVTE_PYTORCH_FORCE_BUILD": "TRUE"}
# Asks for Python 3.12. What the learner imports of it runs on 3.11 too, which the tests hold; of
# the installers only pip can be told so, and of its files only the sdist fits any Python. Its one
# extension, for pretraining data sets, is optional: without a compiler it is left out.
MEGATRON, MEGATRON_PYTHON = "megatron-core", (3, 12)
NO_EXTENSION = {"CXX": "false"}
GLIBC = (2, 34)  # SGLang's wheels are manylinux_2_34


class SetupError(Exception):
    """What is printed as the last line."""


@dataclass(frozen=True)
class Machine:
    """What differs between machines; the lock's name chooses.

    python: the oldest that will do, which is the tested one. cpu_torch: take a +cpu build of torch.
    compiled: packages without a wheel, which are compiled against the others, so after them.
    runs: fails where a wheel of the wrong kind was taken, by CUDA's libraries or by a C library
    that should be bundled. size: of the environment.
    """

    python: tuple[int, int]
    cpu_torch: bool
    compiled: tuple[str, ...]
    runs: str
    size: str


MACHINES = {
    "cpu": Machine(
        python=(3, 11),
        cpu_torch=True,
        compiled=(),
        runs="import torch, soundfile; assert torch.version.cuda is None",
        size="3 GB",
    ),
    "gpu": Machine(
        python=MEGATRON_PYTHON,
        cpu_torch=False,
        compiled=("transformer-engine-torch",),
        # loads the compiled extension, which lies in transformer_engine/wheel_lib
        runs="import torch, soundfile; assert torch.version.cuda, 'a CPU build of torch'; "
        "import transformer_engine.pytorch",
        size="11 GB; TransformerEngine's extension is compiled, which takes minutes",
    ),
}


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


def lock_toolkit(venv: Path) -> dict[str, str]:
    """Variables with which to compile by the toolkit that the lock has installed, made whole.

    CUDA's wheels hold the compiler and all headers. What linkers look for besides is made here:
    lib64, and the runtime library by a name without its version. Another toolkit on PATH or in
    CUDA_HOME may be partial, or of another CUDA, and is not taken.
    """
    [nvidia] = venv.absolute().glob("lib/python3*/site-packages/nvidia")  # compilers run elsewhere
    home = nvidia / "cu13"
    links = {"lib64": "lib", "lib/libcudart.so": "libcudart.so.13"}
    for name, target in links.items():
        if not (home / name).exists():
            (home / name).symlink_to(target)
    headers = [home / "include", nvidia / "cudnn" / "include", nvidia / "nccl" / "include"]
    path = f"{home / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    home_too = {name: str(home) for name in ("CUDA_HOME", "CUDA_PATH")}
    return {**home_too, "PATH": path, "CPATH": os.pathsep.join(map(str, headers))}


def require_headers(python: str) -> None:
    """Say that an interpreter has no headers. SetupError."""
    code = "import sys, sysconfig; print(sysconfig.get_path('include')); "
    place, version = _output(
        [python, "-c", code + "print(*sys.version_info[:2], sep='.')"]
    ).splitlines()
    if not (Path(place) / "Python.h").exists():
        raise SetupError(NO_HEADERS.format(place=place, version=version))


def create(venv: Path, oldest: tuple[int, int]) -> None:
    """An environment of a Python that is new enough; uv brings one where this one is not."""
    version = ".".join(map(str, sys.version_info[:2]))
    tested = ".".join(map(str, oldest))
    if sys.version_info[:2] > oldest:
        print(f"setup: Python {version} is newer than the tested {tested}; if a package has no "
              f"build for it, add PYTHON=python{tested} to make", flush=True)  # fmt: skip
    if (venv / "bin" / "python").exists():
        return
    uv = shutil.which("uv")
    if sys.version_info[:2] >= oldest:
        command = [sys.executable, "-m", "venv", str(venv)]
    elif uv is not None:
        command = [uv, "venv", "--seed", "--python", tested, str(venv)]
    else:
        raise SetupError(f"setup: Python {tested} or newer is needed, this is {version}; install "
                         f"it and add PYTHON=python{tested} to make, or install uv, which brings "
                         f"its own")  # fmt: skip
    subprocess.run(command, check=True)


def python_of(python: str) -> tuple[int, ...]:
    """The version of an interpreter: an environment that was there keeps its own."""
    code = "import sys; print(*sys.version_info[:2])"
    return tuple(map(int, _output([python, "-c", code]).split()))


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


def require_gpu_machine() -> None:
    """Say what a GPU environment lacks before gigabytes are fetched for it."""
    machine = f"{sys.platform} {platform.machine()}"
    if machine != "linux x86_64":
        raise SetupError(f"setup: requirements/gpu.lock is for Linux x86-64, this is {machine}")
    name, version = platform.libc_ver()
    if name == "glibc" and tuple(map(int, version.split(".")[:2])) < GLIBC:
        raise SetupError(f"setup: glibc {version} is too old: SGLang's wheels need 2.34 or newer "
                         f"(Ubuntu 22.04, Debian 12, RHEL 9)")  # fmt: skip
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        raise SetupError(NO_COMPILER)


def split_lock(lock: Path, *later: tuple[str, ...]) -> list[str]:
    """The lock's text without the packages in `later`, then that of each group of them.

    A package's hashes stay with it. A group that the lock has nothing of is "".
    """
    text = re.sub(r"\\\n\s*", "", lock.read_text())  # one line a package
    lines = [line for line in text.splitlines() if line and not line.lstrip().startswith("#")]
    groups: list[str] = [""] * (1 + len(later))
    for line in lines:
        name = line.partition("==")[0]
        groups[next((1 + i for i, group in enumerate(later) if name in group), 0)] += f"{line}\n"
    return groups


def install(venv: Path, lock: Path, machine: Machine) -> None:
    """Install the lock file and this project into `venv`.

    --no-deps: the lock is complete, and what else some packages ask for is left out on purpose.
    """
    python = str(venv / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    sources = read_sources(python)
    torch = pinned(lock, "torch") if machine.cpu_torch else None
    uv_version = pinned(lock, "uv")
    bootstrap = [*pip, "install", "--quiet", "--no-deps", f"uv=={uv_version}"]
    if uv_version and subprocess.run(bootstrap).returncode == 0:
        uv = [str(venv / "bin" / "uv"), "pip", "install", "--python", python, "--quiet"]
        uv += sources.uv_options()
        os.environ.update(sources.environment())
        chosen = cpu_torch(uv, torch) if torch else []
        command = [*uv, "--no-deps"]
    else:
        print("setup: the package index has no uv; pip takes minutes", flush=True)
        chosen, command = [], [*pip, "install", "--quiet", "--no-deps", "--no-compile"]
        wanted = f"torch=={torch}+cpu"
        linux = sys.platform.startswith("linux")
        if torch and linux and subprocess.run([*command, wanted]).returncode != 0:
            raise SetupError(NO_CPU_TORCH.format(version=torch))
    built = ["--no-build-isolation"]
    too_old = (MEGATRON,) if python_of(python) < MEGATRON_PYTHON else ()
    sdist = [*pip, "install", "--quiet", "--no-deps", *built, "--no-compile"]
    sdist += ["--ignore-requires-python", "--no-binary", MEGATRON]
    texts = split_lock(lock, machine.compiled, too_old)
    runs = ([*command, *chosen], [*command, *built], sdist)
    for index, (text, run, more) in enumerate(
        zip(texts, runs, ({}, BUILD, NO_EXTENSION), strict=True)
    ):
        if text:
            part = venv / f"{lock.stem}-{index}.txt"
            part.write_text(text)
            more = {**more, **lock_toolkit(venv)} if more is BUILD else more
            subprocess.run([*run, "-r", str(part)], env={**os.environ, **more}, check=True)
    subprocess.run([*command, *built, "-e", "."], check=True)


def check_runs(venv: Path, code: str) -> None:
    """Run what fails where a wheel was taken that does not suit this machine."""
    python = str(venv / "bin" / "python")
    done = subprocess.run([python, "-c", code], stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise SetupError(f"setup: the packages were installed but do not run: {last}; see whether "
                         f"one of pip's indexes serves wheels for another machine")  # fmt: skip


def main() -> int:
    """Entry point."""
    venv, *pins = (Path(argument) for argument in sys.argv[1:])
    machine = MACHINES[pins[0].stem]
    digest, stamp = pins_digest(pins), venv / STAMP
    if stamp.exists() and stamp.read_text().strip() == digest:
        return 0
    print(f"setup: installing pinned packages into {venv} ({machine.size})", flush=True)
    started = time.monotonic()
    stamp.unlink(missing_ok=True)
    try:
        if not machine.cpu_torch:
            require_gpu_machine()
        create(venv, machine.python)
        if machine.compiled:
            require_headers(str(venv / "bin" / "python"))
        install(venv, pins[0], machine)
        subprocess.run([str(venv / "bin" / "python"), str(COMPILE_IMPORTS)], check=True)
        check_runs(venv, machine.runs)
    except SetupError as error:
        print(error, file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        # an index's address may hold a password
        words = ["ADDRESS" if "://" in str(word) else str(word) for word in error.cmd]
        print(f"setup failed: {' '.join(words)}", file=sys.stderr)
        return 1
    stamp.write_text(digest + "\n")
    print(f"setup: done in {time.monotonic() - started:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
