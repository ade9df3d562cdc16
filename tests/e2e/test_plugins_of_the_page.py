"""The examples of docs/customisation.md in real runs: all that fit together at once, the world, and the agent."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from e2e_runs import LIMIT_S, base_flags, environment, train_command, train_metrics

PAGE = (Path(__file__).parents[2] / "docs" / "customisation.md").read_text()
TOGETHER = {
    "--data-source-path": "my_plugins:Sums", "--buffer-path": "my_plugins:CountingBuffer",
    "--buffer-filter-path": "my_plugins:best_first", "--generate-function-path": "my_plugins:think_twice",
    "--reward-function-path": "my_plugins:reward", "--log-function-path": "my_plugins:answered",
    "--dynamic-filter-path": "my_plugins:not_too_easy", "--sample-filter-path": "my_plugins:not_too_long",
    "--rollout-function-path": "my_plugins:timed", "--advantage-estimator": "my_plugins:centred",
    "--policy-loss": "my_plugins:plain", "--off-policy-correction": "my_plugins:halved",
    "--model-conversion-path": "my_models:Tempered",
}  # fmt: skip
WORLD = {"--generate-function-path": "environment_loop", "--environment-path": "my_plugins:Echo"}
WORLD |= {"--curriculum-path": "my_plugins:short_first", "--rm-type": "episode", "--max-response-len": "60"}
AGENT = {"--generate-function-path": "gateway", "--agent-path": "my_plugins:ask", "--rm-type": "episode"}


@pytest.mark.parametrize(
    ("plugins", "told"),
    [
        (TOGETHER, {"mine/answered", "train/mine_log_prob", "rollout/answers_per_s", "buffer/admitted"}),
        (WORLD, {"rollout/reward_mean"}),
        (AGENT, {"rollout/reward_mean"}),
    ],
    ids=["together", "world", "agent"],
)
def test_the_examples_train(quickstart_data: Path, tmp_path: Path, plugins: dict[str, str], told: set[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    models = [block for block in blocks if block.startswith("# my_models.py")]
    (tmp_path / "my_models.py").write_text("\n".join(models))
    (tmp_path / "my_plugins.py").write_text("\n".join(block for block in blocks if block not in models))
    flags = [*base_flags(quickstart_data, tmp_path / "run"), "--max-prompt-len", "64", "--max-response-len", "40"]
    if "--data-source-path" in plugins:
        at = flags.index("--prompt-data")
        del flags[at : at + 2]
    flags += ["--num-steps", "2", *(word for pair in plugins.items() for word in pair)]
    command, own = train_command(flags), environment()
    done = subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = train_metrics(tmp_path / "run")
    assert len(lines) == 2
    assert all(told <= set(line) and line["train/grad_norm"] >= 0 for line in lines)
