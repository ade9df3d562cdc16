from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.hf_parity import hf_log_probs, same_weights
from benchmarks.tiny_models import SHAPE
from benchmarks.trainer_cases import make_batch, make_config, only_worker, open_worker

MODULE = "plugins.models.granite"
FLAGS = ("--model-conversion-path", f"{MODULE}:GraniteConversion", "--model-provider-path", f"{MODULE}:build")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from transformers import GraniteConfig, GraniteForCausalLM

    torch.manual_seed(0)
    factors = {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.1}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = GraniteForCausalLM(GraniteConfig(**SHAPE, **factors, **special, logits_scaling=0.5)).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.08)
    model.save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def test_family_from_a_plugin_computes_what_transformers_does(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    batch = make_batch()
    with open_worker(make_config(folder, *FLAGS)) as worker:
        want = hf_log_probs(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), batch)
        assert (worker.compute_log_probs(batch) - want).abs().max() < 1e-4
        assert worker.train(0, batch)["train/grad_norm"] > 0
        worker.conversion.load_weights(worker.state.models, str(folder))  # as they were before the update
        worker.save_hf(tmp_path / "out")
    assert same_weights(folder, tmp_path / "out")


def test_without_its_plugins_the_family_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="architecture 'granite' is not one of"):
        only_worker(make_config(folder))
    with pytest.raises(ValueError, match=r"needs --model-provider-path plugins\.models\.granite:build"):
        only_worker(make_config(folder, *FLAGS[:2]))
