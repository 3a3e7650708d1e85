# Zero to Engine: `make lab` to learn, `make test` to check everything.
PORT ?= 8888
PIP_FLAGS ?=
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.PHONY: environment

environment: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(PY) -m pip install $(PIP_FLAGS) -c constraints.txt -e ".[serve,dev]"
	touch $@
