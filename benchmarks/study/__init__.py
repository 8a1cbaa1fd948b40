"""Protocols and trials: methods, seeds and mergers, run in processes, resumable."""
