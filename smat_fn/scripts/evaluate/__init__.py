"""eval.py: scores of checkpoints, and reports on finished runs."""
