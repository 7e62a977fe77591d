"""What strangers may try on every wire of a run, and what comes of it."""
