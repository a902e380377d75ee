"""Prompts that are solved are not asked again until the next look at all of them."""
