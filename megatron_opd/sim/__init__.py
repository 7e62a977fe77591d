"""Runs the code that ships on a virtual clock, and searches for the best plan of a cluster."""
