"""The trained model: loading, tree attention, the head's loss terms, sharding, optimizer and checkpoints."""
