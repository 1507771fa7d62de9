# make demo    a video from the embedded model
# make test    lint and the whole test suite
# make check   lint and the quick lane: configs, kernels, parity on a model of two layers, one run
# All make their own .venv and install the pinned requirements into it.

PYTHON ?= python3

QUICK = architecture commandline conf hopper jobs parallel presets rotary schema splash stages
QUICK_PARITY = "tests/test_parity.py::test_every_layout_is_diffusers[one device]"

.PHONY: demo test check lint clean

demo: .venv/ready
	.venv/bin/python run.py

test: lint
	.venv/bin/python -m pytest -q --numprocesses 2 --dist loadfile --no-loadscope-reorder --durations=10

check: lint
	.venv/bin/python -m pytest -q --numprocesses 2 --dist load -k "not lowers" $(QUICK:%=tests/test_%.py) $(QUICK_PARITY)

lint: .venv/ready
	.venv/bin/ruff check .

clean:
	rm -rf .venv outputs

.venv/ready: requirements.txt requirements-dev.txt
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@
