"""Prompts, built-in tasks with verifiers, the tasks' tokenizer, and micro-batch packing."""
