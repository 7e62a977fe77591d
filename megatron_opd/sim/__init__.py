"""Runs the code that ships on a virtual clock."""
