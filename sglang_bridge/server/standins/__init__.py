"""Modules that SGLang names without using them for text; on a CPU server's PYTHONPATH."""
