"""Packaging: the `opd` program, SGLang's plugin entry points, and extras by machine."""

from setuptools import find_packages, setup

# Everything the controller and the client side need; no deep-learning stack. Ranges, from the
# oldest version that is tested: the locks in requirements/ pin every package exactly.
CORE = [
    "aiohttp>=3.14.5,<4",
    "jsonschema>=4.26.0,<5",
    "math-verify[antlr4_13_2]>=0.9.0,<0.10",
    "msgspec>=0.22.0,<1",
    "numpy>=2.3.5,<3",
    "nvidia-ml-py>=13.615.71",
    "psutil>=7.2.2,<8",
    "pyarrow>=26.0.1,<27",
    "pydantic>=2.14.3,<3",
    "pyyaml>=6.0.3,<7",
    "pyzmq>=27.3.0,<28",
    "rich>=15.0.0,<16",
    "safetensors>=0.8.0,<1",
    "scipy>=1.17.1,<2",
    "tensorboard>=2.21.0,<3",
    "tokenizers>=0.23.2,<1",
    "transformers>=5.19.0,<6",
    "xxhash>=4.1.0,<5",
    "zstandard>=0.25.0,<1",
]
# The engines are exact: this project reaches into them.
MEGATRON = "megatron-core==0.19.2"

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
        "megatron_opd.report": ["static/*", "static/uplot/*"],
        "megatron_opd.watch": ["static/*"],
        "sglang_bridge": ["py.typed", "server/options.txt"],
    },
    install_requires=CORE,
    extras_require={
        # SGLang itself is installed from requirements/cpu.lock with --no-deps: its declared
        # requirements are CUDA builds that a plain CPU cannot use.
        "cpu": [MEGATRON, "torch==2.13.0"],
        # Without NVIDIA apex on purpose: it is optional, built from its source, and the `apex`
        # on PyPI is another project. torch: what this SGLang demands. TransformerEngine: from
        # 2.14.1 Megatron-Core 0.19 finds its fused clipping; for torch's CUDA 13.
        "gpu": [
            MEGATRON,
            "sglang==0.5.23",
            "torch==2.14.1",
            "transformer-engine[core_cu13,pytorch]>=2.14.1,<2.21",
            "flash-linear-attention>=0.6.0,<0.7",  # kernels of Megatron's gated delta net
        ],
        "plots": ["matplotlib>=3.11.2,<4"],  # tools/plot_*.py draw the figures of docs
        # exact: the launcher reads where Ray puts bundles, and how it ends what it runs
        "ray": ["ray[default]==2.60.0"],
        "browser": ["playwright==1.65.2"],  # drives the Chromium of the system; brings none
        "test": [
            "hypothesis==6.170.15",
            "pyright[nodejs]==1.1.414",
            "pytest==9.2.0",
            "pytest-timeout==2.4.0",
            "pytest-xdist==3.8.0",
            "ruff==0.17.5",
        ],
        # exact: metrics/wandb_process.py sets what is not part of its stable interface
        "wandb": ["wandb==0.30.0"],
    },
    entry_points={
        "console_scripts": ["opd = megatron_opd.cli.main:console"],
        "sglang.srt.plugins": ["opd = sglang_bridge.server.plugin:register"],
        "sglang.srt.platforms": ["opd_cpu = sglang_bridge.server.platform:activate"],
    },
)
