"""Process 2: the training loop. Meets the rollout process only on the wire."""
