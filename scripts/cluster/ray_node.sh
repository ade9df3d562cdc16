#!/usr/bin/env bash
# Joins this machine to a Ray cluster for slime_rl, in the foreground; Ctrl-C or SIGTERM takes it out again.
#   ray_node.sh head [PORT]            first node; prints what the others and the driver need. PORT is 6379 when not given
#   ray_node.sh worker HEAD_IP:PORT    every other node
# Then, on any of the nodes:  python -m slime_rl.train --ray-address HEAD_IP:PORT ...
# RAY_AUTH_TOKEN, when set, must be the same everywhere; with it only its holders can join (RAY_AUTH_MODE=token is set then).
# Every node needs the same Python environment, and checkpoints, data and the run folder under the same paths.
# Ends only the Ray that it started: several clusters on one machine do not meet if their ports differ.
# dry run: none (starts Ray nodes)
set -euo pipefail
ROLE=${1:?head or worker}
IP=${NODE_IP:-$(python -c 'from slime_rl.engine.ports import node_ip; print(node_ip())')}
FOLDER=$(mktemp -d -t ray_XXXXXX) # keep TMPDIR short: Ray's sockets lie below it
trap 'rm -rf "$FOLDER"' EXIT
[ -z "${RAY_AUTH_TOKEN:-}" ] || export RAY_AUTH_MODE=token
export RAY_worker_niceness=0 RAY_USAGE_STATS_ENABLED=0

case $ROLE in
head)
    PORT=${2:-6379}
    echo "head: $IP:$PORT    (others: ray_node.sh worker $IP:$PORT; driver: --ray-address $IP:$PORT)"
    ARGUMENTS=(--head "--port=$PORT" "--node-ip-address=$IP" --include-dashboard=false "--temp-dir=$FOLDER")
    ;;
worker)
    ARGUMENTS=("--address=${2:?HEAD_IP:PORT}" "--node-ip-address=$IP")
    ;;
*)
    echo "ray_node.sh: head or worker, got '$ROLE'" >&2
    exit 2
    ;;
esac
ray start "${ARGUMENTS[@]}" --block &
RAY=$!
trap 'kill -TERM "$RAY" 2>/dev/null || true' INT TERM
wait "$RAY"
