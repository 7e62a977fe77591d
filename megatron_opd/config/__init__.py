"""Strict YAML configuration."""
