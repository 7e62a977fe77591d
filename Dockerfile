# A GPU node's environment from requirements/gpu.lock, as `make setup-gpu` makes it. Neither built nor
# run yet on a machine with a GPU.
#   docker build -t megatron-opd .
#   docker run --gpus all --ipc host --ulimit nofile=65536 -it -v /models:/models megatron-opd
# The base brings the CUDA 13 toolkit and the headers of cuDNN and NCCL, with which TransformerEngine's
# torch extension is compiled (C++ alone: no GPU is needed for it, and none need be named).
FROM nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04
ENV DEBIAN_FRONTEND=noninteractive CUDA_HOME=/usr/local/cuda PIPX_BIN_DIR=/usr/local/bin
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ git libnuma1 make pipx \
 && rm -rf /var/lib/apt/lists/*
# Ubuntu 24.04 has Python 3.12; uv brings the version that is tested
RUN pipx install uv==0.13.9 && uv python install 3.11
WORKDIR /opt/megatron-opd
COPY . .
RUN make setup-gpu PYTHON="$(uv python find 3.11)"
ENV PATH=/opt/megatron-opd/.venv-gpu/bin:$PATH
CMD ["bash"]
