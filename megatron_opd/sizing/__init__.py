"""Computes what a configuration costs, from config.json alone: no weights, torch or processes."""
