"""Finds the split of GPUs, the layout and the schedule with the highest throughput."""
