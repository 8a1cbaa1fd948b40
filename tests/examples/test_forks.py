"""The stand-in for ``python`` gives what the interpreter gives."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow  # as the tests that use it

SCRIPT = """
import os, sys
from beside import VALUE
print(__name__, sys.argv[1:], os.getcwd(), os.environ["MINE"], VALUE)
print(sys.stdin.read(), file=sys.stderr)
if __name__ == "__main__":
    {end}
"""


@pytest.mark.parametrize("end", ["pass", "sys.exit()", "sys.exit(3)", "sys.exit('no: a reason')", "1 / 0"])
def test_words_folder_environment_streams_and_status_are_the_scripts_own(end, python, environment, tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "beside.py").write_text("VALUE = 7")
    (tmp_path / "scripts" / "one.py").write_text(SCRIPT.format(end=end))
    found = [
        subprocess.run(
            [interpreter, "scripts/one.py", "a b", "", "--c"],
            input="typed",
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment | {"MINE": "ä"},
            check=False,
        )
        for interpreter in (sys.executable, python)
    ]
    whole, forked = found
    assert whole.stdout == forked.stdout == f"__main__ ['a b', '', '--c'] {tmp_path} ä 7\n"
    assert whole.returncode == forked.returncode
    lines = [process.stderr.splitlines() for process in found]
    assert (lines[0][0], lines[0][-1]) == (lines[1][0], lines[1][-1])
