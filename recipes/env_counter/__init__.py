"""A small chat model learns to move a counter by the number it is told, in minutes on a CPU."""
