# Two commands do all set-up: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
TRACK  := .venv-track
TRAIN  := .venv-train
STATE  ?= var/server

.PHONY: setup demo edge-demo up down test lint format bench clean help

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-9s %s\n", $$1, $$2}'

setedge-demo: $(VENV)/.demo ## two PCs that come and go, over a private Redis; ends by itself
	$(BIN)/python tools/edge_demo.py

up: $(VENV)/.demo ## make .venv with what the server and the examples need

$(VENV)/.made:
	@sh tools/check-python.sh $(PYTHON)
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.demo: $(VENV)/.made requirements/demo.txt pyproject.toml sdk/pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/demo.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e . -e ./sdk
	@touch $@

$(VENV)/.dev: $(VENV)/.demo requirements/dev.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.txt
	@touch $@

$(TRACK)/.made: $(VENV)/.made requirements/track.txt sdk/pyproject.toml
	$(PYTHON) -m venv $(TRACK)
	$(TRACK)/bin/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/track.txt
	$(TRACK)/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e ./sdk
	@touch $@

# Ray and torch are large and only for their own tests: where they cannot be had, those are skipped.
$(TRAIN)/.made: $(VENV)/.made requirements/train.txt sdk/pyproject.toml
	@$(PYTHON) -m venv $(TRAIN) \
	&& $(TRAIN)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 \
	&& $(TRAIN)/bin/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/train.txt \
	&& $(TRAIN)/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e ./sdk \
	&& touch $@ || echo "torch and Ray could not be installed: their tests are skipped"

demo: $(VENV)/.demo ## a real run of two labs' training jobs on this machine, ends by itself
	$(BIN)/python tools/demo.py

edge-demo: $(VENV)/.demo ## two PCs that come and go, over a private Redis; ends by itself
	$(BIN)/python tools/edge_demo.py

up: $(VENV)/.demo ## start a server here and leave it running (`make down` stops it)
	$(BIN)/python tools/up.py start $(STATE)

down: ## stop the server that `make up` started; running jobs go on
	$(BIN)/python tools/up.py stop $(STATE)

test: ## everything CI checks, with seconds per stage
	@sh tools/test-packages.sh
	@$(MAKE) --no-print-directory $(VENV)/.dev $(TRACK)/.made $(TRAIN)/.made
	$(BIN)/python tools/stages.py

lint: $(VENV)/.dev ## ruff, mypy --strict, import contracts
	$(BIN)/python tools/stages.py lint

format: $(VENV)/.dev ## let ruff format everything
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.dev $(TRACK)/.made ## all benchmarks; each prints one JSON object as its last line
	@for b in bench/[a-z]*.py; do echo "== $$b"; $(BIN)/python $$b || exit 1; done

clean: ## remove what was built
	rm -rf $(VENV) $(TRACK) $(TRAIN) var .mypy_cache .ruff_cache .hypothesis
