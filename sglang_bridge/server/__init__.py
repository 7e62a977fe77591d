"""Runs beside and inside SGLang: how a server is started, and the plugin that draws and scores."""
