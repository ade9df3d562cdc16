source /work/scratch/h7snapenv
timeout 300 python benchmarks/chaos_engines.py --faults 12 --faults-per-run 12 --seed 2
