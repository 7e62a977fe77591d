"""Measures a run and writes the figures. Torch-free."""
