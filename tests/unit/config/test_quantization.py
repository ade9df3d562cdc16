from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoint import quantize_checkpoint, write_tiny_checkpoint

from slime_rl.config.quantization import Fp8Blocks, check_engine_blocks, quantized_weights, read_quantization

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
LISTED = "model.layers.1.mlp.down_proj"


def write(folder: Path, entry: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({"quantization_config": entry}))
    return folder


@pytest.fixture(scope="module")
def fp8_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("fp8") / "model")
    return quantize_checkpoint(folder, 16, 16, modules_to_not_convert=["lm_head", LISTED])


def changed(source: Path, folder: Path, tensors: dict[str, torch.Tensor], **entry: Any) -> Path:
    """A copy with other tensors and other fields of quantization_config."""
    folder.mkdir()
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] |= entry
    (folder / "config.json").write_text(json.dumps(config))
    save_file({**load_file(source / "model.safetensors"), **tensors}, folder / "model.safetensors")
    return folder


def test_forms_that_are_read(tmp_path: Path) -> None:
    assert read_quantization(write(tmp_path, None)) is None
    assert read_quantization(write(tmp_path, FP8)) == Fp8Blocks(rows=128, columns=128)
    assert read_quantization(write(tmp_path, FP8 | {"scale_fmt": "ue8m0"})) == Fp8Blocks(
        rows=128, columns=128, power_of_two=True
    )
    for field in ("modules_to_not_convert", "ignored_layers"):
        found = read_quantization(write(tmp_path, FP8 | {field: ["lm_head"]}))
        assert found is not None and (found.ignored, found.ignored_field) == (("lm_head",), field)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("fp8", "quantization_config must be an object, got 'fp8'"),
        ({"quant_method": "awq", "bits": 4}, "quantization_config.quant_method must be fp8, .*got 'awq'"),
        ({"quant_method": "gptq"}, "quant_method must be fp8, .*got 'gptq'"),
        ({"quant_method": "mxfp4"}, "quant_method must be fp8, .*got 'mxfp4'"),
        ({"quant_method": "compressed-tensors"}, "got 'compressed-tensors'"),
        ({}, "quant_method must be fp8, .*got None"),
        (FP8 | {"fmt": "e5m2"}, "fmt must be e4m3, got 'e5m2'"),
        (FP8 | {"activation_scheme": "static"}, "activation_scheme must be dynamic, .*got 'static'"),
        (FP8 | {"weight_block_size": None}, r"weight_block_size must be \[rows, columns\] .*got None"),
        (FP8 | {"weight_block_size": [128]}, r"weight_block_size .*got \[128\]"),
        (FP8 | {"weight_block_size": [0, 128]}, r"weight_block_size .*got \[0, 128\]"),
        (FP8 | {"scale_fmt": "e8m23"}, "scale_fmt must be float or ue8m0, got 'e8m23'"),
        (FP8 | {"kv_cache_quant_algo": "FP8"}, "quantization_config.kv_cache_quant_algo = 'FP8' is not known"),
        (FP8 | {"ignored_layers": "lm_head"}, "ignored_layers must be a list of names, got 'lm_head'"),
    ],
)
def test_forms_that_are_not_known_are_refused_by_field_and_value(tmp_path: Path, entry: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(str(tmp_path))}/config.json: .*{said}"):
        read_quantization(write(tmp_path, entry))


def test_modules_are_matched_by_whole_parts_of_their_names() -> None:
    """As SGLang's is_layer_skipped does."""
    blocks = Fp8Blocks(rows=128, columns=128, ignored=("model.layers.1.mlp.gate", "lm_head", "layers.3"))
    assert blocks.ignores("model.layers.1.mlp.gate.weight") and blocks.ignores("lm_head.weight")
    assert blocks.ignores("model.layers.3.self_attn.q_proj.weight")
    assert not blocks.ignores("model.layers.1.mlp.gate_proj.weight")
    assert not blocks.ignores("model.layers.30.self_attn.q_proj.weight")


def test_weights_with_scales_are_the_quantised_ones(fp8_model: Path) -> None:
    found = quantized_weights(fp8_model)
    assert len(found) == 2 * 7 - 1 and LISTED + ".weight" not in found
    assert found["model.layers.0.mlp.gate_proj.weight"] == (96, 64)


def test_files_that_say_something_else_than_config_json_are_refused(fp8_model: Path, tmp_path: Path) -> None:
    listed = LISTED + ".weight"
    for name, tensors, entry, said in (
        ("unlisted", {}, {"modules_to_not_convert": ["lm_head"]}, f"it does not list {listed}, which is not fp8"),
        ("listed", {}, {"modules_to_not_convert": ["layers.1"]}, "it lists model.layers.1.*, which is fp8"),
        ("block", {}, {"weight_block_size": [32, 16]}, r"weight_block_size \[32, 16\] makes \[.*\] scales of model"),
        ("alone", {listed: torch.zeros(2, 2).to(torch.float8_e4m3fn)}, {}, f"{listed} is F8_E4M3; F8_E4M3 and"),
        ("wide", {"model.layers.0.mlp.up_proj.weight": torch.zeros(96, 64)}, {}, "up_proj.weight is F32; F8_E4M3 and"),
    ):
        with pytest.raises(ValueError, match=said):
            quantized_weights(changed(fp8_model, tmp_path / name, tensors, **entry))
    plain = write_tiny_checkpoint(tmp_path / "plain")
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": FP8}
    (plain / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="says fp8, but no weight has a scale_inv beside it"):
        quantized_weights(plain)


def test_blocks_must_fit_what_an_engine_fuses_and_splits(fp8_model: Path, tmp_path: Path) -> None:
    check_engine_blocks(fp8_model, 1, on_cuda=True)
    check_engine_blocks(fp8_model, 2, on_cuda=True)
    with pytest.raises(
        ValueError, match=r"weight_block_size \[16, 16\]: SGLang needs a multiple of 16 columns of .*down_proj"
    ):
        check_engine_blocks(fp8_model, 8, on_cuda=False)
    uneven = quantize_checkpoint(write_tiny_checkpoint(tmp_path / "uneven"), 64, 64)
    with pytest.raises(ValueError, match=r"multiple of 64 rows of model.layers.0.mlp.gate_proj.weight .*got 96"):
        check_engine_blocks(uneven, 1, on_cuda=False)
    odd = quantize_checkpoint(write_tiny_checkpoint(tmp_path / "odd"), 32, 64)
    check_engine_blocks(odd, 1, on_cuda=False)
    with pytest.raises(ValueError, match="must be square"):
        check_engine_blocks(odd, 1, on_cuda=True)
    odd = quantize_checkpoint(write_tiny_checkpoint(tmp_path / "columns", intermediate_size=80), 16, 16)
    check_engine_blocks(odd, 1, on_cuda=True)
    odd = quantize_checkpoint(write_tiny_checkpoint(tmp_path / "columns2", hidden_size=72), 16, 16)
    with pytest.raises(ValueError, match=r"must divide the 72 columns of .* for SGLang's checksum"):
        check_engine_blocks(odd, 1, on_cuda=True)
