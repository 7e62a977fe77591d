"""Measures a model on held-out problems, before, while and after it is trained. Torch-free."""
