"""Servers that turn token ids into token ids over HTTP: the embedded engine, and vLLM."""
