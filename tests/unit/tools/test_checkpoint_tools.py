"""convert_hf_to_torch_dist, convert_torch_dist_to_hf and compare_checkpoints on tiny models, in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.hf_parity import same_weights
from benchmarks.tiny_models import make_checkpoint, make_named
from tools import compare_checkpoints, convert_hf_to_torch_dist, convert_torch_dist_to_hf


def to_dist(hf: Path, save: Path, *flags: str) -> int:
    return convert_hf_to_torch_dist.main(["--hf-checkpoint", str(hf), "--save", str(save), *flags])


def to_hf(source: Path, output: Path, *flags: str) -> int:
    return convert_torch_dist_to_hf.main(["--input-dir", str(source), "--output-dir", str(output), *flags])


@pytest.mark.parametrize(
    "name",
    ["Llama 3 (scaled rotary)", "Qwen2-MoE (gated shared expert)", "GLM-4", "DeepSeek-V3 with MTP layer", "OLMo 2"],
)
def test_round_trip_is_bitwise_and_carries_every_other_file(name: str, tmp_path: Path) -> None:
    make_named(tmp_path / "hf", name)
    others = {"tokenizer.json": "{}", "chat_template.jinja": "x", "modeling_custom.py": "y = 1\n"}
    for file, text in others.items():
        (tmp_path / "hf" / file).write_text(text)
    assert to_dist(tmp_path / "hf", tmp_path / "dist") == 0
    assert to_hf(tmp_path / "dist", tmp_path / "out", "--shard-size-gb", "0.0001") == 0
    assert same_weights(tmp_path / "hf", tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    shards = sorted(tmp_path.glob("out/model-*.safetensors"))
    assert set(index["weight_map"].values()) == {shard.name for shard in shards}
    assert index["metadata"]["total_size"] == sum(t.nbytes for s in shards for t in load_file(s).values())
    assert all((tmp_path / "out" / file).read_text() == text for file, text in others.items())
    assert compare_checkpoints.main([str(tmp_path / "hf"), str(tmp_path / "dist")]) == 0


def test_types_are_kept_or_changed_by_flag(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "hf", "qwen3", num_hidden_layers=1)
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    norm = "model.norm.weight"
    mixed = {n: t if n == norm else t.bfloat16() for n, t in weights.items()}
    save_file(mixed, tmp_path / "hf" / "model.safetensors")
    assert to_dist(tmp_path / "hf", tmp_path / "dist") == 0
    assert to_hf(tmp_path / "dist", tmp_path / "same") == 0
    assert to_hf(tmp_path / "dist", tmp_path / "half", "--dtype", "float16") == 0
    same = load_file(tmp_path / "same" / "model.safetensors")
    assert same[norm].dtype == torch.float32 and same["lm_head.weight"].dtype == torch.bfloat16
    assert all(torch.equal(same[n], t) for n, t in mixed.items())
    assert {t.dtype for t in load_file(tmp_path / "half" / "model.safetensors").values()} == {torch.float16}
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "float16"


def test_two_workers_write_what_one_does(tmp_path: Path) -> None:
    make_named(tmp_path / "hf", "Qwen3-MoE")
    assert to_dist(tmp_path / "hf", tmp_path / "dist", "--num-workers", "2") == 0
    assert len(list((tmp_path / "dist").glob("step_*/model/*.distcp"))) == 2
    assert to_hf(tmp_path / "dist", tmp_path / "out", "--num-workers", "2", "--shard-size-gb", "0.0001") == 0
    assert same_weights(tmp_path / "hf", tmp_path / "out")


def test_differences_are_told_with_name_and_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path / "a", "qwen3", num_hidden_layers=1)
    make_checkpoint(tmp_path / "b", "qwen3", num_hidden_layers=1)
    weights = load_file(tmp_path / "b" / "model.safetensors")
    weights["model.norm.weight"][3] += 0.5
    weights["more"] = weights.pop("model.layers.0.self_attn.q_norm.weight")
    save_file(weights, tmp_path / "b" / "model.safetensors")
    assert compare_checkpoints.main([str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    out = capsys.readouterr().out
    assert "only in A: 1, first model.layers.0.self_attn.q_norm.weight" in out
    assert "only in B: 1, first more" in out
    assert "different: 1, first model.norm.weight" in out
    assert out.splitlines()[-1].endswith("max_abs_diff=0.5")
    assert compare_checkpoints.main([str(tmp_path / "a"), str(tmp_path / "nothing")]) == 2


def test_bad_input_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path / "hf", "qwen3", num_hidden_layers=1)
    make_checkpoint(tmp_path / "wider", "qwen3", num_hidden_layers=1, intermediate_size=96)
    assert to_dist(tmp_path / "hf", tmp_path / "dist") == 0
    assert to_dist(tmp_path / "hf", tmp_path / "dist") == 2
    assert "exists already" in capsys.readouterr().err
    assert to_hf(tmp_path / "dist", tmp_path / "out", "--origin-hf-dir", str(tmp_path / "wider")) == 2
    assert "checkpoint of another model" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert to_hf(tmp_path / "hf", tmp_path / "out") == 2
    (tmp_path / "hf" / "model.safetensors").write_bytes(b"cut")
    assert to_dist(tmp_path / "hf", tmp_path / "again") == 2
    assert "must be a whole safetensors file" in capsys.readouterr().err
    assert not list(tmp_path.glob("again/step_*"))
