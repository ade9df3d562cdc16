from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import psutil
import pytest
from e2e_runs import LIMIT_S, base_flags, read_metrics, run_side_by_side, run_train, start_train, train_metrics
from processes import running, wait_for


def test_grpo_run_leaves_everything_a_user_expects(quickstart_data: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    evaluation = ["--eval-prompt-data", "heldout", str(quickstart_data / "heldout.jsonl"), "--eval-interval", "2"]
    flags = [*base_flags(quickstart_data, run_dir), *evaluation, "--num-steps", "3", "--use-kl-loss", "--tensorboard"]
    result = run_train([*flags, "--kl-loss-coef", "0.01", "--entropy-coef", "0.001", "--trace"])
    assert result.returncode == 0, result.stdout + result.stderr

    steps = train_metrics(run_dir)
    assert [line["step"] for line in steps] == [0, 1, 2]
    for line in steps:
        assert line["train/logprob_diff_mean_abs"] < 1e-4 and line["train/logprob_diff_max_abs"] < 1e-3
        assert line["rollout/staleness_max"] == 0
    assert min(line["timing_s/other"] / line["perf/step_s"] for line in steps) < 0.2, "phases are nearly the whole step"
    assert steps[0]["train/kl_loss"] == pytest.approx(0, abs=1e-6)  # the reference is the policy itself at first
    assert steps[2]["buffer/committed"] == 8  # counted when step 2 was taken: steps 0 and 1
    assert [line["step"] for line in read_metrics(run_dir) if "eval/heldout/accuracy" in line] == [0, 2, 3]
    for name in ("report.html", "reward.png", "accuracy.png", "summary.json", "samples.jsonl", "tensorboard"):
        assert (run_dir / name).exists(), name
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    trained_on = [sample for sample in samples if "tokens" in sample]  # those of evaluations have none
    assert {sample["step"] for sample in trained_on} == {0, 1, 2}
    for sample in trained_on:
        assert len(sample["tokens"]) == len(sample["log_probs"]) == sample["response_length"]
    events = json.loads((run_dir / "trace.json").read_text())["traceEvents"]
    assert {"phases", "requests", "rewards", "training"} <= {event.get("cat") for event in events}
    trained = [event for event in events if event.get("cat") == "requests" and event["args"].get("tokens")]
    assert len(trained) >= 3 * 16  # every sample of every step asked an engine

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(run_dir / "hf")
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "hf")
    assert model.config.model_type == "qwen3" and tokenizer.chat_template


def test_generation_ahead_trains_on_tokens_at_most_one_version_old(quickstart_data: Path, tmp_path: Path) -> None:
    """The second run evaluates meanwhile, with weights that stay until it has ended."""
    evaluation = ["--eval-prompt-data", "held", f"{quickstart_data / 'heldout.jsonl'}@[0:40]", "--eval-interval", "2"]
    reward = ["--reward-function-path", "run_plugins:every_second"]  # an untrained model gets one, so weights change
    modes = {
        "ahead": ["--rollout-ahead", "1", "--off-policy-correction", "tis_token"],
        "async": ["--fully-async", "--max-staleness", "1", "--policy-loss", "decoupled_ppo", *evaluation],
    }
    common = ["--num-steps", "4", "--num-updates-per-rollout", "2", *reward]
    run_side_by_side(*([*base_flags(quickstart_data, tmp_path / name), *common, *modes[name]] for name in modes))
    for name in modes:
        ages = [line["rollout/staleness_max"] for line in train_metrics(tmp_path / name)]
        assert len(ages) == 4 and ages[0] == 0 and max(ages) <= 1
    lines = train_metrics(tmp_path / "async")
    assert [line["step"] for line in train_metrics(tmp_path / "async", "eval/held/accuracy")] == [0, 2, 4]
    assert lines[0]["train/behave_weight"] == pytest.approx(1, abs=1e-3)
    stale = [line["train/behave_weight"] for line in lines if line["rollout/staleness_max"] == 1]
    assert any(abs(weight - 1) > 1e-5 for weight in stale)


