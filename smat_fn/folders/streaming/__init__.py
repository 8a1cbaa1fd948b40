"""Leaves merged chunk by chunk, with what must be known of whole leaves first, and an estimate of the cost."""
