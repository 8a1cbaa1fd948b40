"""The analyses of the paper as commands of eval.py."""
