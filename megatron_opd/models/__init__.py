"""Describes models: families, shapes, and where every parameter lies."""
