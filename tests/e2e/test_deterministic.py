"""--deterministic: results depend on nothing but the flags."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from e2e_runs import base_flags, run_side_by_side, train_metrics
from factories import make_config
from tiny_checkpoint import write_tiny_checkpoint

from slime_rl.engine.server import EngineServer
from slime_rl.rollout.client import EngineClient

EQUAL = ("train/loss", "train/grad_norm", "train/logprob_diff_mean_abs", "rollout/response_length_mean")


def test_seeded_requests_do_not_depend_on_what_else_runs(tmp_path: Path) -> None:
    """The same seeds give the same tokens and log-probs, bit for bit, in another order too."""
    model = write_tiny_checkpoint(tmp_path / "tiny", seed=0)
    lengths = ("--max-prompt-len", "64", "--max-response-len", "64")
    config = make_config(tmp_path, "--hf-checkpoint", str(model), *lengths, "--deterministic")
    engine = EngineServer(config, 0, tmp_path)

    async def run(seeds: list[int]) -> dict[int, tuple[list[int], list[float]]]:
        sampling = {"max_new_tokens": 12, "temperature": 1.0, "ignore_eos": True}
        async with EngineClient(engine.url, max_in_flight=64, timeout_s=600) as client:
            requests = [client.generate([5, 6, 7 + seed % 3], {**sampling, "sampling_seed": seed}) for seed in seeds]
            answers = await asyncio.gather(*requests)
        return {seed: (answer.tokens, answer.log_probs) for seed, answer in zip(seeds, answers, strict=True)}

    try:
        engine.start()
        first = asyncio.run(run(list(range(12))))
        assert first == asyncio.run(run(list(reversed(range(12)))))
        assert len({tuple(tokens) for tokens, _ in first.values()}) == 12
    finally:
        engine.stop()


def test_two_deterministic_runs_side_by_side_are_equal_bit_for_bit(quickstart_data: Path, tmp_path: Path) -> None:
    """One synchronous, one fully asynchronous with staleness 0, which must give the same batches; two engines each.

    They run side by side on one machine, and neither notices.
    """
    run_dirs, flags = [tmp_path / "sync", tmp_path / "async"], []
    for run_dir, mode in zip(run_dirs, ([], ["--fully-async", "--max-staleness", "0"]), strict=True):
        flags.append([*base_flags(quickstart_data, run_dir), *mode, "--deterministic", "--num-steps", "3"])
        flags[-1] += ["--log-samples", "16", "--rollout-num-engines", "2", "--entropy-coef", "0.01"]
        flags[-1] += ["--off-policy-correction", "tis_token"]
    run_side_by_side(*flags)
    found = []
    for run_dir in run_dirs:
        samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
        texts = [(s["step"], s["group_index"], s["response"]) for s in samples]
        found.append((texts, [[line[key] for key in EQUAL] for line in train_metrics(run_dir)]))
    assert found[0] == found[1]
    texts, metrics = found[0]
    assert len(metrics) == 3 and len(texts) == 48
    assert len({text for _, _, text in texts}) > 24  # samples of a prompt differ: each has its own seed
