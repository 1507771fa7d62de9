# make demo    a video from the embedded model
# make test    lint and the whole test suite
# Both make their own .venv and install the pinned requirements into it.

PYTHON ?= python3

.PHONY: demo test lint clean

demo: .venv/ready
	.venv/bin/python run.py

test: lint
	.venv/bin/python -m pytest -q --numprocesses 2 --dist loadfile --no-loadscope-reorder --durations=10

lint: .venv/ready
	.venv/bin/ruff check .

clean:
	rm -rf .venv outputs

.venv/ready: requirements.txt requirements-dev.txt
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@
