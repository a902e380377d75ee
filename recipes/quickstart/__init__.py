"""A small chat model learns to answer arithmetic questions reliably, in minutes on a CPU."""
