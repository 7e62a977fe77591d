"""Admission-ordered buffer and the permits that bound staleness. Torch-free."""
