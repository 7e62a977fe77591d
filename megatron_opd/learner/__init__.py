"""Trains the student with Megatron-Core."""

import os

import torch

if not torch.cuda.is_available():
    # Read whenever torch.compile decorates a function, which Megatron does while it is imported, so
    # this must come first. On a CPU compilation costs more than it saves.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
