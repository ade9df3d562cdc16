"""Folders that hold fp8: the trainer has what their weights and scales multiply to, and writes plain weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_checkpoint import quantize_checkpoint

from benchmarks.trainer_cases import make_batch, make_checkpoint, make_config, open_worker
from slime_rl.data.fp8 import dequantize_blocks
from slime_rl.trainer.hf_folder import HFFolder


def dequantised(folder: Path, rows: int, columns: int) -> dict[str, torch.Tensor]:
    stored = load_file(folder / "model.safetensors")
    scales = {name for name in stored if name.endswith("_scale_inv")}
    return {
        name: dequantize_blocks(t, stored[name + "_scale_inv"], rows, columns, dtype=torch.float32)
        if name + "_scale_inv" in scales
        else t
        for name, t in stored.items()
        if name not in scales
    }


def test_a_folder_is_read_by_any_part(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, num_hidden_layers=1)
    quantize_checkpoint(tmp_path, 24, 20)
    folder, whole = HFFolder(tmp_path), dequantised(tmp_path, 24, 20)
    assert set(folder.names) == whole.keys()
    name = "model.layers.0.mlp.gate_proj.weight"
    source = folder.source(name)
    assert source.get_shape() == list(whole[name].shape)
    for index in (slice(None), slice(5, 31), (slice(None), slice(13, 30)), (slice(7, 9), slice(21, None))):
        assert torch.equal(source[index], whole[name][index])
    assert torch.equal(folder.tensor(name), whole[name])
    assert HFFolder(tmp_path, torch.bfloat16).tensor(name).dtype == torch.bfloat16
    assert HFFolder(tmp_path, torch.bfloat16).tensor("model.norm.weight").dtype == torch.float32


@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen3_moe"])
def test_the_trainer_has_the_products_and_exports_them(tmp_path: Path, kind: str) -> None:
    make_checkpoint(tmp_path / "hf", kind, num_hidden_layers=2)
    whole = dequantised(quantize_checkpoint(tmp_path / "hf", 16, 32), 16, 32)
    with open_worker(make_config(tmp_path / "hf")) as worker:
        exported = dict(worker.export_weights())
        assert exported.keys() == whole.keys()
        assert all(torch.equal(exported[name], whole[name]) for name in whole)
        worker.train(0, make_batch())
        worker.save_hf(tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert saved.keys() == whole.keys() and {tensor.dtype for tensor in saved.values()} == {torch.float32}


def test_a_reference_may_be_stored_in_another_form(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "plain", num_hidden_layers=1)
    make_checkpoint(tmp_path / "fp8", num_hidden_layers=1)
    quantize_checkpoint(tmp_path / "fp8", 16, 16)
    flags = ("--ref-load", str(tmp_path / "plain"), "--use-kl-loss", "--kl-loss-coef", "0.1")
    with open_worker(make_config(tmp_path / "fp8", *flags)) as worker:
        batch = make_batch()
        gap = (worker.compute_log_probs(batch) - worker.compute_log_probs(batch, "reference")).abs()
        assert 0 < gap.max() < 0.5


def test_mbridge_refuses_them(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, num_hidden_layers=1)
    quantize_checkpoint(tmp_path, 16, 16)
    with (
        pytest.raises(ValueError, match="quantization_config: --model-conversion-path mbridge reads no fp8"),
        open_worker(make_config(tmp_path, "--model-conversion-path", "mbridge")),
    ):
        pass


def test_a_kind_that_is_not_known_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, num_hidden_layers=1)
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": {"quant_method": "awq"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with (
        pytest.raises(ValueError, match=r"config\.json: quantization_config\.quant_method must be fp8.*got 'awq'"),
        open_worker(make_config(tmp_path)),
    ):
        pass
