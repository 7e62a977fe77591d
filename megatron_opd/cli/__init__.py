"""Holds the `opd` program.

It is the only place that wires concrete parts together and reads os.environ.
"""
