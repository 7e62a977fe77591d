"""Checks: each tries to break what must hold, and says in `failed` what did not."""
