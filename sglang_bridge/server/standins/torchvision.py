"""Stands in for torchvision on machines without CUDA.

The torchvision wheel on PyPI is linked against CUDA builds of torch and cannot be loaded beside a
CPU build. SGLang and transformers only name its image transforms in annotations and constants; a
text model never calls one. Every attribute is a class whose attributes are strings, which is enough
for `InterpolationMode.BICUBIC`; calling one raises TypeError.
"""

import importlib.machinery
import sys
import types
from typing import Any

__version__ = "0.28.0"
__path__: list[str] = []  # a package, so that `import torchvision.transforms` finds sys.modules


class _Name(type):
    """Answers any public attribute with its own qualified spelling."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"torchvision is a stand-in here: {cls.__name__} cannot be used")


class _Module(types.ModuleType):
    """Makes missing attributes of a module `_Name` classes."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name, (), {})


for _name in (
    "io",
    "transforms",
    "transforms.functional",
    "transforms.v2",
    "transforms.v2.functional",
):
    _full = f"{__name__}.{_name}"
    sys.modules[_full] = _Module(_full)
    _parent, _, _leaf = _full.rpartition(".")
    setattr(sys.modules[_parent], _leaf, sys.modules[_full])
