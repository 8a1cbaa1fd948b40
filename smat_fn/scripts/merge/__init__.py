"""merge.py: checked inputs, a search on dev, merged folders with a model card; verify and export."""
