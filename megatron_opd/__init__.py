"""Trains by asynchronous on-policy distillation: Megatron-Core learners, SGLang samplers."""

__version__ = "0.1.0"
