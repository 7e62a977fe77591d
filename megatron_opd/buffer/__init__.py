"""Holds samples in admission order, and the permits that bound staleness. Torch-free."""
