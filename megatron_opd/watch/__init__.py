"""Serves the page of `opd watch`: a run's files, read as they grow. Never writes. Torch-free."""
