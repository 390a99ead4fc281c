# Needs git, make and Python 3.11 or newer; everything else goes into $(VENV).
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
TEST_EXTRAS := dev,atari,box2d,jax-envs,minari,mujoco,ray

BIN := $(VENV)/bin
VERSIONS := setup.py constraints.txt

.PHONY: train test slow trax check clean

train: $(VENV)/.installed
	$(BIN)/rl-trainers train --config_file=configs/ppo_joint_cartpole.gin --output_dir=runs/cartpole

test: check
	$(BIN)/python -m pytest -m "not slow" -n $(WORKERS)

slow: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m "slow and not trax and not ray" -n $(WORKERS)
	$(BIN)/python -m pytest -m ray

# Trax brings TensorFlow, so it has an environment of its own.
trax:
	$(MAKE) VENV=$(VENV)-trax TEST_EXTRAS=dev,trax $(VENV)-trax/.installed-test
	$(VENV)-trax/bin/python -m pytest -m trax

check: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(VENV)-trax build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache

$(BIN)/python:
	$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("Python 3.11 or newer is needed, this is %d.%d; set PYTHON=" % v[:2])'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VERSIONS) | $(BIN)/python
	@echo "installing into $(VENV), about a minute"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .
	touch $@

$(VENV)/.installed-test: $(VERSIONS) | $(BIN)/python
	@echo "installing into $(VENV), about a minute"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[$(TEST_EXTRAS)]'
	touch $@ $(VENV)/.installed
