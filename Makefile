# Two commands on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
ENV := .venv
RUN := $(ENV)/bin/python
STAMP := $(ENV)/.installed

.PHONY: demo picture test lint check-slow docs bench clean

demo: $(STAMP)
	$(ENV)/bin/firm demo --out demo

picture: demo
	PYTHONPATH=tests $(RUN) tests/picture.py demo/report.html docs/demo.png

test: lint
	$(RUN) -m pytest

lint: $(STAMP)
	$(ENV)/bin/ruff check .
	$(ENV)/bin/ruff format --check .
	$(ENV)/bin/mypy

check-slow: $(STAMP)
	$(RUN) -m pytest -m slow

docs: $(STAMP)
	$(ENV)/bin/pip install -q -c constraints.txt -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(ENV)/bin/mkdocs build --strict
	@echo "open build/site/index.html"

bench: $(STAMP)
	for script in benchmarks/*.py; do $(RUN) $$script || exit 1; done | tee results/speed.txt

$(STAMP): pyproject.toml constraints.txt
	test -x $(RUN) || $(PYTHON) -m venv $(ENV)
	$(ENV)/bin/pip install -q -c constraints.txt -e ".[dev,pretrained,diffusion,export]"
	touch $(STAMP)

clean:
	rm -rf $(ENV) demo build bench-work .pytest_cache .mypy_cache .ruff_cache
