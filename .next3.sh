source /work/scratch/h7snapenv
timeout 150 python -m pytest -q -x tests/e2e/test_faults.py --tb=short 2>&1 | tail -60
timeout 165 python benchmarks/chaos_engines.py --faults 6 --faults-per-run 6 --seed 2
