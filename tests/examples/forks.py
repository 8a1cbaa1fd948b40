"""Stands in for ``python`` in the scripts of examples/: every command is a fork of one process with warm imports.

python forks.py serve SOCKET               imports, prints a line when it listens, ends when its stdin does
python -I -S forks.py SOCKET SCRIPT WORD... runs the script there as __main__: own words, folder, environment, output
"""

import gc
import json
import os
import runpy
import select
import socket
import sys
import traceback
from importlib import import_module

WARM = (
    "torch._dynamo", "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto",
    "transformers.models.auto.image_processing_auto", "transformers.models.llama.modeling_llama",
    "transformers.models.clip.modeling_clip", "transformers.models.vit.modeling_vit", "transformers.integrations",
    "matplotlib.pyplot", "rouge", "sacrebleu", "scipy.special", "markdown_it", "smat_fn.scripts.train.training",
    "smat_fn.scripts.merge.in_memory", "smat_fn.scripts.analyse.runs", "smat_fn.scripts.evaluate.sources",
    "smat_fn.suites.trace", "smat_fn.suites.clip8", "smat_fn.report.plots",
)  # fmt: skip


def ask(path: str, words: list[str]) -> int:
    """What the command exits with."""
    order = {"words": words, "folder": os.getcwd(), "environment": dict(os.environ)}
    with socket.socket(socket.AF_UNIX) as there:
        there.connect(path)
        socket.send_fds(there, [b"."], [0, 1, 2])
        there.sendall(json.dumps(order).encode())
        there.shutdown(socket.SHUT_WR)
        return int(there.recv(8))


def serve(path: str) -> None:
    """Forks a process for each command, one after another."""
    gc.disable()
    for name in WARM:
        import_module(name)
    gc.freeze()  # a fork that looks through the modules copies their memory
    gc.enable()
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lack threads"
    with socket.socket(socket.AF_UNIX) as here:
        here.bind(path)
        here.listen()
        print("listening", flush=True)
        while here in select.select([here, sys.stdin], [], [])[0]:
            there, _ = here.accept()
            _, streams, _, _ = socket.recv_fds(there, 1, 3)
            order = json.loads(there.makefile().read())
            child = os.fork()
            if not child:
                break
            _, status = os.waitpid(child, 0)
            there.sendall(str(os.waitstatus_to_exitcode(status)).encode())
            for end in (*streams, there.detach()):
                os.close(end)
        else:
            os._exit(0)
    there.close()
    for stream, own in zip(streams, (0, 1, 2), strict=True):
        os.dup2(stream, own)
        os.close(stream)
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.argv, sys.path[0] = order["words"], os.path.dirname(os.path.abspath(order["words"][0]))
    status = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        print(end.code, file=sys.stderr) if isinstance(end.code, str) else None
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # taking all these modules down takes longer than most commands


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        sys.exit(ask(sys.argv[1], sys.argv[2:]))
