"""Describes the columns of a run's rows, a file for each group."""
