"""What the three scripts do: train experts, merge them, evaluate checkpoints; each a function on folders."""
