"""The commands of merge.py beside mergers, one module each."""
