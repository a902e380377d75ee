"""How one rollout is played, and how its turns become trainable samples."""
