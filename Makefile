# Zero to Engine.
#   make lab     environment, model, self-check, then JupyterLab on the start page  (PORT=8888, HEADLESS=1 stops before it)
#   make test    environment, model, then style, tests, and every notebook run and compared
# Both do only what is missing. PIP_FLAGS= goes to pip, LAB_FLAGS= to JupyterLab, PYTHON= names another Python;
# JOBS= is the number of tests that run at once.

PORT ?= 8888
JOBS ?= 2
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
START := beginner/00_start_here.ipynb
IN_RANGE := import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))
NOTEBOOK_FOLDERS := $(sort $(dir $(wildcard beginner/*.ipynb intermediate/*.ipynb advanced/*.ipynb)))

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore
# Threads that wait sleep: on a busy machine, spinning costs more than it gains.
export OMP_WAIT_POLICY ?= passive

.NOTPARALLEL:
.PHONY: help lab test environment model check unit notebooks clean

help:
	@sed -n '1,5p' Makefile

environment: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PY) -c '$(IN_RANGE)' 2>/dev/null || { \
	  found=; for python in $(PYTHON) python3.13 python3.12 python3.11 python3.10 python; do \
	    if $$python -c '$(IN_RANGE)' 2>/dev/null; then found=$$python; break; fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo "This course needs Python 3.10, 3.11, 3.12 or 3.13. Found: $$($(PYTHON) --version 2>&1 | head -n 1)." >&2; \
	    echo "Install one of them, or name it: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; exit 1; \
	  fi; \
	  echo "Making $(VENV) with $$($$found --version)."; \
	  $$found -m venv --clear $(VENV) || { rm -rf $(VENV); \
	    echo "Python could not make a virtual environment. On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }; \
	}
	$(PY) -m pip install --quiet $(PIP_FLAGS) "pip>=23.1"
	$(PY) -m pip install $(PIP_FLAGS) -c constraints.txt -e ".[serve,dev]"
	@said=$$($(PY) -m jupyter labextension disable --level=sys_prefix \
	  "@jupyterlab/apputils-extension:announcements" 2>&1) || { echo "$$said" >&2; exit 1; }
	@touch $@

model: $(STAMP)
	@$(PY) -m shared.default_model

lab: $(STAMP) model
	@$(PY) -m shared.selfcheck
	@test -z "$(filter-out 0,$(HEADLESS))" || exit 0; \
	flags="--port=$(PORT) --ServerApp.port_retries=0"; \
	if [ "$$(id -u)" = 0 ]; then flags="$$flags --allow-root"; fi; \
	if [ "$$(uname)" = Linux ] && [ -z "$$DISPLAY$$WAYLAND_DISPLAY" ]; then flags="$$flags --no-browser"; fi; \
	JUPYTER_TOKEN=$$($(PY) -c 'import secrets; print(secrets.token_hex(16))'); export JUPYTER_TOKEN; \
	echo "JupyterLab: http://127.0.0.1:$(PORT)/lab/tree/$(START)?token=$$JUPYTER_TOKEN   (Ctrl-C ends it)"; \
	$(PY) -m jupyterlab $$flags --ServerApp.root_dir="$(CURDIR)" --LabApp.default_url=/lab/tree/$(START) $(LAB_FLAGS) \
	|| { echo "JupyterLab did not start. If the port is taken: make lab PORT=8899" >&2; exit 1; }

test: $(STAMP) model check unit notebooks

check: $(STAMP)
	$(PY) -m ruff check
	$(PY) tools/course.py check

unit: export OMP_NUM_THREADS := 1
unit: $(STAMP) model
	$(PY) -m pytest tests -n $(JOBS) --dist loadfile

notebooks: export HF_HUB_OFFLINE := 1
notebooks: export TOKENIZERS_PARALLELISM := false
notebooks: $(STAMP) model
ifeq ($(NOTEBOOK_FOLDERS),)
	@echo "There are no notebooks yet."
else
	ZERO_TO_ENGINE_PROGRESS="$$(mktemp -d)/progress.json" $(PY) -m pytest -n $(JOBS) --dist loadfile --nbval --nbval-current-env \
	  --nbval-cell-timeout=120 --nbval-sanitize-with tests/nbval_sanitize.cfg $(NOTEBOOK_FOLDERS)
endif

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis
