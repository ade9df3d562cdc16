from __future__ import annotations

from types import SimpleNamespace

import pytest

from slime_rl.trainer.rope import rope_arguments


def test_base_is_found_where_transformers_4_and_5_keep_it() -> None:
    assert rope_arguments(SimpleNamespace(model_type="x", rope_theta=5e5)) == {"rotary_base": 5e5}
    new = SimpleNamespace(model_type="x", rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    assert rope_arguments(new) == {"rotary_base": 1e6}


def test_linear_and_llama3_scaling_are_passed_on() -> None:
    linear = SimpleNamespace(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4})
    assert rope_arguments(linear) == {"rotary_base": 1e4, "seq_len_interpolation_factor": 4.0}
    llama3 = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 5e5,
    }
    want = {"rotary_base": 5e5, "rope_scaling": True, "rope_scaling_factor": 32.0}
    assert rope_arguments(SimpleNamespace(rope_parameters=llama3)) == want


@pytest.mark.parametrize("parameters", [{"rope_type": "yarn"}, {"rope_type": "llama3", "low_freq_factor": 2.0}])
def test_scaling_that_megatron_computes_differently_is_refused(parameters: dict) -> None:
    with pytest.raises(ValueError, match="rope_type"):
        rope_arguments(SimpleNamespace(rope_parameters={"rope_theta": 1e4, "factor": 2.0, **parameters}))


def test_missing_base_is_an_error() -> None:
    with pytest.raises(ValueError, match="no rope_theta"):
        rope_arguments(SimpleNamespace(model_type="x"))
