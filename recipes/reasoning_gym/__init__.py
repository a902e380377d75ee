"""Generated tasks of the reasoning-gym package, with its own scoring."""
