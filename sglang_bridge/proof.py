"""Shows that a server is the one that was started: it knows the nonce in its environment.

The nonce itself is never sent, so that a server which answers at a port in another's place can
neither know nor learn it.
"""

from __future__ import annotations

import hmac
import secrets

MOST_CHALLENGE = 100
"""Longest challenge that is answered, in characters."""


def new_nonce() -> str:
    """Returns what a new server is started with."""
    return secrets.token_hex(16)


def proof(nonce: str, challenge: str) -> str:
    """Returns what a server started with this nonce answers."""
    return hmac.digest(nonce.encode(), challenge.encode(), "sha256").hex()
