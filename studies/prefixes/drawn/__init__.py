"""Caches drawn by the servers' code against the enumeration, and wrong caches that must differ."""
