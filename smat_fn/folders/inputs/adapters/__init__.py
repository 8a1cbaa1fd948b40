"""Adapters of PEFT and of other tools as experts, and their factors alone."""
