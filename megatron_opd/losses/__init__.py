"""Losses: functions of log-prob tensors alone."""
