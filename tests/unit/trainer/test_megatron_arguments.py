from __future__ import annotations

from pathlib import Path

import pytest
from factories import make_config

from slime_rl.trainer.checks import check_megatron_args


def parse(*args: str) -> tuple[dict, dict, dict]:
    from slime_rl.trainer.cpu import proxy

    proxy.install(without_cuda=True)
    from slime_rl.trainer.arguments import parse_megatron_args

    parsed = parse_megatron_args(args)
    return parsed.transformer, parsed.optimizer, parsed.ddp


def test_values_take_the_types_of_megatrons_fields() -> None:
    transformer, optimizer, ddp = parse(
        *("--moe-aux-loss-coeff", "0.5", "--recompute-granularity", "full", "--recompute-num-layers", "2"),
        *("--overlap-grad-reduce", "--bucket-size", "1000", "--log-num-zeros-in-grad", "true"),
    )
    assert transformer == {"moe_aux_loss_coeff": 0.5, "recompute_granularity": "full", "recompute_num_layers": 2}
    assert optimizer == {"log_num_zeros_in_grad": True}
    assert ddp == {"overlap_grad_reduce": True, "bucket_size": 1000}


def test_equals_sign_and_none_are_understood() -> None:
    assert parse("--recompute-num-layers=none")[0] == {"recompute_num_layers": None}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--recompute-granularty", "full"), "did you mean --megatron-recompute-granularity"),
        (("--recompute-num-layers", "two"), "takes int or NoneType, got 'two'"),
        (("--recompute-num-layers",), "got 'nothing'"),
        (("--lr", "1"), "is set by --lr"),
        (("--hidden-size", "8"), "the shape comes from --hf-checkpoint"),
        (("--optimizer", "sgd"), "it is adam"),
        (("--use-precision-aware-optimizer", "true"), "needs Transformer Engine's optimizer; this run trains on CPU"),
        (("--optimizer-cpu-offload",), "needs a GPU to offload from; this run trains on CPU"),
    ],
)
def test_wrong_flags_say_what_is_wrong(tmp_path: Path, args: tuple[str, ...], message: str) -> None:
    config = make_config(tmp_path, "--device", "cpu", f"--megatron-{args[0].removeprefix('--')}", *args[1:])
    with pytest.raises(ValueError, match=message):
        check_megatron_args(config)
