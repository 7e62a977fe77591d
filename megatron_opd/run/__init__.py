"""Performs one run, from starting its processes to writing its summary."""
