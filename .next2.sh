source /work/scratch/h7snapenv
timeout 170 python -m pytest -q -x tests/e2e/test_faults.py --tb=short 2>&1 | tail -60
timeout 120 python -m pytest -q -x tests/e2e/test_colocate.py --tb=short 2>&1 | tail -60
timeout 120 python -m pytest -q tests/e2e/test_weight_sync.py -k "lost_in or dies_of or breaks_off" --tb=short 2>&1 | tail -60
