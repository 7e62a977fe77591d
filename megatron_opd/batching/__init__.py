"""Batches of samples as micro-batches and columns for every data-parallel rank. Torch-free."""
