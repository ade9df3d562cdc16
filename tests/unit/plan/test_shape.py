"""Parameter counts against a sum done by hand, against published counts, and against the real modules."""

from __future__ import annotations

from pathlib import Path

import pytest
from factories import write_model_folder

from slime_rl.plan.__main__ import SHAPES, known_shapes
from slime_rl.plan.shape import read_shape

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
        ("num_key_value_heads", 3, "num_key_value_heads must divide num_attention_heads = 4, got 3"),
    ],
)
def test_a_size_that_is_none_is_named(tmp_path: Path, field: str, value: object, rule: str) -> None:
    with pytest.raises(ValueError, match=rf"config\.json: {rule}"):
        read_shape(write_model_folder(tmp_path / "model", **{field: value}))
