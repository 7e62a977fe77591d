"""Measures models on held-out problems: before, while and after they are trained. Torch-free."""
