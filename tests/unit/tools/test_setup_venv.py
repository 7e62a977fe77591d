"""Set-up takes a CPU build of torch from wherever it is, and says what to do where there is none.

The package index is a folder made here; its wheels hold nothing but their names.
"""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.package_index import (
    ANY,
    environment_with_pip,
    hash_of,
    served,
    settings,
    write_project,
    write_sdist,
    write_torch,
    write_uv,
    write_wheel,
)
from tools import setup_venv
from tools.setup_venv import (
    SetupError,
    Sources,
    cpu_torch,
    create,
    pinned,
    read_sources,
    require_gpu_machine,
    split_lock,
)

VERSION = "2.13.0"
SCRIPT = Path(setup_venv.__file__)


def index(root: Path, version: str, tag: str = ANY) -> str:
    """The address of a package index that has one build of torch."""
    write_torch(root / "torch", version, None, tag)
    links = [f'<a href="{path.name}">{path.name}</a>' for path in (root / "torch").glob("*.whl")]
    (root / "torch" / "index.html").write_text("<html><body>" + "".join(links) + "</body></html>")
    return root.as_uri()


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """The interpreter of an environment without packages."""
    uv = [sys.executable, "-m", "uv", "venv", "--quiet", str(tmp_path / "empty")]
    subprocess.run(uv, check=True)
    return tmp_path / "empty" / "bin" / "python"


def uv_of(python: Path, sources: Sources) -> list[str]:
    uv = [sys.executable, "-m", "uv", "pip", "install", "--python", str(python), "--no-cache"]
    return [*uv, *sources.uv_options()]


