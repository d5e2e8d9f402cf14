# make bench: set up, measure, show tables, write a report.   make test: set up, lint, type check, all tests.
# make check: lint, types and the fast tests, for every save.
# make pages: site/, pages of results/h200 for static hosting.
# make soak: an hour of killed and resumed training runs; results/reliability/soak.json.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# The tests start hundreds of processes: without bytecode files each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: bench test check pages soak lint clean install older-triton

bench: $(INSTALLED)
	$(BIN)/cs336 run end_to_end precision peak_memory warmup accumulation autocast_dtypes memory_model --preset quick
	$(BIN)/cs336 report runs/quick --output runs/quick/report

test: lint
	$(BIN)/pytest -n 2 --dist loadgroup

# Fast tests: no processes, no compilers, no browser.
check: lint
	$(BIN)/pytest -n 2 --dist loadgroup -m 'not slow' tests/unit/test_architecture.py tests/unit/test_config.py tests/unit/test_flags.py tests/unit/test_record.py tests/unit/test_table.py tests/unit/predict/test_fit.py tests/unit/predict/test_gpus.py tests/unit/predict/test_plan.py tests/unit/report/test_rows.py tests/unit/report/test_cells.py tests/unit/report/test_referee.py tests/unit/experiments/steps tests/unit/experiments/kernels tests/unit/experiments/memory

pages: $(INSTALLED)
	$(BIN)/python tools/pages.py

soak: $(INSTALLED)
	$(BIN)/python -m tests.unit.hostile_files
	$(BIN)/python -m tests.distributed.soak

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check

install: $(INSTALLED)

# For tests/unit/kernels/test_kernel_resources.py: the kernels for Hopper GPUs must compile with the oldest Triton that knows their language, too.
older-triton: .triton-3.6
.triton-3.6: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ triton==3.6.0

# The virtual environment is made again when what should be in it changes. Modules are compiled as they are imported: pip would
# compile 11,000 files, of which we import a fifth. Before 23.3 pip takes twice the time to choose files from an index.
$(INSTALLED): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found; name yours: make PYTHON=python3 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile 'pip>=23.3'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	$(BIN)/python -c 'import matplotlib.pyplot, torch._dynamo, torch._inductor.compile_fx, transformers'
	touch $(INSTALLED)

clean:
	rm -rf $(VENV) .triton-3.6 build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
