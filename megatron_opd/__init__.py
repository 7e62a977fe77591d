"""Asynchronous on-policy distillation: Megatron-Core learners, SGLang samplers and teachers."""

__version__ = "0.1.0"
