"""Hugging Face checkpoints to and from Megatron shards."""
