"""Computes losses as functions of log-prob tensors alone."""
