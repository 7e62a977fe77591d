"""Asks servers that are not ours for scores and answers: a stock SGLang, OpenAI's completions."""
