"""What a run measures and where it is written. Torch-free."""
