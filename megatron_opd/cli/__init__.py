"""Parses the command line of `opd`, and prints. Only `megatron_opd/__main__.py` imports it."""
