"""Grids of real runs: `opd run` over settings, methods and seeds, one process at a time."""
