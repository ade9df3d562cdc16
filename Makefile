.PHONY: lint test unit bench docs
lint:
	ruff check . && ruff format --check . && pyright && codespell
test:
	bash scripts/test.sh
unit:
	bash scripts/test.sh unit
bench:
	for file in benchmarks/*.py; do echo "python $$file"; done
docs:
	python tools/generate_docs.py
