"""Reads prompts; renders, checks and judges them. Tasks, verifiers, sandbox. Torch-free."""
