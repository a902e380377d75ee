"""Metrics: declared names, the window that reduces them, sinks, and the console."""
