"""Reads run directories and writes what `opd report` shows. Torch-free."""