def test_two_workers_give_the_losses_of_one(quickstart_data: Path, tmp_path: Path) -> None:
    run_dirs, flags = [tmp_path / "dp1", tmp_path / "dp2"], []
    for workers, run_dir in enumerate(run_dirs, 1):
        flags.append([*base_flags(quickstart_data, run_dir), "--loss", "sft", "--n-samples-per-prompt", "1"])
        flags[-1] += ["--rollout-batch-size", "32", "--num-steps", "5", "--train-num-workers", str(workers)]
    run_side_by_side(*flags)
    losses = [[line["train/loss"] for line in train_metrics(run_dir)] for run_dir in run_dirs]
    assert len(losses[0]) == 5
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][4] < losses[0][0]


def test_resume_trains_each_prompt_once(quickstart_data: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    flags = [*base_flags(quickstart_data, run_dir), "--save-interval", "2", "--log-samples", "16"]
    first = run_train([*flags, "--num-steps", "2"])
    assert first.returncode == 0, first.stdout + first.stderr
    second = run_train([*flags, "--num-steps", "4", "--load", str(run_dir / "checkpoints")])
    assert second.returncode == 0, second.stdout + second.stderr
    assert [line["step"] for line in train_metrics(run_dir)] == [0, 1, 2, 3]
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    trained = {(sample["step"], sample["group_index"], str(sample["prompt"])) for sample in samples}
    assert [group for _, group, _ in sorted(trained)] == list(range(16))  # in order, none twice, none left out
    assert len({prompt for _, _, prompt in trained}) == 16


def wait_for_first_step(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Return when the run in FOLDER/run has finished a step."""
    metrics = folder / "run" / "metrics.jsonl"
    wait_for(lambda: process.poll() is not None or (metrics.exists() and metrics.read_text()), LIMIT_S)
    assert process.poll() is None, (folder / "log").read_text()


class Traces:
    """What a run may leave on the machine besides its run folder: processes, temporary files, shared memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shared = set(os.listdir("/dev/shm"))
        self.temporary = Path(tempfile.mkdtemp(prefix="t_", dir="/tmp"))  # short: Ray's sockets lie below it
        self.family: list[psutil.Process] = []
        monkeypatch.setenv("TMPDIR", str(self.temporary))

    def note_family(self, pid: int) -> None:
        self.family = psutil.Process(pid).children(recursive=True)
        assert len(self.family) > 5

    def check(self) -> None:
        """Nothing is left, given some seconds to go."""
        wait_for(lambda: not self._left())
        shutil.rmtree(self.temporary)

    def _left(self) -> list[str]:
        found = [str(p) for p in self.family if p.is_running() and running([p.pid])]
        own = ("sglang_loads_", *(f"torch_{process.pid}_" for process in self.family))
        found += [name for name in set(os.listdir("/dev/shm")) - self.shared if name.startswith(own)]
        return found + [path.name for path in self.temporary.iterdir()]


def test_kill_9_leaves_nothing_and_the_next_run_starts(
    quickstart_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, traces = tmp_path / "run", Traces(monkeypatch)
    flags = [*base_flags(quickstart_data, run_dir), "--num-steps", "1000"]
    process = start_train(flags, tmp_path / "log")
    wait_for_first_step(process, tmp_path)
    traces.note_family(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    traces.check()
    again = run_train([*base_flags(quickstart_data, run_dir), "--num-steps", "1", "--overwrite"])
    assert again.returncode == 0, again.stdout + again.stderr


def is_router(process: psutil.Process) -> bool:
    try:
        command = process.cmdline()
    except psutil.Error:
        return False  # ended while we looked
    return "slime_rl.engine.launch_router" in command and "supervise" not in str(command)


def test_without_restarts_a_dead_router_ends_the_run_and_is_named(
    quickstart_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces = Traces(monkeypatch)
    flags = [*base_flags(quickstart_data, tmp_path / "run"), "--num-steps", "1000", "--max-engine-restarts", "0"]
    process = start_train(flags, tmp_path / "log")
    wait_for_first_step(process, tmp_path)
    traces.note_family(process.pid)
    (router,) = [process for process in traces.family if is_router(process)]
    router.kill()
    assert process.wait(timeout=LIMIT_S) == 1
    assert "slime_rl: RuntimeError: the router has ended\n--max-engine-restarts 0" in (tmp_path / "log").read_text()
    traces.check()
