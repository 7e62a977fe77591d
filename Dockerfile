# A GPU node's environment from requirements/gpu.lock, as `make setup-gpu` makes it. Not yet built
# nor run on a machine with a GPU.
#   docker build -t megatron-opd .
#   docker run --gpus all --ipc host --ulimit nofile=65536 -it -v /models:/models megatron-opd
# The base brings the CUDA compiler and cuDNN's headers, with which TransformerEngine's torch
# extension is compiled for the GPUs in NVTE_CUDA_ARCHS (80 A100, 90 H100 and H200, 100 B200).
FROM nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04
ARG NVTE_CUDA_ARCHS="80;90;100"
ARG MAX_JOBS=8
ENV DEBIAN_FRONTEND=noninteractive
RUN apt-get update \
 && apt-get install -y --no-install-recommends git make libnuma1 pipx \
 && rm -rf /var/lib/apt/lists/*
# Ubuntu 24.04 has Python 3.12; uv brings the tested one
RUN pipx install uv==0.13.9 && /root/.local/bin/uv python install 3.11
WORKDIR /opt/megatron-opd
COPY . .
RUN NVTE_CUDA_ARCHS=$NVTE_CUDA_ARCHS MAX_JOBS=$MAX_JOBS CUDA_HOME=/usr/local/cuda \
    make setup-gpu PYTHON="$(/root/.local/bin/uv python find 3.11)"
ENV PATH=/opt/megatron-opd/.venv-gpu/bin:$PATH
CMD ["bash"]
