"""Holds modules that SGLang names without using for text; on a CPU server's PYTHONPATH."""
