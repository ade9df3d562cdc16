source /work/scratch/h7snapenv
timeout 150 python -m pytest -q -x tests/e2e/test_faults.py --tb=short 2>&1 | tail -60
timeout 120 python -m pytest -q -x tests/e2e/test_placement.py --tb=short 2>&1 | tail -60
