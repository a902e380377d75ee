"""A small chat model learns to call a calculator instead of guessing, in minutes on a CPU."""
