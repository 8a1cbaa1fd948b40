"""train.py: experts of a suite, resumable, with logs; sweeps of many runs."""