def installed(python: Path, what: str = "version", package: str = "torch") -> str:
    code = f"from importlib.metadata import distribution as d; print(d('{package}').{what})"
    return subprocess.run(
        [python, "-c", code], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.mark.parametrize("place", ["find-links", "extra index"])
def test_a_cpu_build_is_taken_before_the_index_s_cuda_build(
    place: str, empty: Path, tmp_path: Path
):
    main = index(tmp_path / "cuda", VERSION)
    if place == "find-links":
        write_torch(tmp_path / "wheels", f"{VERSION}+cpu", None)
        sources = Sources((main,), links=(str(tmp_path / "wheels"),))
    else:
        sources = Sources((main, index(tmp_path / "cpu", f"{VERSION}+cpu")))
    uv = uv_of(empty, sources)
    chosen = cpu_torch(uv, VERSION)
    subprocess.run([*uv, "--no-deps", f"torch=={VERSION}", *chosen], check=True)
    assert installed(empty) == f"{VERSION}+cpu"


def test_of_equal_versions_the_build_for_this_machine_is_taken(empty: Path, tmp_path: Path):
    """As pip does. uv asks an extra index first and once took a wheel without its library."""
    main = index(tmp_path / "main", VERSION, f"py3-none-linux_{platform.machine()}")
    uv = uv_of(empty, Sources((main, index(tmp_path / "extra", VERSION))))
    subprocess.run([*uv, "--no-deps", f"torch=={VERSION}"], check=True)
    assert "linux" in installed(empty, "read_text('WHEEL')")


def test_an_index_of_cuda_builds_alone_is_an_error_that_says_what_to_do(
    empty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("UV_OFFLINE", "1")  # as where PyTorch's own index does not answer
    uv = uv_of(empty, Sources((index(tmp_path / "cuda", VERSION),)))
    with pytest.raises(SetupError, match=r"no CPU build of torch 2.13.0 .* PIP_FIND_LINKS=FOLDER"):
        cpu_torch(uv, VERSION)


def test_pip_s_settings_are_read_and_the_environment_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    settings = tmp_path / "pip.conf"
    settings.write_text(
        "[global]\nindex-url = file:///main\nextra-index-url = file:///one file:///two\n"
        "find-links = /wheels\n[install]\nno-index = false\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(settings))
    monkeypatch.setenv("PIP_FIND_LINKS", "/mine")
    found = read_sources(sys.executable)
    assert found.indexes == ("file:///main", "file:///one", "file:///two")
    assert (found.links, found.no_index) == (("/mine",), False)
    words = found.uv_options()
    assert words[words.index("--default-index") + 1] == "file:///two", "uv asks it last"


def test_the_lock_s_versions_are_found():
    lock = Path("requirements/cpu.lock")
    assert pinned(lock, "torch") == VERSION
    assert pinned(lock, "uv") is not None
    assert pinned(lock, "no-such-package") is None


class Machine:
    """A checkout and an index that serves CUDA's torch alone, as many machines' does."""

    def __init__(self, root: Path, lock: str = "cpu") -> None:
        self.root, self.index = root, root / "index"
        self.links, self.venv = root / "wheels", root / "venv"
        self.lock = root / "checkout" / f"{lock}.lock"
        environment_with_pip(self.venv)
        write_project(self.lock.parent, "checkout", "1.0")
        write_torch(self.index / "torch", VERSION, cuda="13.0")
        write_wheel(self.index / "soundfile", "soundfile", "1.0", files={"soundfile.py": ""})
        write_uv(self.index / "uv", "0.1")
        self.lock.write_text(f"soundfile==1.0\ntorch=={VERSION}\nuv==0.1\n")

    def setup(self, **more: str) -> subprocess.CompletedProcess[str]:
        here = self.lock.parent
        with served(self.index) as address:
            links = self.links if self.links.exists() else None
            return subprocess.run(
                # relative, as make names it
                [sys.executable, SCRIPT, os.path.relpath(self.venv, here), self.lock.name],
                cwd=here,
                env=settings(address, links) | more,
                capture_output=True,
                text=True,
            )

    def versions(self) -> str:
        return installed(self.venv / "bin" / "python")


def test_where_no_cpu_build_is_reachable_one_line_says_what_to_do(tmp_path: Path):
    machine = Machine(tmp_path)
    found = machine.setup()
    assert found.returncode == 1
    assert found.stderr.splitlines() == [setup_venv.NO_CPU_TORCH.format(version=VERSION)]
    assert not (machine.venv / setup_venv.STAMP).exists(), "the next set-up tries again"


def test_a_machine_whose_index_has_cuda_builds_takes_the_cpu_wheel_beside_it(tmp_path: Path):
    machine = Machine(tmp_path)
    write_torch(machine.links, f"{VERSION}+cpu", cuda=None)
    found = machine.setup()
    assert (found.returncode, found.stderr) == (0, "")
    assert machine.versions() == f"{VERSION}+cpu"
    assert machine.setup().stdout == "", "the pins match: nothing is done"


def test_without_uv_pip_takes_the_cpu_wheel_too(tmp_path: Path):
    machine = Machine(tmp_path)
    shutil.rmtree(machine.index / "uv")
    machine.lock.write_text(f"soundfile==1.0\ntorch=={VERSION}\n")
    write_torch(machine.links, f"{VERSION}+cpu", cuda=None)
    found = machine.setup()
    assert found.returncode == 0, found.stderr
    assert "the package index has no uv" in found.stdout
    assert machine.versions() == f"{VERSION}+cpu"


def test_what_was_installed_but_does_not_run_is_told_in_one_line(tmp_path: Path):
    machine = Machine(tmp_path)
    write_torch(machine.links, f"{VERSION}+cpu", cuda=None)
    broken = {"soundfile.py": "raise OSError('sndfile library not found')"}
    write_wheel(machine.index / "soundfile", "soundfile", "1.0", files=broken)
    found = machine.setup()
    assert found.returncode == 1
    [line] = found.stderr.splitlines()
    assert "do not run: OSError: sndfile library not found" in line
    assert not (machine.venv / setup_venv.STAMP).exists()


def test_where_python_is_older_than_megatron_asks_for_its_source_is_built(tmp_path: Path):
    """Without a compiler, which would take seconds for an extension that nothing here uses."""
    machine, name = Machine(tmp_path), setup_venv.MEGATRON
    write_torch(machine.links, f"{VERSION}+cpu", cuda=None)
    older = sys.version_info[:2] < setup_venv.MEGATRON_PYTHON
    checked = "import os; assert os.environ['CXX'] == 'false'" if older else ""
    write_sdist(machine.index / name, name, "0.19.2", checked, python=">=3.12")
    write_wheel(machine.index / name, name, "0.19.2", "cp312-cp312-linux_x86_64")
    machine.lock.write_text(f"{machine.lock.read_text()}{name}==0.19.2\n")
    found = machine.setup(CXX="g++")
    assert (found.returncode, found.stderr) == (0, "")
    assert installed(machine.venv / "bin" / "python", package=name) == "0.19.2"


# As TransformerEngine lies: its wheel is Python alone, and loads what the source package compiles
# into the wheel's own folder, under no module name of its own.
ENGINE = {
    "transformer_engine/__init__.py": "",
    "transformer_engine/pytorch/__init__.py": (
        "from pathlib import Path\n"
        "folder = Path(__file__).parents[1] / 'wheel_lib'\n"
        "[extension] = folder.glob('transformer_engine_torch*')\n"
        "exec(extension.read_text())\n"
    ),
}


# Compiler, headers and libraries of CUDA, as its wheels lay them out.
TOOLKIT = {
    "nvidia/cu13/bin/nvcc": "#!/bin/sh\n",
    "nvidia/cu13/include/cuda.h": "",
    "nvidia/cu13/lib/libcudart.so.13": "",
}
COMPILES_BY_IT = """
import os, shutil, torch
home = os.environ["CUDA_HOME"]
assert home.endswith("site-packages/nvidia/cu13"), home
assert os.path.isabs(home), "what compiles runs elsewhere"
assert os.environ["CUDA_PATH"] == home
assert shutil.which("nvcc") == home + "/bin/nvcc", shutil.which("nvcc")
assert os.path.exists(home + "/lib64/libcudart.so")
assert os.environ["CPATH"].split(":")[1].endswith("nvidia/cudnn/include")
"""


@pytest.mark.parametrize("loads", [True, False])
def test_the_gpu_set_up_compiles_last_against_the_torch_that_it_installed(
    tmp_path: Path, loads: bool
):
    machine = Machine(tmp_path, lock="gpu")
    name = "transformer-engine-torch"
    extension = "transformer_engine/wheel_lib/transformer_engine_torch.so"
    module = extension if loads else "elsewhere.so"
    source = write_sdist(machine.index / name, name, "2.11.0", COMPILES_BY_IT, module)
    package = "transformer-engine"
    wheel = write_wheel(machine.index / package, package, "2.11.0", files=ENGINE)
    nvcc = "nvidia-cuda-nvcc"
    wheels = [
        *(machine.index / "torch").glob("*.whl"),
        *(machine.index / "soundfile").glob("*"),
        wheel,
        write_wheel(machine.index / nvcc, nvcc, "13.5", files=TOOLKIT),
    ]
    pins = [f"torch=={VERSION}", "soundfile==1.0", f"{package}==2.11.0", f"{nvcc}==13.5"]
    lock = [f"{pin} \\\n    {hash_of(path)}" for pin, path in zip(pins, wheels, strict=True)]
    lock.insert(0, f"{name}==2.11.0 \\\n    {hash_of(source)}")
    [uv] = (machine.index / "uv").glob("*")
    machine.lock.write_text("\n".join([*lock, f"uv==0.1 \\\n    {hash_of(uv)}\n"]))
    partial = tmp_path / "cuda" / "bin"  # without headers, and first on PATH
    partial.mkdir(parents=True)
    (partial / "nvcc").write_text("#!/bin/sh\n")
    (partial / "nvcc").chmod(0o755)
    path = f"{partial}{os.pathsep}{os.environ['PATH']}"
    found = machine.setup(CUDA_HOME=str(tmp_path / "cuda"), PATH=path)
    assert machine.versions() == VERSION, "the index's CUDA build"
    assert (machine.venv / setup_venv.STAMP).exists() == loads
    if loads:
        assert (found.returncode, found.stderr) == (0, "")
    else:
        assert found.returncode == 1
        [line] = found.stderr.splitlines()
        assert "were installed but do not run: ValueError" in line


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"system": "darwin"}, "is for Linux x86-64, this is darwin x86_64"),
        ({"machine": "aarch64"}, "is for Linux x86-64, this is linux aarch64"),
        ({"libc": ("glibc", "2.31")}, "glibc 2.31 is too old: SGLang's wheels need 2.34"),
        ({}, r"no C\+\+ compiler \(g\+\+\) was found on PATH"),
    ],
    ids=str,
)
def test_what_a_gpu_machine_lacks_is_said_before_anything_is_fetched(
    change: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    found = {"system": "linux", "machine": "x86_64", "libc": ("glibc", "2.39")} | change
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(setup_venv.sys, "platform", found["system"])
    monkeypatch.setattr(setup_venv.platform, "machine", lambda: found["machine"])
    monkeypatch.setattr(setup_venv.platform, "libc_ver", lambda: found["libc"])
    with pytest.raises(SetupError, match=message):
        require_gpu_machine()


def test_an_interpreter_without_headers_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    setup_venv.require_headers(sys.executable)
    monkeypatch.setattr(setup_venv, "_output", lambda command: f"{tmp_path}\n3.12")
    with pytest.raises(SetupError, match=r"headers are missing .*Install python3\.12-dev"):
        setup_venv.require_headers(sys.executable)


def test_a_package_s_hashes_stay_with_it(tmp_path: Path):
    lock = tmp_path / "gpu.lock"
    lock.write_text("# by hand\na==1 \\\n    --hash=x \\\n    --hash=y\nb==2 \\\n    --hash=z\n")
    first, later = split_lock(lock, ("b",))
    assert (first.split(), later.split()) == (
        ["a==1", "--hash=x", "--hash=y"],
        ["b==2", "--hash=z"],
    )


def with_python(monkeypatch: pytest.MonkeyPatch, version: tuple[int, int]) -> None:
    python = SimpleNamespace(version_info=(*version, 0), executable=sys.executable)
    monkeypatch.setattr(setup_venv, "sys", python)


def test_a_python_newer_than_tested_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    with_python(monkeypatch, (3, 14))
    create(tmp_path, (3, 11))
    assert capsys.readouterr().out == (
        "setup: Python 3.14 is newer than the tested 3.11; if a package has no build for it, add "
        "PYTHON=python3.11 to make\n"
    )


@pytest.mark.parametrize(("lock", "wanted"), [("cpu", "3.11"), ("gpu", "3.12")])
def test_a_python_too_old_is_told_in_one_line_unless_uv_brings_one(
    lock: str, wanted: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    oldest = setup_venv.MACHINES[lock].python
    with_python(monkeypatch, (oldest[0], oldest[1] - 1))
    monkeypatch.setenv("PATH", str(tmp_path))
    needed = rf"^setup: Python {wanted} or newer is needed, this is 3\.1[01]; install it and add"
    with pytest.raises(SetupError, match=needed):
        create(tmp_path / "venv", oldest)
    uv = tmp_path / "uv"
    uv.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n')
    uv.chmod(0o755)
    create(tmp_path / "venv", oldest)
    asked = (tmp_path / "asked").read_text().split()
    assert asked == ["venv", "--seed", "--python", wanted, str(tmp_path / "venv")]
