"""Draws the tables that `opd check` and `opd plan` print."""
