"""Reads prompts, and provides built-in tasks with verifiers and their tokenizer."""
