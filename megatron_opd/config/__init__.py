"""Defines and loads the strict YAML configuration."""
