"""Set-up takes a CPU build of torch from wherever it is, and says what to do where there is none.

The package index is a folder made here; its wheels hold nothing but their names.
"""

import os
import platform
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tools.setup_venv import SetupError, Sources, cpu_torch, pinned, read_sources

VERSION = "2.13.0"


ANY = "py3-none-any"


def wheel(folder: Path, name: str, version: str, tag: str = ANY) -> None:
    """A wheel of no files."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    record = "".join(f"{path},,\n" for path in files) + f"{info}/RECORD,,\n"
    with zipfile.ZipFile(folder / f"{name}-{version}-{tag}.whl", "w") as archive:
        for path, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(path, text)


def index(root: Path, version: str, tag: str = ANY) -> str:
    """The address of a package index that has one build of torch."""
    wheel(root / "torch", "torch", version, tag)
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


def installed(python: Path, what: str = "version") -> str:
    code = f"from importlib.metadata import distribution as d; print(d('torch').{what})"
    return subprocess.run(
        [python, "-c", code], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.mark.parametrize("place", ["find-links", "extra index"])
def test_a_cpu_build_is_taken_before_the_index_s_cuda_build(
    place: str, empty: Path, tmp_path: Path
):
    main = index(tmp_path / "cuda", VERSION)
    if place == "find-links":
        wheel(tmp_path / "wheels", "torch", f"{VERSION}+cpu")
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
