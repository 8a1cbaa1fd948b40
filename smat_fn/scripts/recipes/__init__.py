"""Merges as files: mergekit's YAML, and recipe.yml, which repeats a merge."""
