"""Converts Hugging Face checkpoints to and from Megatron shards, and keeps a run's checkpoints."""
