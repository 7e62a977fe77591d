"""Connects the pipeline to SGLang: an HTTP client and a plugin for the server.

Imports nothing of megatron_opd.
"""
