"""The application: what train.py, merge.py and eval.py do on folders."""
