"""merge.py: merges on disk and in memory, what they are made of, and the other subcommands."""
