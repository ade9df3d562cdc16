"""What a user can get wrong ends in one clear message, an exit code other than 0, no hang, and no process left."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from e2e_runs import base_flags, run_train
from processes import wait_for

REWARD = "--reward-function-path"


def rows(folder: Path, *lines: str) -> list[str]:
    folder.mkdir()
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return ["--prompt-data", str(path)]


def case_flags(case: str, folder: Path) -> tuple[list[str], str]:
    """(flags, what the message must contain) of a named mistake."""
    good = json.dumps({"prompt": "1+1=", "label": "2"})
    return {
        "unknown flag": (["--rollout-batchsize", "4"], "did you mean --rollout-batch-size"),
        "missing file": (["--prompt-data", str(folder / "absent.jsonl")], "absent.jsonl"),
        "missing model": (["--hf-checkpoint", str(folder / "absent")], "--hf-checkpoint must be a folder that exists"),
        "bad row": (rows(folder / "a", good, "{not json"), "prompts.jsonl:2"),
        "label missing": (
            rows(folder / "b", good, good, '{"prompt": "1+2="}'),
            "prompts.jsonl:3: 'label' (--label-key) is missing",
        ),
        "long prompt": (rows(folder / "c", json.dumps({"prompt": "1" * 99, "label": "2"})), "over --max-prompt-len 32"),
        "reward signature": ([REWARD, "run_plugins:wrong_signature"], "called as (config, group)"),
        "reward raises": ([REWARD, "run_plugins:raises"], "raised KeyError: 'no such answer'"),
        "reward count": ([REWARD, "run_plugins:wrong_count"], "one value for each of the 4 samples, got 1"),
        "engine flag": (["--sglang-attention-backendd", "x"], "--sglang-attention-backend"),
        "engine start": (["--sglang-attention-backend", "flashinfer"], "engine_0.log"),
        "load nothing": (["--load", str(folder)], "holds no complete checkpoint"),
    }[case]


CASES = [
    *("unknown flag", "missing file", "missing model", "bad row", "label missing", "long prompt", "reward signature"),
    *("reward raises", "reward count", "engine flag", "engine start", "load nothing"),
]


def processes_of(run_dir: Path) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if str(run_dir) in " ".join(p.info["cmdline"] or [])]


@dataclass(frozen=True)
class Attempt:
    run_dir: Path
    message: str
    result: Future[subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def attempts(quickstart_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Attempt]]:
    """A run with each mistake, two at a time: most of them are the start of Python on one core."""
    made = {}
    with ThreadPoolExecutor(2) as pool:
        for case in CASES:
            folder = tmp_path_factory.mktemp("mistake")
            flags, message = case_flags(case, folder)
            run_dir = folder / "run"
            flags = [*base_flags(quickstart_data, run_dir), "--num-steps", "2", *flags]
            made[case] = Attempt(run_dir, message, pool.submit(run_train, flags))
        yield made
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("case", CASES)
def test_mistake_ends_in_one_clear_message(case: str, attempts: dict[str, Attempt]) -> None:
    run_dir, message = attempts[case].run_dir, attempts[case].message
    result = attempts[case].result.result()
    lines = [line for line in result.stderr.splitlines() if line.startswith("slime_rl: ")]
    assert result.returncode == (1 if case == "engine start" else 2), result.stdout + result.stderr
    assert message in result.stderr
    assert lines and "Traceback (most recent call last)" not in result.stderr + result.stdout
    wait_for(lambda: not processes_of(run_dir))
