"""Samples student rollouts on the inference servers."""
