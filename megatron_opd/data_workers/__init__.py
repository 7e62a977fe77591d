"""Runs data workers: processes that move samples, so that the controller moves only references."""
