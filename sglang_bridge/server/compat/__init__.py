"""Touches SGLang's internals, in this one place, for exactly one version of it.

SGLang's plugins fail open: a hook that does not fit is logged and skipped. So this package is the
one to change for a new version, each of its functions has a test, and a server whose version or
hooks do not fit refuses to start.
"""
