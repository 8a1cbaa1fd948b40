"""SMAT inside training code that already exists. Nothing is imported before it is asked for."""
