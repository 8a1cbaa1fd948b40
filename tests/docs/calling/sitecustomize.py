"""Python runs this at the start of every process that has this folder on PYTHONPATH."""

import os

if "SMAT_FN_TEST_CALLS" in os.environ:
    import calls

    calls.watch_process()
