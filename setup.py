"""Packaging: the `opd` program, SGLang's plugin entry points, and extras by machine."""

from setuptools import find_packages, setup

# Everything the controller and the client side need; no deep-learning stack.
CORE = [
    "aiohttp==3.14.5",
    "matplotlib==3.11.2",
    "msgspec==0.22.0",
    "numpy==2.4.6",
    "nvidia-ml-py==13.615.71",
    "psutil==7.2.2",
    "pyarrow==26.0.1",
    "pydantic==2.14.3",
    "pyyaml==6.0.3",
    "pyzmq==27.3.0",
    "rich==15.0.0",
    "safetensors==0.8.0",
    "tensorboard==2.21.0",
    "tokenizers==0.23.2",
    "transformers==5.19.0",
    "xxhash==4.1.0",
]
ENGINES = ["megatron-core==0.16.1", "torch==2.13.0"]

setup(
    name="megatron-opd",
    version="0.1.0",
    description="Asynchronous on-policy distillation with Megatron-Core and SGLang",
    long_description=open("README.md", encoding="utf-8").read(),  # noqa: SIM115
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["megatron_opd*", "sglang_bridge*"]),
    package_data={
        "megatron_opd": ["py.typed"],
        "sglang_bridge": ["py.typed", "server/options.txt"],
    },
    install_requires=CORE,
    extras_require={
        # SGLang itself is installed from requirements/cpu.lock with --no-deps: its declared
        # requirements are CUDA builds that a plain CPU cannot use.
        "cpu": ENGINES,
        # Without NVIDIA apex on purpose: it is optional, built from its source, and the `apex`
        # on PyPI is another project.
        # TransformerEngine: the versions that megatron-core 0.16.1's own metadata names.
        "gpu": [*ENGINES, "sglang==0.5.23", "transformer-engine[pytorch]>=2.9.0,<2.12.0"],
        "ray": ["ray>=2.40"],
        "test": [
            "hypothesis==6.170.15",
            "pyright[nodejs]==1.1.414",
            "pytest==9.2.0",
            "pytest-timeout==2.4.0",
            "ruff==0.17.5",
        ],
    },
    entry_points={
        "console_scripts": ["opd = megatron_opd.cli.main:main"],
        "sglang.srt.plugins": ["opd = sglang_bridge.server.plugin:register"],
        "sglang.srt.platforms": ["opd_cpu = sglang_bridge.server.platform:activate"],
    },
)
