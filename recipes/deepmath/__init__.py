"""Qwen3.5-2B on DeepMath-103K: the configuration of the published example."""
