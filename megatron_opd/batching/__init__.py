"""Turns batches of samples into micro-batches and columns for every data-parallel rank.

Torch-free.
"""
