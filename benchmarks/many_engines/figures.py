"""Says how large a sample is, to the controller and to the fakes."""

LARGEST = 1 << 30
VERSION = b"version"
"""Begins a message to the head that says which version of the weights is live."""
TOKENS, IDS_A_TOKEN = 4096, 14
