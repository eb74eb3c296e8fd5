"""The policy in training: its model, its shares over the ranks, the memory it needs."""
