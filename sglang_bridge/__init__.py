"""What the pipeline needs of SGLang: an HTTP client and a plugin for the server.

Imports nothing of megatron_opd.
"""
