"""Compares a live server's scores with arithmetic: python -m sglang_bridge.conformance URL."""
