"""Reads and checks what a run is given before it starts: models, tokenizers, prompts, settings."""
