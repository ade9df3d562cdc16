"""fp8 weights on their way: quantised one by one, and bit by bit at the other end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from test_receive import make
from tiny_checkpoint import quantize_checkpoint, write_tiny_checkpoint
from torch import Tensor

from slime_rl.config.quantization import Fp8Blocks
from slime_rl.data.fp8 import quantize_blocks
from slime_rl.trainer.hf_folder import HFFolder
from slime_rl.weight_sync.bucket import split_buckets
from slime_rl.weight_sync.files import DiskTransport
from slime_rl.weight_sync.quantize import EngineForm, quantized
from slime_rl.weight_sync.tensor import TensorTransport

BLOCKS = Fp8Blocks(rows=16, columns=16)


def stream(seed: int, step: float = 0.0) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(seed)
    weights = {"norm": torch.ones(40), "q_proj": torch.randn(40, 56, generator=source)}
    weights["q_proj"][:16, :8] += step
    return weights | {"embed": torch.randn(40, 8, generator=source)}


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_named_weights_become_fp8_followed_by_their_scales() -> None:
    found = list(quantized(stream(0).items(), BLOCKS, {"q_proj"}))
    assert [name for name, _ in found] == ["norm", "q_proj", "q_proj_scale_inv", "embed"]
    q, scale = quantize_blocks(stream(0)["q_proj"], 16, 16)
    sent = dict(found)
    assert torch.equal(bits(sent["q_proj"]), bits(q)) and torch.equal(sent["q_proj_scale_inv"], scale)
    assert sent["norm"].dtype == sent["embed"].dtype == torch.float32


def test_nothing_is_taken_ahead() -> None:
    taken = []

    def named() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in stream(0).items():
            taken.append(name)
            yield name, tensor

    made = quantized(named(), BLOCKS, {"q_proj"})
    for _ in range(3):
        next(made)
    assert taken == ["norm", "q_proj"]


def test_a_weight_that_is_not_finite_is_named() -> None:
    weights = stream(0)
    weights["q_proj"][3, 3] = torch.nan
    with pytest.raises(ValueError, match="weight q_proj: values must be finite to be stored as fp8, 1 of 2240 are not"):
        list(quantized(weights.items(), BLOCKS, {"q_proj"}))


@pytest.mark.parametrize("kind", ["tensor", "disk", "disk-delta"])
@pytest.mark.parametrize("max_bytes", [1, 1 << 20])
def test_every_bit_arrives(tmp_path: Path, kind: str, max_bytes: int) -> None:
    def transport(session):  # type: ignore[no-untyped-def]
        if kind == "tensor":
            return TensorTransport(session)
        return DiskTransport(session, tmp_path, deltas=kind == "disk-delta")

    sender, engines = make(transport, "http://a", "http://b")
    try:
        for version, step in enumerate((0.0, 1.0, 1.0, 7.0), 1):
            sent = dict(quantized(stream(1, step).items(), BLOCKS, {"q_proj"}))
            report = sender.send(split_buckets(sent.items(), max_bytes), version)
            assert report.failed == {} and report.num_tensors == 4
            if kind == "disk-delta" and version > 1:  # one block and its scale; nothing the third time
                assert report.changed_share * sum(t.numel() for t in sent.values()) <= 16 * 16 + 1
                assert (report.changed_share == 0) is (version == 3)
            for engine in engines.values():
                assert engine.weights.keys() == sent.keys()
                for name, tensor in sent.items():
                    assert engine.weights[name].dtype == tensor.dtype
                    assert torch.equal(bits(engine.weights[name]), bits(tensor)), name
    finally:
        sender.close()


def test_a_folder_sent_back_arrives_as_it_is_stored(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    form = {"modules_to_not_convert": ["model.layers.0.mlp", "lm_head"]}
    model = quantize_checkpoint(write_tiny_checkpoint(tmp_path / "model"), 48, 32, **form)
    folder, stored = HFFolder(model), load_file(model / "model.safetensors")
    sent = dict(EngineForm(str(model)).of((name, folder.tensor(name)) for name in folder.names))
    assert sent.keys() == stored.keys()
    assert sum(tensor.dtype == torch.float8_e4m3fn for tensor in sent.values()) == 2 * 4 + 3
    for name, tensor in sent.items():
        assert tensor.dtype == stored[name].dtype
        if name.endswith("_scale_inv"):
            assert torch.allclose(tensor, stored[name], rtol=2.0**-23, atol=0)
        else:
            assert torch.equal(bits(tensor), bits(stored[name]))


def test_a_plain_folder_changes_nothing(tmp_path: Path) -> None:
    model, named = write_tiny_checkpoint(tmp_path / "model"), iter([])
    assert EngineForm(str(model)).of(named) is named
