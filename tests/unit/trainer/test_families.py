"""Every family against transformers, and Hugging Face -> Megatron -> Hugging Face bit by bit, in one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.hf_parity import hf_log_probs, same_weights
from benchmarks.tiny_models import CATALOGUE, make_checkpoint, make_named
from benchmarks.trainer_cases import make_batch, make_config, only_worker, open_worker
from slime_rl.trainer.families import FAMILIES

LIMIT = 1e-4


PACKED = ("--max-tokens-per-worker", "4096")


@pytest.mark.parametrize("name", list(CATALOGUE))
def test_family_computes_what_transformers_does_and_gives_its_weights_back(name: str, tmp_path: Path) -> None:
    model = make_named(tmp_path / "hf", name)
    batch = make_batch()
    with open_worker(make_config(tmp_path / "hf", *PACKED)) as worker:
        gap = (worker.compute_log_probs(batch) - hf_log_probs(model, batch)).abs().max()
        worker.save_hf(tmp_path / "out")
    assert gap < LIMIT
    assert same_weights(tmp_path / "hf", tmp_path / "out")


def test_catalogue_covers_every_family() -> None:
    aliases = {"kimi_k2"}  # Kimi-K2's config.json with DeepSeek-V3's architecture
    assert {kind for kind, _ in CATALOGUE.values()} == FAMILIES.keys() - aliases


def test_mbridge_can_be_asked_for_and_agrees(tmp_path: Path) -> None:
    model, batch = make_checkpoint(tmp_path / "hf", "qwen3", num_hidden_layers=2), make_batch()
    with open_worker(make_config(tmp_path / "hf", *PACKED, "--model-conversion-path", "mbridge")) as worker:
        gap = (worker.compute_log_probs(batch) - hf_log_probs(model, batch)).abs().max()
    assert gap < LIMIT


def test_unknown_architecture_and_unknown_field_are_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3", num_hidden_layers=1)
    file = tmp_path / "config.json"
    known = json.loads(file.read_text())
    file.write_text(json.dumps(known | {"logit_scale": 0.5}))
    with pytest.raises(ValueError, match=r"the field 'logit_scale' = 0\.5 is not known for a qwen3 model"):
        only_worker(make_config(tmp_path))
    file.write_text(json.dumps(known | {"model_type": "bloom"}))
    with pytest.raises(ValueError, match="architecture 'bloom' is not one of deepseek_v3, gemma"):
        only_worker(make_config(tmp_path))


def test_missing_and_misshaped_weights_are_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    make_checkpoint(tmp_path, "qwen3", num_hidden_layers=1)
    weights = load_file(tmp_path / "model.safetensors")
    key = "model.layers.0.self_attn.k_norm.weight"
    save_file({n: t for n, t in weights.items() if n != key}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"the weight {key} is missing"):
        only_worker(make_config(tmp_path))
    save_file(weights | {key: torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{key} does not fit config\.json.*\(16,\), got \(3,\)"):
        only_worker(make_config(tmp_path))


@pytest.mark.parametrize(
    ("name", "rows"),
    [("model.embed_tokens.weight", -3), ("lm_head.weight", 5), ("model.layers.0.self_attn.q_proj.weight", 16)],
)
def test_weights_with_other_rows_are_refused_and_not_cut(name: str, rows: int, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    make_checkpoint(tmp_path, "qwen3", num_hidden_layers=1)
    weights = load_file(tmp_path / "model.safetensors")
    own = weights[name]
    weights[name] = own[:rows].clone() if rows < 0 else torch.cat([own, own[:rows]])
    save_file(weights, tmp_path / "model.safetensors")
    shape = rf"must have shape \({len(own)}, 48\), got \({len(own) + rows}, 48\)"
    with pytest.raises(ValueError, match=rf"{name} does not fit config\.json: {shape}"):
        only_worker(make_config(tmp_path))


def test_layers_that_config_does_not_count_are_refused(tmp_path: Path) -> None:
    """Only families with layers for further tokens may have more, and only as many as they say."""
    for kind, field, value in (("llama", "num_hidden_layers", 1), ("deepseek_v3", "num_nextn_predict_layers", 0)):
        extra = {"num_nextn_predict_layers": 1} if kind == "deepseek_v3" else {}
        folder = tmp_path / kind
        make_checkpoint(folder, kind, num_hidden_layers=2, **extra)
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(content | {field: value}))
        with pytest.raises(
            ValueError, match=r"weights have no place in the Megatron model of a .*model\.layers\.[12]\."
        ):
            only_worker(make_config(folder))


def test_output_layer_that_is_not_the_tied_embedding_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    make_checkpoint(tmp_path, "qwen3", num_hidden_layers=1, tie_word_embeddings=True)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors")
    only_worker(make_config(tmp_path)).shutdown()
    weights["lm_head.weight"] *= 2
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"lm_head\.weight is model\.embed_tokens\.weight \(tie_word_embeddings\), and they"
    ):
        only_worker(make_config(tmp_path))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_weights_without_their_scales_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    make_checkpoint(tmp_path, "qwen3", num_hidden_layers=1)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"].to(dtype)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(
        ValueError, match=rf"model\.norm\.weight is of type {dtype}; quantised weights must be converted"
    ):
        only_worker(make_config(tmp_path))
