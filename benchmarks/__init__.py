"""Benchmarks: each prints one JSON object with its figures, machine, commit and versions."""
