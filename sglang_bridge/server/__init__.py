"""Runs beside and inside SGLang: starts a server, and plugs in draws and scores."""
