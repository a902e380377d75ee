"""Process 1: prompts in, scored samples out. asyncio and numpy; no GPU."""
