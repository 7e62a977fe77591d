"""Benchmarks: each measures seconds, bytes or memory beside a baseline of the same run."""
