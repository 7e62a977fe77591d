# A GPU node's environment from requirements/gpu.lock, as `make setup-gpu` makes it. Neither built nor
# run yet on a machine with a GPU.
#   docker build -t megatron-opd .
#   docker run --gpus all --ipc host --ulimit nofile=65536 -it -v /models:/models megatron-opd
# TransformerEngine's torch extension is compiled with the lock's own CUDA (C++ alone: no GPU is needed for
# it, and none need be named), so the base brings only what lets a container see the driver.
FROM nvidia/cuda:13.0.1-base-ubuntu24.04
ENV DEBIAN_FRONTEND=noninteractive
# python3 of Ubuntu 24.04 is 3.12, which the lock is for
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ git libnuma1 make python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/megatron-opd
COPY . .
RUN make setup-gpu
ENV PATH=/opt/megatron-opd/.venv-gpu/bin:$PATH
CMD ["bash"]
