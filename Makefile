# One verb a line; everything lives in .venv.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup demo test test-all lint bench curve clean

setup: .venv/.ready

# torch first and pinned: a range would bring gigabytes of CUDA libraries on machines without a GPU
.venv/.ready: pyproject.toml constraints.txt
	@echo "setting up .venv: about 300 MB to download, 1.3 GB on disk, one to three minutes"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet -c constraints.txt --editable '.[test]'
	@touch $@

demo: setup
	$(BIN)/python examples/demo.py

# two workers with one thread each: tiny models gain nothing from a second thread
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# the real model at batch 1 on all 30 prompts as well: about ten minutes more
test-all: setup
	HEADSTART_TEST_ALL=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	$(BIN)/python bench/plain.py
	$(BIN)/python bench/overhead.py
	$(BIN)/python bench/lookup.py
	$(BIN)/python bench/distil.py
	$(BIN)/python bench/training.py
	$(BIN)/python bench/table.py

# Medusa from nothing, and what it brings after 100k to 2M tokens: hours on two cores; stop and start as you like
curve: setup
	$(BIN)/headstart distill smollm2-135m --self-prompt 20000 --out runs/self
	for n in 100k 300k 1M 2M; do \
		$(BIN)/headstart train smollm2-135m runs/self --tokens $$n --out runs/medusa-$$n --cache runs/cache || exit 1; \
	done
	$(BIN)/python bench/heads.py runs/medusa-*/head --dtype auto --check 8

clean:
	rm -rf .venv build dist
