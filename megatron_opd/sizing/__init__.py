"""Computes what a configuration costs from config.json: parameters, memory, operations."""
