"""``python -m benchmarks`` lists the benchmarks, ``python -m benchmarks NAME`` runs one."""

import importlib
import sys

BENCHMARKS = {
    "digits": "FT against SMAT on digits over seeds, by docs/protocols/digits.md (about 10 minutes on 2 cores)"
}


def main(arguments: list[str]) -> None:
    if not arguments or arguments[0] not in BENCHMARKS:
        print("\n".join(f"python -m benchmarks {name}: {what}" for name, what in BENCHMARKS.items()))
        sys.exit(bool(arguments))
    importlib.import_module(f".{arguments[0]}", __package__).main(arguments[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
