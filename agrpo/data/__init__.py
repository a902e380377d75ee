"""Where prompts come from: each option opens rows; `prompts` puts them in order."""
