from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_rl.trainer.families.deepseek import _rope
from slime_rl.trainer.families.family import decoder
from slime_rl.trainer.families.fields import Fields
from slime_rl.trainer.families.llama import window
from slime_rl.trainer.rope import rope_parameters, rotary_frequencies

LLAMA = {"model_type": "llama", "hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 9}


def fields(folder: Path, **content: Any) -> Fields:
    (folder / "config.json").write_text(json.dumps(LLAMA | content))
    return Fields(str(folder))


def test_field_that_nobody_asked_for_is_refused(tmp_path: Path) -> None:
    f = fields(tmp_path, residual_multiplier=0.22)
    for name in ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size"):
        f(name)
    with pytest.raises(ValueError, match=r"config\.json: the field 'residual_multiplier' = 0\.22 is not known"):
        f.check_all_read()
    f("residual_multiplier")
    f.check_all_read()


def test_special_tokens_and_ways_to_sample_have_no_effect(tmp_path: Path) -> None:
    f = fields(tmp_path, unk_token_id=0, temperature=0.7, do_sample=True, use_bfloat16=False, pruned_heads={})
    f.ignore(*LLAMA)
    f.check_all_read()


def test_quantised_weights_are_refused_like_any_unknown_field(tmp_path: Path) -> None:
    f = fields(tmp_path, quantization_config={"quant_method": "fp8"})
    f.ignore(*LLAMA)
    with pytest.raises(ValueError, match="quantization_config"):
        f.check_all_read()


def test_defaults_come_from_transformers_and_missing_fields_are_errors(tmp_path: Path) -> None:
    f = fields(tmp_path)
    assert f("rms_norm_eps") == 1e-6
    assert f("no_such_field", 7) == 7
    with pytest.raises(ValueError, match="'no_such_field' of a llama model is missing"):
        f("no_such_field")


def test_value_that_is_not_built_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"hidden_act of a llama model must be 'silu', got 'relu'"):
        fields(tmp_path, hidden_act="relu").must_be("hidden_act", "silu")


def test_kimi_has_deepseek_fields(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_k2", "n_group": 1, "kv_lora_rank": 20}))
    f = Fields(str(tmp_path))
    assert (f.model_type, f("kv_lora_rank"), f("n_group")) == ("kimi_k2", 20, 1)


def test_base_is_found_where_transformers_4_and_5_keep_it(tmp_path: Path) -> None:
    assert rope_parameters(fields(tmp_path, rope_theta=5e5))["rope_theta"] == 5e5
    new = {"rope_type": "default", "rope_theta": 1e6}
    assert rope_parameters(fields(tmp_path, rope_parameters=new))["rope_theta"] == 1e6


def test_plain_frequencies(tmp_path: Path) -> None:
    frequencies, share, factor = rotary_frequencies(fields(tmp_path, rope_theta=100.0), 4)
    torch.testing.assert_close(frequencies, torch.tensor([1.0, 0.1]))
    assert (share, factor) == (1.0, 1.0)


def test_llama3_scaling_slows_low_frequencies_only(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    f = fields(tmp_path, rope_theta=500000.0, rope_scaling=scaling)
    plain = 1.0 / 500000.0 ** (torch.arange(0, 12, 2) / 12)
    scaled, _, factor = rotary_frequencies(f, 12)
    torch.testing.assert_close(scaled[0], plain[0])
    torch.testing.assert_close(scaled[-1], plain[-1] / 8)
    assert factor == 1.0


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_depend_on_the_length_are_refused(tmp_path: Path, kind: str) -> None:
    scaling = {"rope_type": kind, "factor": 2.0, "short_factor": [1.0] * 6, "long_factor": [1.0] * 6}
    with pytest.raises(ValueError, match=f"rope_type '{kind}' is not supported"):
        rope_parameters(fields(tmp_path, rope_theta=1e4, rope_scaling=scaling))


def test_what_transformers_refuses_is_told_with_the_file(tmp_path: Path) -> None:
    for model_type, layers in (("banana", 2), ("qwen3", 99)):
        content = {"model_type": model_type, "num_hidden_layers": layers, "layer_types": ["full_attention"] * 2}
        with pytest.raises(ValueError, match=r"config\.json: transformers refuses it: \w+: .+"):
            fields(tmp_path, **content)


def test_rotary_fields_that_are_not_of_the_type_are_refused(tmp_path: Path) -> None:
    known = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    assert rope_parameters(fields(tmp_path, rope_parameters=known))["factor"] == 2.0
    for place in ("rope_parameters", "rope_scaling"):
        scaling = known | {"mrope_section": [1, 2, 3]}
        with pytest.raises(
            ValueError, match=rf"{place} has the field 'mrope_section' = \[1, 2, 3\].*rope_type 'linear'"
        ):
            rope_parameters(fields(tmp_path, rope_theta=1e4, **{place: scaling}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor of a llama model must be 1, got 0\.5"),
        ({"num_key_value_heads": 3}, "num_attention_heads must be a multiple of num_key_value_heads, got 4 and 3"),
        ({"num_key_value_heads": 8}, "num_attention_heads must be a multiple of num_key_value_heads, got 4 and 8"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be > 0, got 0"),
    ],
)
def test_shapes_and_rotary_shares_that_are_not_built_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    given = {"rope_theta": 1e4, "intermediate_size": 80, "num_key_value_heads": 2} | changes
    with pytest.raises(ValueError, match=rf"config\.json: {message}"):
        decoder(fields(tmp_path, **given))


def test_window_without_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"sliding_window must be > 0 or null, got 0"):
        window(fields(tmp_path, sliding_window=0))


@pytest.mark.parametrize("given", [{"mscale": 0.5}, {"mscale_all_dim": 1.0}])
def test_half_of_the_scales_of_yarn_is_refused_for_latent_attention(given: dict[str, float], tmp_path: Path) -> None:
    """DeepSeek's own code, and SGLang, take defaults for the other one; transformers drops both."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    f = fields(tmp_path, rope_parameters=yarn | {"mscale": 0.7, "mscale_all_dim": 0.7})
    assert _rope(f)["mscale_all_dim"] == 0.7
    assert _rope(fields(tmp_path, rope_parameters=yarn))["mscale"] == 1.0
    with pytest.raises(ValueError, match="must have both or neither"):
        _rope(fields(tmp_path, rope_parameters=yarn | given))
