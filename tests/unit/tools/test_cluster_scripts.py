"""The launch scripts parse, and what the manifest runs are flags that exist and fit together."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from factories import write_model_folder, write_prompts

from slime_rl.config import parse_config

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"


@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("*.sh")) + sorted(SCRIPTS.glob("cluster/*.sh")), ids=str)
def test_shell_scripts_parse_and_end_only_what_they_started(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)
    text = path.read_text()
    assert "pkill" not in text and "killall" not in text and "ray stop" not in text


def test_the_manifest_asks_for_the_nodes_that_its_run_uses(tmp_path: Path) -> None:
    spec = yaml.safe_load((SCRIPTS / "cluster" / "kuberay.yaml").read_text())["spec"]
    words = shlex.split(spec["entrypoint"])
    assert words[:3] == ["python", "-m", "slime_rl.train"]
    shared = {"/shared/model": str(write_model_folder(tmp_path / "model"))}
    shared["/shared/train.jsonl"] = str(write_prompts(tmp_path / "train.jsonl"))
    config = parse_config([shared.get(word, word) for word in words[3:]])
    (group,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    gpus = int(group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    assert group["replicas"] == config.cluster.num_nodes
    assert gpus == config.cluster.num_workers_per_node == config.cluster.rollout_num_gpus_per_engine


def test_ray_node_refuses_an_unknown_role() -> None:
    script = SCRIPTS / "cluster" / "ray_node.sh"
    environment = {"PATH": "/usr/bin:/bin", "NODE_IP": "127.0.0.1"}
    answer = subprocess.run(["bash", str(script), "middle"], capture_output=True, text=True, env=environment)
    assert answer.returncode == 2 and "head or worker, got 'middle'" in answer.stderr
