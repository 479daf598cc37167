# Every target runs in .venv, which is made when missing and brought up to date when the requirements change.
# pip follows the user's own configuration: point it at an index with CPU wheels to get the small build of torch.

DEMO = .venv/bin/kimi-fx bench demo
PIP = .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

demo: .venv/.run
	$(DEMO)

test: .venv/.ready
	.venv/bin/python -m pytest -n 2 --dist loadgroup

lint: .venv/.ready
	.venv/bin/ruff check
	.venv/bin/mypy

kernels: .venv/.run
	.venv/bin/kimi-fx build

clean:
	rm -rf .venv build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find kimi_fx tests -name __pycache__ -prune -exec rm -rf {} +

.venv/.ready: .venv/.run
	$(PIP) --no-build-isolation -e ".[test]"
	@touch $@

.venv/.run: pyproject.toml constraints.txt
	@.venv/bin/python -m pip --version >/dev/null 2>&1 || { \
	    for python in python3 python3.12 python3.11; do \
	        $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && \
	            exec $$python -m venv .venv; \
	    done; \
	    echo "kimi_fx needs Python 3.11 or newer; none of python3, python3.12 and python3.11 on PATH is one."; \
	    exit 1; }
	$(PIP) hatchling
	$(PIP) --no-build-isolation -e .
	@touch $@

.PHONY: demo test lint kernels clean
