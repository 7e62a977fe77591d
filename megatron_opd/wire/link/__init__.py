"""Sends messages between two distant processes exactly once, over connections that break."""
