#!/usr/bin/env bash
# Trains on the nodes of a Slurm job: one Ray node a machine, the driver on the first.
#   sbatch --nodes 2 --gpus-per-node 8 scripts/cluster/slurm.sh --hf-checkpoint MODEL --prompt-data FILE ...
# dry run: none (it has no flags of its own)
# The flags after the script go to slime_rl.train; --num-nodes and --num-workers-per-node decide what trains.
# The environment must be active when sbatch is called, and the folder of this repository be shared by the nodes.
#SBATCH --job-name slime_rl
#SBATCH --ntasks-per-node 1
#SBATCH --exclusive
#SBATCH --output slime_rl_%j.log
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?is set by sbatch}"
mapfile -t NODES < <(scontrol show hostnames "${SLURM_JOB_NODELIST:?is set by sbatch}")
PORT=$((20000 + SLURM_JOB_ID % 10000)) # jobs that share a node do not meet
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(16))')
export RAY_AUTH_TOKEN PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
HEAD=$(srun --nodes 1 --ntasks 1 --overlap --nodelist "${NODES[0]}" \
    python -c 'from slime_rl.engine.ports import node_ip; print(node_ip())')

STEPS=()
stop() { kill -TERM "${STEPS[@]}" 2>/dev/null || true; } # srun passes it on to the Ray nodes of this job
trap stop EXIT
srun --nodes 1 --ntasks 1 --overlap --nodelist "${NODES[0]}" bash scripts/cluster/ray_node.sh head "$PORT" &
STEPS+=($!)
for node in "${NODES[@]:1}"; do
    srun --nodes 1 --ntasks 1 --overlap --nodelist "$node" bash scripts/cluster/ray_node.sh worker "$HEAD:$PORT" &
    STEPS+=($!)
done

srun --nodes 1 --ntasks 1 --overlap --nodelist "${NODES[0]}" --export "ALL,RAY_AUTH_MODE=token" \
    python scripts/cluster/wait_for_nodes.py "$HEAD:$PORT" "${#NODES[@]}"
srun --nodes 1 --ntasks 1 --overlap --nodelist "${NODES[0]}" --export "ALL,RAY_AUTH_MODE=token" \
    python -m slime_rl.train --ray-address "$HEAD:$PORT" "$@"
