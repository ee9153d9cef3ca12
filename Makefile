# make run    simulate the main job into out/ (summary, JSON, trace, Gantt chart)
# make test   format, lint, type and test checks;  make test-all adds the slow tests
# make test-cluster   tests of sweeps on a Ray cluster, which needs 250 MB more
# make docs   build the documentation's pages into out/site, and check their links
# make wheel  build the wheel into out/wheel, and check it in a clean environment outside of this tree
# make mutate PACKAGE=engine   change one thing at a time in a package, and see whether its tests notice
# All need Python >= 3.11 and make, and set up an environment of their own in .venv.

PYTHON ?= python3
BIN := .venv/bin
# Each process has a stretch of the tests, so that what a file shares is made once, and takes from the others at the end.
PYTEST := $(BIN)/pytest -n auto --dist worksteal
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# Tests start Python a hundred times, which then finds what it has compiled before.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test test-all test-cluster docs wheel mutate format clean

run: .venv/.run
	mkdir -p out
	$(BIN)/python -m simulator run workloads/gpt175b_3d.yaml \
		--json out/gpt175b_3d.json --trace out/gpt175b_3d.trace.json.gz --gantt out/gpt175b_3d.png

test: .venv/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@# Types are checked beside the tests, and what they come to stands at the end.
	$(BIN)/mypy > .venv/types.txt 2>&1 & types=$$!; $(PYTEST); tests=$$?; \
		wait $$types; types=$$?; cat .venv/types.txt; test $$tests$$types = 00

test-all: test
	$(PYTEST) -m slow

test-cluster: .venv/.test
	$(INSTALL) --editable '.[cluster]'
	$(BIN)/pytest -m "slow or not slow" tests/sweeping/test_on_ray.py

docs: .venv/.docs
	$(BIN)/python -m documentation
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

wheel: .venv/.test
	rm -rf out/wheel
	$(BIN)/python -m hatchling build -t wheel -d out/wheel
	$(BIN)/python -m tests.support.clean_install out/wheel/*.whl

mutate: .venv/.test
	$(BIN)/python -m tests.mutate $(PACKAGE)

format: .venv/.test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv out

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; try make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv

# A marker per set of packages, out of date when what is to be installed changes.
# An editable installation compiles the engine's event loop.
LOOP := hatch_build.py simulator/engine/compiled/build.py $(wildcard simulator/engine/compiled/loop/*)

.venv/.run: pyproject.toml constraints.txt $(LOOP) | $(BIN)/python
	$(INSTALL) --editable .
	touch $@

.venv/.test: pyproject.toml constraints.txt $(LOOP) | $(BIN)/python
	$(INSTALL) --editable '.[dev]'
	@# Orders of schedules are compared with PyTorch's own where a build without CUDA is at hand.
	-$(INSTALL) --only-binary :all: "$$(grep '^torch==' constraints.txt)+cpu"
	touch $@ .venv/.run

.venv/.docs: pyproject.toml constraints.txt $(LOOP) | $(BIN)/python
	$(INSTALL) --editable '.[docs]'
	touch $@
