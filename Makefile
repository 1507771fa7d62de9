# make demo    a video from the embedded model
# make test    lint and the tests, but for those of whole systems
# make test-system   those: kills, servers, browsers, notebooks, second hosts, long videos, programs for real chips
# make test-full   both, with every case of every matrix
# make check   lint and the quickest tests: configs, kernels, parity on a model of two layers, one run
# All make their own .venv and install into it what this machine needs, at the versions and hashes of a lock:
# make KIND=cpu, tpu or gpu says it yourself. With uv installed they use it.
# make locks   resolves requirements.txt and requirements/*.txt anew (needs uv)
# make image   a container image of this project, KIND=cpu, tpu or gpu

PYTHON ?= python3
KIND ?= $(shell $(PYTHON) -m wan_torchax.devices.machine)
UV := $(shell command -v uv)
ifdef UV
INSTALL = $(UV) pip install --quiet --python .venv/bin/python
MAKE_VENV = $(UV) venv --quiet --allow-existing --seed --python $(PYTHON) .venv
else
INSTALL = .venv/bin/pip install --quiet --disable-pip-version-check
MAKE_VENV = $(PYTHON) -m venv .venv
endif

QUICK = architecture commandline conf hopper jobs parallel presets rotary schema splash stages
QUICK_PARITY = "tests/test_parity.py::test_every_layout_is_diffusers[one device]"
MIRROR_TORCH = 2.13.0
COMPILE = uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header

# For two cores; many tests of whole systems wait for processes that they started.
WORKERS = 2
test-system: WORKERS = 3
TEST = .venv/bin/python -m pytest -q --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=10

.PHONY: demo test test-system test-full check lint locks image clean install-from-mirror

demo: .venv/ready
	.venv/bin/python run.py

test: lint
	$(TEST) -m "not system and not full"

test-system: .venv/ready-dev
	$(TEST) -m "system and not full"

test-full: lint
	$(TEST)

check: lint
	.venv/bin/python -m pytest -q --numprocesses 2 --dist load -k "not lowers" -m "not system and not full" $(QUICK:%=tests/test_%.py) $(QUICK_PARITY)

lint: .venv/ready-dev
	.venv/bin/ruff check .
	.venv/bin/mypy --no-error-summary

locks:
	$(COMPILE) requirements.txt -o requirements/cpu.lock
	$(COMPILE) requirements/tpu.txt -o requirements/tpu.lock
	$(COMPILE) requirements/gpu.txt -o requirements/gpu.lock

image:
	docker build --target $(KIND) --tag wan-torchax:$(KIND) .

clean:
	rm -rf .venv outputs

.venv/ready: requirements/cpu.lock requirements/tpu.lock requirements/gpu.lock
	$(MAKE_VENV)
	$(INSTALL) --require-hashes -r requirements/$(KIND).lock || $(MAKE) --no-print-directory install-from-mirror
	touch $@

# Where PyTorch's own server cannot be reached, only a mirror of PyPI: the same lock, and torch from that mirror.
install-from-mirror:
	sed '/^torch @/,/--hash/d' requirements/$(KIND).lock > .venv/mirror.lock
	$(INSTALL) --require-hashes --no-deps -r .venv/mirror.lock
	$(INSTALL) torch==$(MIRROR_TORCH)

.venv/ready-dev: .venv/ready requirements-dev.txt
	$(INSTALL) -r requirements-dev.txt
	touch $@
