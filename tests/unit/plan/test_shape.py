"""Parameter counts against a sum done by hand, against published counts, and against the real modules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from factories import write_model_folder

from slime_rl.plan.__main__ import SHAPES, known_shapes
from slime_rl.plan.shape import read_shape
from slime_rl.trainer.families import FAMILIES

# Elements in the safetensors of the published checkpoints.
PUBLISHED = {
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
}


def test_a_small_llama_by_hand(tmp_path: Path) -> None:
    shape = read_shape(write_model_folder(tmp_path / "model"))
    assert shape.embedding == shape.output == 96 * 32
    assert shape.attention == 32 * 32 + 2 * 32 * 16 + 32 * 32
    assert shape.dense_layer == 3072 + 64 + 3 * 32 * 48
    assert shape.parameters == 2 * 3072 + 2 * 7744 + 32 == 21_664
    assert shape.active_parameters == 21_664 - 3072
    assert shape.kv_per_token == 2 * 2 * 8


def test_tied_embeddings_count_once(tmp_path: Path) -> None:
    shape = read_shape(write_model_folder(tmp_path / "model", tie_word_embeddings=True))
    assert shape.parameters == shape.active_parameters == 21_664 - 3072


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_counts(name: str) -> None:
    assert read_shape(SHAPES / name).parameters == PUBLISHED[name]


def test_active_parameters_of_experts() -> None:
    """Published as 3.3 B active with the embedding, which is looked up and not multiplied with."""
    shape = read_shape(SHAPES / "qwen3-30b-a3b")
    assert round((shape.active_parameters + shape.embedding) / 1e9, 2) == 3.35


@pytest.mark.parametrize("name", known_shapes())
def test_counts_are_those_of_the_real_modules(name: str) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(SHAPES / name)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    count += sum(buffer.numel() for key, buffer in model.named_buffers() if key.endswith("bias"))
    assert read_shape(SHAPES / name).parameters == count


SMALL = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "vocab_size": 128, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2},
}
SMALL_EXPERTS = {
    **{"num_experts": 8, "n_routed_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 48, "n_group": 1, "topk_group": 1},
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16},
}


@pytest.mark.parametrize("says_tied", [None, True, False])
@pytest.mark.parametrize("model_type", sorted(set(FAMILIES) - {"kimi_k2"}))  # transformers has no class of that name
def test_counts_of_every_family_are_those_of_its_modules(
    model_type: str, says_tied: bool | None, tmp_path: Path
) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    known = transformers.AutoConfig.for_model(model_type).to_dict()
    given: dict[str, Any] = {name: value for name, value in (SMALL | SMALL_EXPERTS).items() if name in known}
    if "head_dim" in known and "kv_lora_rank" not in known:
        given["head_dim"] = 16
    if says_tied is not None:
        given["tie_word_embeddings"] = says_tied
    config = transformers.AutoConfig.for_model(model_type, **given)
    written = config.to_dict()
    if says_tied is None:
        del written["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(written))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    count += sum(buffer.numel() for key, buffer in model.named_buffers() if key.endswith("bias"))
    assert read_shape(tmp_path).parameters == count


def test_a_missing_size_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama", "hidden_size": 32}')
    with pytest.raises(ValueError, match=r"config\.json: has no 'num_hidden_layers'"):
        read_shape(folder)


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("hidden_size", "32", "hidden_size must be a whole number > 0, got '32'"),
        ("num_attention_heads", 0, "num_attention_heads must be a whole number > 0, got 0"),
        ("vocab_size", 9.5, r"vocab_size must be a whole number > 0, got 9\.5"),
        ("num_experts", "8", "num_experts must be a whole number >= 0, got '8'"),
        ("num_experts_per_tok", -1, "num_experts_per_tok must be a whole number >= 0, got -1"),
        ("moe_intermediate_size", [1], r"moe_intermediate_size must be a whole number >= 0, got \[1\]"),
        ("model_type", ["llama"], r"model_type must be a text, got \['llama'\]"),
        ("text_config", "x", "text_config must be an object, got 'x'"),
        ("mlp_only_layers", 3, "mlp_only_layers must be a list of layers, got 3"),
        ("hidden_size", None, "has no 'hidden_size'"),
        ("num_hidden_layers", None, "has no 'num_hidden_layers'"),
        ("num_key_value_heads", 3, "num_key_value_heads must divide num_attention_heads = 4, got 3"),
    ],
)
def test_a_size_that_is_none_is_named(tmp_path: Path, field: str, value: object, rule: str) -> None:
    with pytest.raises(ValueError, match=rf"config\.json: {rule}"):
        read_shape(write_model_folder(tmp_path / "model", **{field: value}))


def test_null_is_as_good_as_not_there(tmp_path: Path) -> None:
    nulls = {"text_config": None, "num_experts": None, "mlp_only_layers": None, "kv_lora_rank": None}
    assert read_shape(write_model_folder(tmp_path / "model", **nulls)).parameters == 21_664
