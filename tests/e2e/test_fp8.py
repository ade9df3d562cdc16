"""Engines that hold fp8 weights: what they say is what the dequantised weights say, before and after every update.

On CPU the engines multiply by dequantised weights and do not quantise activations; the bound is float32's rounding.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e_runs import base_flags, run_train, train_metrics
from factories import make_config
from safetensors.torch import load_file, save_file
from served import generate
from tiny_checkpoint import quantize_checkpoint, write_tiny_checkpoint

from benchmarks.tiny_models import make_checkpoint
from slime_rl.buffer.dumps import RolloutDumps
from slime_rl.config.quantization import read_quantization
from slime_rl.data.fp8 import dequantize_blocks, quantize_blocks
from slime_rl.engine.control import EngineControl
from slime_rl.engine.server import EngineServer
from slime_rl.weight_sync.bucket import split_buckets
from slime_rl.weight_sync.quantize import EngineForm
from slime_rl.weight_sync.sender import make_sender

TOLERANCE = 1e-4
RANKS = ("--rollout-num-gpus-per-engine", "2")
# On each of two ranks the rows of what SGLang fuses are multiples of 128; the hidden size, which is the columns of most
# weights, is not.
SHAPE = {
    "hidden_size": 160,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 32,
}


def through_fp8(named: dict[str, torch.Tensor], folder: Path) -> dict[str, torch.Tensor]:
    """The weights as an engine of this folder computes with them."""
    blocks = read_quantization(folder)
    assert blocks is not None
    size = (blocks.rows, blocks.columns)
    return {
        name: dequantize_blocks(*quantize_blocks(tensor, *size), *size, dtype=torch.float32)
        if name.endswith("_proj.weight")
        else tensor
        for name, tensor in named.items()
    }


def model_with(config_of: Path, named: dict[str, torch.Tensor], folder: Path) -> Any:
    """transformers' model with these weights; `folder` is written."""
    from transformers import AutoModelForCausalLM

    folder.mkdir()
    config = json.loads((config_of / "config.json").read_text())
    config.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def gap(model: Any, prompt: list[int], tokens: list[int], log_probs: list[float]) -> float:
    """Largest difference between an engine's log-probs and transformers'."""
    with torch.no_grad():
        table = model(torch.tensor([prompt + tokens])).logits[0].log_softmax(-1)
    expected = [table[len(prompt) + i - 1, token].item() for i, token in enumerate(tokens)]
    return max(abs(a - b) for a, b in zip(log_probs, expected, strict=True))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EngineServer, Path, dict[str, Any]]]:
    """An engine of an fp8 folder, that folder, and two sets of plain weights: A, from which it was made, and B."""
    folder = tmp_path_factory.mktemp("fp8")
    plain = {name: write_tiny_checkpoint(folder / name, seed=seed, **SHAPE) for seed, name in enumerate("AB")}
    weights = {name: load_file(path / "model.safetensors") for name, path in plain.items()}
    model = quantize_checkpoint(plain["A"])
    flags = ("--hf-checkpoint", str(model), "--max-prompt-len", "64", "--max-response-len", "64", *RANKS)
    server = EngineServer(make_config(folder, *flags), 0, folder / "run")
    try:
        server.start()
        yield server, model, weights
    finally:
        server.stop()


def checksum(url: str) -> str:
    async def ask() -> str:
        async with EngineControl(url) as control:
            return await control.checksum()

    return asyncio.run(ask())


def test_quantised_weights_are_served_after_every_transport(
    engine: tuple[EngineServer, Path, dict[str, Any]], tmp_path: Path
) -> None:
    server, folder, weights = engine
    models = {name: model_with(folder, through_fp8(named, folder), tmp_path / name) for name, named in weights.items()}
    prompts = generate(server.url)
    assert max(gap(models["A"], p, a.tokens, a.log_probs) for p, a in prompts) < TOLERANCE
    sums: dict[str, set[str]] = {"A": {checksum(server.url)}, "B": set()}
    version = 0
    for transport in ("tensor", "distributed", "disk", "disk-delta"):
        flags = ("--hf-checkpoint", str(folder), "--weight-sync", transport, *RANKS)
        sender = make_sender(make_config(tmp_path, *flags), [server.url])
        try:
            for name, max_bytes in (("B", 1 << 30), ("A", 100_000)):
                version += 1
                named = EngineForm(str(folder)).of(weights[name].items())
                report = sender.send(split_buckets(named, max_bytes), version)
                assert report.updated == [server.url], report
                for prompt, answer in generate(server.url):
                    assert answer.versions == [version] * 16
                    assert gap(models[name], prompt, answer.tokens, answer.log_probs) < TOLERANCE
                sums[name].add(checksum(server.url))
        finally:
            sender.close()
    assert [len(found) for found in sums.values()] == [1, 1] and sums["A"] != sums[
        "B"
    ]  # bit by bit, by every transport


def test_a_run_trains_plain_experts_and_its_engine_serves_them_as_fp8(quickstart_data: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    vocab_size = json.loads((quickstart_data / "model" / "config.json").read_text())["vocab_size"]
    make_checkpoint(model, "qwen3_moe", num_hidden_layers=2, vocab_size=vocab_size, initializer_range=0.2)
    for file in (quickstart_data / "model").iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            shutil.copy(file, model)
    quantize_checkpoint(model, 8, 8)
    run_dir, dumps = tmp_path / "run", tmp_path / "dumps"
    flags = [*base_flags(quickstart_data, run_dir), "--hf-checkpoint", str(model), "--num-steps", "3"]
    flags += ["--reward-function-path", "run_plugins:every_second"]  # an untrained model gets one, so weights change
    exports = ("--save-hf", str(tmp_path / "hf_{step}"), "--save-interval", "1", "--dump-rollouts", str(dumps))
    result = run_train([*flags, *exports])
    assert result.returncode == 0, result.stdout + result.stderr
    assert [line["step"] for line in train_metrics(run_dir)] == [0, 1, 2]
    assert "quantization_config" not in json.loads((tmp_path / "hf_2" / "config.json").read_text())
    rounding = 0.0
    for step in (1, 2):  # sampled with the weights after `step` updates
        trained = load_file(tmp_path / f"hf_{step}" / "model.safetensors")
        served = model_with(model, through_fp8(trained, model), tmp_path / f"served_{step}")
        plain = model_with(model, trained, tmp_path / f"plain_{step}")
        for group in RolloutDumps(dumps).read(step):
            for sample in group.samples:
                prompt, response = sample.tokens[: sample.prompt_length], sample.tokens[sample.prompt_length :]
                assert sample.weight_versions == [step] * len(response)
                assert gap(served, prompt, response, sample.rollout_log_probs) < TOLERANCE
                rounding = max(rounding, gap(plain, prompt, response, sample.rollout_log_probs))
    assert rounding > 10 * TOLERANCE  # what was served is not what was trained
