# Every target works on a fresh machine with Python 3.11 or newer: what it needs is installed into .venv.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
INSTALL := $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo report test test-all test-oldest test-newest mutants dist docs notebooks lint format clean

demo: $(VENV)/.demo
	$(PY) train.py ft --out demo/ft --overwrite
	$(PY) train.py smat --out demo/smat --overwrite
	$(PY) merge.py all --run demo/ft --search --out demo/ft/merged --overwrite
	$(PY) merge.py all --run demo/smat --search --out demo/smat/merged --overwrite
	$(PY) eval.py demo/ft demo/smat --out demo --plot demo/merging.png

# the comparison of all methods on digits: resumes where it was stopped, prints the time left (hours on 2 cores)
report: $(VENV)/.run
	OMP_NUM_THREADS=1 $(PY) -m benchmarks digits-report digits-study --jobs 2

# without a GPU, on which models would be loaded by default: tests compare bits of the CPU
test test-all test-oldest test-newest: export CUDA_VISIBLE_DEVICES =
# images often switch bytecode off: each worker would compile all tests anew at every run
test test-all: export PYTHONDONTWRITEBYTECODE =

test: $(VENV)/.dev
	$(PY) -m pytest -n 2 --dist worksteal -m "not slow"

test-all: $(VENV)/.dev $(VENV)/.docs
	$(PY) -m pytest -n 2 --dist worksteal

# the oldest torch and transformers allowed, or the newest that pip finds; several gigabytes, so only on demand
test-oldest: VERSIONS = 'torch==2.12.*' 'transformers==5.21.1'
test-newest: VERSIONS = --upgrade torch transformers
test-oldest test-newest:
	$(PYTHON) -m venv $(VENV)-$(@:test-%=%)
	$(VENV)-$(@:test-%=%)/bin/python -m pip install --quiet --disable-pip-version-check $(VERSIONS) -e '.[test]'
	$(VENV)-$(@:test-%=%)/bin/python -m pytest -n 2 --dist worksteal -m "not slow"

# sdist and wheel, the wheel installed alone into an empty environment, and its commands run there
dist: $(VENV)/.dev
	rm -rf dist $(VENV)-dist
	$(PY) -m build --quiet .
	$(PYTHON) -m venv $(VENV)-dist
	$(VENV)-dist/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	cd $(VENV)-dist && env -u PYTHONPATH bin/python ../tests/installed.py
	rm -rf $(VENV)-dist

# the site in site/, a warning is an error; nothing is downloaded once .venv/.docs is there
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

# the notebooks run again, their outputs kept
notebooks: $(VENV)/.docs
	$(PY) docs/notebooks/run.py

# small faults, put into copies of the library one by one: a test must find each; runs what has changed
mutants: $(VENV)/.dev
	$(PY) -m benchmarks mutants --jobs 2

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy smat_fn benchmarks train.py merge.py eval.py

format: $(VENV)/.dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf $(VENV) $(VENV)-oldest $(VENV)-newest $(VENV)-dist demo digits-study site dist build *.egg-info .pytest_cache .mypy_cache .ruff_cache

$(VENV)/.demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e '.[demo]'
	touch $@

$(VENV)/.run: $(VENV)/.demo
	$(INSTALL) -e '.[eval]'
	touch $@

$(VENV)/.dev: $(VENV)/.run
	$(INSTALL) -e '.[test,lint]'
	touch $@

$(VENV)/.docs: $(VENV)/.run
	$(INSTALL) -e '.[docs]'
	touch $@
