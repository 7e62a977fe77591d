"""A package index on loopback, of stand-in packages that hold next to nothing."""

import hashlib
import io
import os
import tarfile
import threading
import venv
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pip
import uv

ANY = "py3-none-any"
# A build backend inside its own project: nothing else has to be installed for it.
BACKEND = """\
import zipfile
{imports}
def wheel(folder, *_):
    name = "{stem}-{version}-py3-none-any.whl"
    info = "{stem}-{version}.dist-info"
    files = {{
        info + "/METADATA": "Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n"
        "Requires-Python: {python}\\n",
        info + "/WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
        "{module}": "",
    }}
    record = "".join(path + ",,\\n" for path in files) + info + "/RECORD,,\\n"
    with zipfile.ZipFile(folder + "/" + name, "w") as archive:
        for path, text in (files | {{info + "/RECORD": record}}).items():
            archive.writestr(path, text)
    return name
build_wheel = build_editable = wheel
"""
PYPROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'


def write_wheel(
    folder: Path,
    name: str,
    version: str,
    tag: str = ANY,
    files: Mapping[str, str] | None = None,
) -> Path:
    """A wheel of `files`, by their paths in it."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = name.replace("-", "_")
    info = f"{stem}-{version}.dist-info"
    held = {
        **(files or {}),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    record = "".join(f"{path},,\n" for path in held) + f"{info}/RECORD,,\n"
    path = folder / f"{stem}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for inside, text in {**held, f"{info}/RECORD": record}.items():
            entry = zipfile.ZipInfo(inside)
            entry.external_attr = 0o100755 << 16  # a script must stay one
            archive.writestr(entry, text)
    return path


def write_torch(folder: Path, version: str, cuda: str | None, tag: str = ANY) -> Path:
    """A torch that only knows which CUDA it was built for."""
    files = {"torch/__init__.py": f"class version:\n    cuda = {cuda!r}\n"}
    return write_wheel(folder, "torch", version, tag, files)


def write_project(
    folder: Path,
    name: str,
    version: str,
    imports: str = "",
    module: str | None = None,
    python: str = ">=3.11",
) -> None:
    """A project's source; its build needs what `imports` imports, and makes the file `module`."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = name.replace("-", "_")
    names = {"name": name, "stem": stem, "version": version, "python": python}
    names["module"] = module or f"{stem}.py"
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (folder / "backend.py").write_text(BACKEND.format(imports=imports, **names))


def write_sdist(
    folder: Path,
    name: str,
    version: str,
    imports: str = "",
    module: str | None = None,
    python: str = ">=3.11",
) -> Path:
    """A package's source. module: the file that its build makes. python: what it asks for."""
    source = folder / "source"
    write_project(source, name, version, imports, module, python)
    stem = f"{name.replace('-', '_')}-{version}"
    metadata = f"Metadata-Version: 2.2\nName: {name}\nVersion: {version}\n"
    metadata += f"Requires-Python: {python}\n"
    with tarfile.open(folder / f"{stem}.tar.gz", "w:gz") as archive:
        for path in source.iterdir():
            archive.add(path, f"{stem}/{path.name}")
        entry = tarfile.TarInfo(f"{stem}/PKG-INFO")
        entry.size = len(metadata)
        archive.addfile(entry, io.BytesIO(metadata.encode()))
    return folder / f"{stem}.tar.gz"


def write_uv(folder: Path, version: str) -> None:
    """A `uv` that runs the one of this environment."""
    script = f'#!/bin/sh\nexec {uv.find_uv_bin()} "$@"\n'
    write_wheel(folder, "uv", version, files={f"uv-{version}.data/scripts/uv": script})


def environment_with_pip(path: Path) -> None:
    """What `python -m venv` makes, but with this environment's pip: seconds faster."""
    venv.create(path, symlinks=True, with_pip=False)
    [site] = path.glob("lib/*/site-packages")
    (site / "pip").symlink_to(Path(pip.__file__).parent)


def hash_of(path: Path) -> str:
    """As a lock file states it."""
    return f"--hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


class Quiet(SimpleHTTPRequestHandler):
    """Lists a folder's files as links, which is all that an index is."""

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def served(root: Path) -> Iterator[str]:
    """The address of an index whose projects are the folders of `root`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(root)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def settings(index: str, links: Path | None = None) -> dict[str, str]:
    """The environment of a machine that reaches `index` and nothing else."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))
    }
    nowhere = "http://127.0.0.1:9"  # the discard port: refused at once
    return {
        **kept,
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": index,
        **({} if links is None else {"PIP_FIND_LINKS": str(links)}),
        "UV_NO_CACHE": "1",
        "UV_NO_CONFIG": "1",
        "UV_HTTP_RETRIES": "0",
        "HTTPS_PROXY": nowhere,
        "HTTP_PROXY": nowhere,
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
