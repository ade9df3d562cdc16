"""One real worker in this process: parity with transformers, conversion, invariance, checkpoints, bad input."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.tiny_models import LLAMA3
from benchmarks.trainer_cases import make_batch, make_checkpoint, make_config, open_worker
from slime_rl.algorithms.batch import LossOutput
from slime_rl.data.batches import RolloutBatch
from slime_rl.data.ragged import Ragged
from slime_rl.trainer.torch_dist import TorchDistReader


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path)
    return path


def hf_log_probs(model: Any, batch: RolloutBatch) -> torch.Tensor:
    """Response log-probs by transformers, one unpadded sequence at a time."""
    rows = []
    for tokens, prompt in zip(batch.ragged("tokens").rows(), batch.dense("prompt_lengths").tolist(), strict=True):
        with torch.no_grad():
            log_p = model(tokens[None]).logits[0].float().log_softmax(-1)
        rows.append(log_p[:-1].gather(-1, tokens[1:, None])[prompt - 1 :, 0])
    return torch.cat(rows)


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [("qwen3", {}), ("qwen3", {"tie_word_embeddings": True}), ("qwen2", {}), ("llama", {}), ("qwen3_moe", {})],
)
def test_log_probs_and_weights_are_those_of_transformers(tmp_path: Path, kind: str, overrides: dict) -> None:
    model, batch = make_checkpoint(tmp_path / "hf", kind, num_hidden_layers=2, **overrides), make_batch()
    with open_worker(make_config(tmp_path / "hf")) as worker:
        log_probs = worker.compute_log_probs(batch)
        exported = dict(worker.export_weights())
        assert (log_probs - hf_log_probs(model, batch)).abs().max() < 1e-5
        on_disk = load_file(tmp_path / "hf" / "model.safetensors")
        assert exported.keys() == on_disk.keys()
        assert all(torch.equal(exported[name], on_disk[name]) for name in on_disk)


def test_temperature_divides_the_logits(model_path: Path) -> None:
    batch = make_batch()
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(model_path)
    model.lm_head.weight.data /= 0.5
    with open_worker(make_config(model_path, "--rollout-temperature", "0.5")) as worker:
        assert (worker.compute_log_probs(batch) - hf_log_probs(model, batch)).abs().max() < 1e-5


def shuffled(batch: RolloutBatch) -> RolloutBatch:
    return batch.select_rows(torch.randperm(len(batch), generator=torch.Generator().manual_seed(3)))


def same(batch: RolloutBatch) -> RolloutBatch:
    return batch


@pytest.mark.parametrize(
    "aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm", "prompt-mean-token-mean"]
)
def test_loss_and_gradient_do_not_depend_on_the_split(model_path: Path, aggregation: str) -> None:
    terms = ["--loss-aggregation", aggregation, "--entropy-coef", "0.1", "--max-response-len", "64"]
    splits: list[tuple[list[str], Callable[[RolloutBatch], RolloutBatch]]] = [
        (["--micro-batch-size", "12"], same),
        (["--micro-batch-size", "1"], same),
        (["--micro-batch-size", "2"], same),
        (["--micro-batch-size", "8"], same),
        (["--max-tokens-per-worker", "96"], same),
        (["--max-tokens-per-worker", "96"], shuffled),
    ]
    results = []
    with open_worker(make_config(model_path, *terms, "--lr", "0")) as worker:
        for flags, order in splits:
            worker.state.config = make_config(model_path, *terms, *flags)
            metrics = worker.train(0, order(make_batch()))
            results.append((metrics["train/loss"], metrics["train/grad_norm"]))
    for loss, norm in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-6)
        assert norm == pytest.approx(results[0][1], rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [("qwen3", {}), ("llama", {"rope_parameters": LLAMA3}), ("qwen3_moe", {}), ("mistral", {"sliding_window": 5})],
)
def test_shared_prompts_change_nothing(tmp_path: Path, kind: str, overrides: dict) -> None:
    make_checkpoint(tmp_path / "hf", kind, num_hidden_layers=2, **overrides)
    results = []
    for flags in (["--no-share-prompts"], []):
        terms = ["--entropy-coef", "0.1", "--lr", "0", "--max-tokens-per-worker", "200", *flags]
        with open_worker(make_config(tmp_path / "hf", *terms)) as worker:
            assert worker.state.shares_prompts == (not flags)
            log_probs, metrics = worker.compute_log_probs(make_batch()), worker.train(0, make_batch())
            gradient = torch.cat([p.main_grad.flatten() for p in worker.state.models[0].parameters()])
            results.append((log_probs, metrics["train/loss"], gradient))
    (log_probs, loss, gradient), shared = results
    assert (log_probs - shared[0]).abs().max() < 1e-5
    assert shared[1] == pytest.approx(loss, rel=1e-5)
    assert (gradient - shared[2]).norm() < 1e-5 * gradient.norm()


@pytest.mark.parametrize("flags", [("--megatron-moe-aux-loss-coeff", "0.01"), ("--megatron-moe-z-loss-coeff", "0.01")])
def test_router_losses_count_every_token_of_every_sample(tmp_path: Path, flags: tuple[str, ...]) -> None:
    make_checkpoint(tmp_path / "hf", "qwen3_moe", num_hidden_layers=1)
    with open_worker(make_config(tmp_path / "hf", *flags)) as worker:
        assert not worker.state.shares_prompts


@pytest.mark.parametrize(("name", "cap"), [("aux", "100000"), ("z", "100000"), ("z", "96")])
def test_router_losses_are_those_of_transformers_whatever_the_number_of_tokens(
    tmp_path: Path, name: str, cap: str
) -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    model = make_checkpoint(tmp_path / "hf", "qwen3_moe", num_hidden_layers=2)
    batch, gradients = make_batch(), []
    for coefficient in ("0", "0.01"):
        flags = ["--lr", "0", "--clip-grad", "0", "--no-share-prompts", "--max-tokens-per-worker", cap]
        flags += [f"--megatron-moe-{name}-loss-coeff", coefficient]
        with open_worker(make_config(tmp_path / "hf", *flags)) as worker:
            worker.train(0, batch)
            named = worker.state.models[0].named_parameters()
            gradients.append(torch.stack([p.main_grad.clone() for n, p in named if n.endswith("router.weight")]))
    sequences = [torch.tensor(tokens)[None] for tokens in batch.ragged("tokens").to_list()]
    logits = [model(tokens, output_router_logits=True).router_logits for tokens in sequences]
    layers = [torch.cat([of_sample[i].flatten(0, -2) for of_sample in logits]) for i in range(2)]
    z = torch.stack([torch.logsumexp(layer, -1).square().mean() for layer in layers]).sum()
    # Theirs sums over the 2 chosen experts.
    aux = torch.stack([torch.as_tensor(load_balancing_loss_func((layer,), 4, 2)) / 2 for layer in layers]).sum()
    gates = [p for n, p in model.named_parameters() if n.endswith("mlp.gate.weight")]
    expected = 0.01 * torch.stack(torch.autograd.grad(z if name == "z" else aux, gates))
    assert (gradients[1] - gradients[0] - expected).norm() < 1e-4 * expected.norm()


def test_supervised_loss_is_the_mean_negative_log_likelihood(model_path: Path) -> None:
    batch = make_batch(groups=6, samples=1)
    with open_worker(make_config(model_path, "--loss", "sft", groups=6, samples=1)) as worker:
        log_probs = worker.compute_log_probs(batch)
        first, *_, last = [worker.train(0, batch) for _ in range(6)]
    mask = batch.ragged("loss_mask").values
    assert first["train/loss"] == pytest.approx(float(-(log_probs * mask).sum() / mask.sum()), rel=1e-5)
    assert last["train/loss"] < first["train/loss"]


def test_gap_to_the_engine_is_reported_in_every_mode(model_path: Path) -> None:
    batch = make_batch()
    modes = ["auto", "recompute", "rollout"]
    with open_worker(make_config(model_path, "--lr", "0")) as worker:
        gap = (worker.compute_log_probs(batch) - batch.ragged("rollout_log_probs").values).abs()
        gap = gap[batch.ragged("loss_mask").values > 0]
        for mode in modes:
            worker.state.config = make_config(model_path, "--old-log-probs", mode)
            metrics = worker.train(0, batch)
            assert metrics["train/logprob_diff_mean_abs"] == pytest.approx(float(gap.mean()), rel=1e-6)
            assert metrics["train/logprob_diff_max_abs"] == pytest.approx(float(gap.max()), rel=1e-6)


def test_reference_log_probs_are_those_of_ref_load(model_path: Path, tmp_path: Path) -> None:
    other, batch = make_checkpoint(tmp_path / "ref", seed=5), make_batch()
    flags = ["--use-kl-loss", "--kl-loss-coef", "0.1", "--ref-load", str(tmp_path / "ref")]
    with open_worker(make_config(model_path, *flags)) as worker:
        policy = worker.compute_log_probs(batch)
        reference = worker.compute_log_probs(batch, "reference")
        assert (reference - hf_log_probs(other, batch)).abs().max() < 1e-5
        assert torch.equal(worker.compute_log_probs(batch), policy)  # swapped back to the last bit
        mean_gap = (policy - reference).abs().mean()
        assert mean_gap > 0.01


def test_export_is_a_folder_that_transformers_loads(model_path: Path, tmp_path: Path) -> None:
    import transformers

    batch = make_batch()
    (model_path / "chat_template.jinja").write_text("{{ messages }}")
    with open_worker(make_config(model_path, "--lr", "1e-2")) as worker:
        worker.train(0, batch)
        worker.save_hf(tmp_path / "export")
        worker.save_hf(tmp_path / "export")  # replaces the folder as a whole
        trained = worker.compute_log_probs(batch)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert (trained - hf_log_probs(model, batch)).abs().max() < 1e-5
    assert (tmp_path / "export" / "chat_template.jinja").read_text() == "{{ messages }}"
    assert json.loads((tmp_path / "export" / "config.json").read_text())["dtype"] == "float32"
    assert [p.name for p in tmp_path.iterdir()] == ["export"]  # nothing is left aside


def test_bfloat16_keeps_float32_master_weights(model_path: Path) -> None:
    with open_worker(make_config(model_path, "--train-dtype", "bfloat16", "--lr", "1e-6")) as worker:
        before = {name: tensor.clone() for name, tensor in worker.export_weights()}
        assert {tensor.dtype for tensor in before.values()} == {torch.bfloat16}
        metrics = worker.train(0, make_batch())
        masters = [p for g in worker.state.optimizer.param_groups for p in g["params"]]
        assert masters[0].dtype == torch.float32
        assert metrics["train/grad_norm"] > 0


def test_offloaded_state_comes_back_unchanged(model_path: Path) -> None:
    from slime_rl.trainer.offload import offload, onload

    batches = [make_batch(step) for step in range(2)]
    with open_worker(make_config(model_path)) as worker:
        worker.train(0, batches[0])
        parked = offload(worker.state)
        assert all(item.storage.nbytes() == 0 for item in parked)
        assert sum(item.size for item in parked) > 4 * sum(p.numel() for p in worker.state.models[0].parameters())
        onload(parked)
        with_break = worker.train(1, batches[1])
    with open_worker(make_config(model_path)) as worker:
        worker.train(0, batches[0])
        without = worker.train(1, batches[1])
    for name in ("train/loss", "train/grad_norm", "train/entropy"):
        assert with_break[name] == without[name]


SCHEDULES = {  # rates of 8 updates at --lr 1, --min-lr 0.1, 2 of them warm-up
    "constant": [0, 0.5, 1, 1, 1, 1, 1, 1],
    "linear": [0, 0.5, 1, 0.85, 0.7, 0.55, 0.4, 0.25],
    "cosine": [0, 0.5, 1, *(0.1 + 0.45 * (1 + math.cos(math.pi * k / 6)) for k in range(1, 6))],
    "inverse-square-root": [0, 0.5, 1, *((2 / k) ** 0.5 for k in range(3, 8))],
    "WSD": [0, 0.5, 1, 1, 1, 0.775, 0.55, 0.325],
}


@pytest.mark.parametrize("style", SCHEDULES)
def test_learning_rates_of_every_schedule(model_path: Path, style: str) -> None:
    flags = ["--lr-decay-style", style, "--lr", "1", "--min-lr", "0.1", "--lr-warmup-updates", "2", "--num-steps", "4"]
    if style == "WSD":
        flags += ["--lr-wsd-decay-updates", "4", "--lr-wsd-decay-style", "linear"]
    with open_worker(make_config(model_path, *flags, "--num-updates-per-rollout", "2")) as worker:
        from slime_rl.trainer.optimizer import learning_rate

        scheduler, optimizer = worker.state.scheduler, worker.state.optimizer
        rates = []
        for _ in range(8):
            rates.append(learning_rate(optimizer))
            scheduler.step(1)
    assert rates == pytest.approx(SCHEDULES[style])


class ChangingMetrics:
    """A loss whose metrics are others in every second micro-batch."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, config: Any, batch: Any) -> Any:
        self.calls += 1
        metrics = {"own": batch.mask} if self.calls % 2 else {}
        return LossOutput(loss=-batch.advantages * batch.log_probs, metrics=metrics)


changing_metrics = ChangingMetrics()


def test_metrics_of_some_micro_batches_are_refused(model_path: Path) -> None:
    config = make_config(model_path, "--policy-loss", "test_train_worker:changing_metrics", "--micro-batch-size", "2")
    with open_worker(config) as worker, pytest.raises(ValueError, match="metrics must have the same names for every"):
        worker.train(0, make_batch())


def longest_log_prob(config: Any, batch: Any) -> Any:
    return LossOutput(loss=-batch.advantages * batch.log_probs, metrics={"steps_max": -1.0 - batch.mask * COUNT.pop()})


COUNT = [5.0, 1.0]


def test_maxima_of_a_step_are_over_its_updates(model_path: Path) -> None:
    flags = ["--policy-loss", "test_train_worker:longest_log_prob", "--num-updates-per-rollout", "2"]
    flags += ["--max-tokens-per-worker", "4096"]
    with open_worker(make_config(model_path, *flags)) as worker:
        assert worker.train(0, make_batch(updates=2))["train/steps_max"] == -2.0


def with_log_prob(batch: RolloutBatch, sample: int, value: float) -> RolloutBatch:
    """The same with every token trained on, and another number at the first token of a sample."""
    field = batch.ragged("rollout_log_probs")
    values = field.values.clone()
    values[int(field.offsets[sample])] = value
    changed = {
        "rollout_log_probs": Ragged(values, field.offsets),
        "loss_mask": Ragged(torch.ones_like(values), field.offsets),
    }
    return RolloutBatch({**batch.tensors, **changed}, None, batch.meta_info)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    "flags",
    [
        "--old-log-probs rollout",
        "--old-log-probs recompute",
        "--off-policy-correction icepop",
        "--off-policy-correction tis_token",
        "--off-policy-correction mis_sequence",
        "--policy-loss decoupled_ppo --old-log-probs recompute",
        "--policy-loss cispo --advantage-estimator reinforce_plus_plus",
        "--policy-loss gspo",
    ],
)
def test_a_number_that_is_not_finite_stops_the_step(model_path: Path, tmp_path: Path, flags: str, value: float) -> None:
    from slime_rl.trainer.loss import NonFiniteError

    bad = with_log_prob(make_batch(step=4), 5, value)
    with open_worker(make_config(model_path, *flags.split(), "--run-dir", str(tmp_path))) as worker:
        before = {name: tensor.clone() for name, tensor in worker.export_weights()}
        place = r"step 4, epoch 0, update 0.*rollout_log_probs in micro-batch \d+ .*samples \[5\]"
        with pytest.raises(NonFiniteError, match=place):
            worker.train(4, bad)
        assert all(torch.equal(before[name], tensor) for name, tensor in worker.export_weights())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--megatron-virtual-pipeline-model-parallel-size", "3"], "virtual|interleaved"),
        (["--lr-decay-style", "cosine", "--lr-warmup-updates", "9", "--lr-decay-updates", "5"], "--lr-warmup-updates"),
    ],
)
def test_flags_that_cannot_work_are_refused(model_path: Path, flags: list[str], message: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=message), open_worker(make_config(model_path, *flags)):
        pass


def test_weight_without_a_place_is_refused(model_path: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    make_checkpoint(tmp_path / "more", "llama", num_hidden_layers=2)
    save_file({"model.layers.1.self_attn.o_proj.bias": torch.ones(48)}, tmp_path / "more" / "extra.safetensors")
    message = r"no place in the Megatron model of a llama, such as .*o_proj\.bias"
    with pytest.raises(ValueError, match=message), open_worker(make_config(tmp_path / "more")):
        pass
    make_checkpoint(tmp_path / "biased", "llama", attention_bias=True, num_hidden_layers=2)
    message = "attention_bias and mlp_bias must be equal, got True and False"
    with pytest.raises(ValueError, match=message), open_worker(make_config(tmp_path / "biased")):
        pass


def test_background_save_holds_the_weights_of_its_moment_and_resumes_exactly(model_path: Path, tmp_path: Path) -> None:
    batches = [make_batch(step) for step in range(3)]
    with open_worker(make_config(model_path)) as worker:
        worker.train(0, batches[0])
        worker.save(tmp_path / "sync", 1, {"cursor": 1})
        worker.begin_save(tmp_path / "async", 1, {"cursor": 1})
        whole = [worker.train(step, batches[step]) for step in (1, 2)]  # while the thread writes
        worker.finish_save()
        assert worker.save_is_written()
    a, b = TorchDistReader(tmp_path / "sync"), TorchDistReader(tmp_path / "async")
    assert sorted(a.keys) == sorted(b.keys)
    assert all(torch.equal(a.read(key), b.read(key)) for key in a.keys)
    with open_worker(make_config(model_path)) as worker:
        assert worker.load(tmp_path / "async") == {"step": 1, "extra": {"cursor": 1}}
        resumed = [worker.train(step, batches[step]) for step in (1, 2)]
    for name in ("train/loss", "train/grad_norm", "train/lr"):
        assert [m[name] for m in resumed] == [m[name] for m in whole]


@pytest.mark.parametrize("file", ["random_0.pt", "__0_0.distcp"])
def test_a_disk_without_room_is_an_error_that_names_it(model_path: Path, tmp_path: Path, file: str) -> None:
    for name in ("sync", "async"):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).symlink_to("/dev/full")
    message = "worker 0 could not write its part of the checkpoint: OSError.*No space left on device"
    with open_worker(make_config(model_path)) as worker:
        worker.train(0, make_batch())
        with pytest.raises(OSError, match=message):
            worker.save(tmp_path / "sync", 1, {})
        with pytest.raises(OSError, match=message):
            worker.begin_save(tmp_path / "async", 1, {})
            worker.train(1, make_batch(1))
            worker.finish_save()
        worker.save(tmp_path / "again", 1, {})
    assert (tmp_path / "again" / "metadata.json").is_file()


def _fail_on_rank_1(rank: int, rendezvous: Path) -> None:
    import torch.distributed as dist

    from slime_rl.trainer.pending_save import raise_on_all

    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    raise_on_all(None)
    try:
        raise_on_all(OSError("no room") if rank == 1 else None)
    except OSError as error:
        (rendezvous.parent / f"rank_{rank}").write_text(str(error))
    dist.destroy_process_group()


def test_where_one_worker_could_not_write_all_raise(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_fail_on_rank_1, (tmp_path / "rendezvous",), nprocs=2)
    said = {path.name: path.read_text() for path in tmp_path.glob("rank_*")}
    assert said == {
        f"rank_{i}": "worker 1 could not write its part of the checkpoint: OSError: no room" for i in (0, 1)
    }


def test_the_optimizer_state_of_a_save_is_what_megatron_gathers(model_path: Path) -> None:
    with open_worker(make_config(model_path)) as worker:
        from megatron.core.dist_checkpointing.dict_utils import nested_values

        from slime_rl.trainer import checkpoint  # both need the stand-ins of a worker
        from slime_rl.trainer.optimizer_state import gathered_directly

        worker.train(0, make_batch())
        state = worker.state
        models = {"model": checkpoint._sharded_model(state, state.models[0])}

        def saved() -> dict[str, torch.Tensor]:
            content = state.optimizer.sharded_state_dict(dict(models), metadata=checkpoint._metadata(state))
            return {one.key: one.data for one in nested_values(content["param_state"]) if hasattr(one, "data")}

        theirs = saved()
        with gathered_directly(state.optimizer):
            ours = saved()
    assert len(ours) > 30
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_resumed_run_follows_its_own_optimizer_flags(model_path: Path, tmp_path: Path) -> None:
    def group_after(steps: list[int], *flags: str, load: bool = False) -> dict[str, Any]:
        schedule = ["--num-steps", "10", "--lr-decay-style", "linear"]
        with open_worker(make_config(model_path, *schedule, *flags)) as worker:
            if load:
                worker.load(tmp_path)
            for step in steps:
                worker.train(step, make_batch(step))
            if not load:
                worker.save(tmp_path, 1, {})
            return {name: value for name, value in worker.state.optimizer.param_groups[0].items() if name != "params"}

    changed = ["--lr", "1e-4", "--min-lr", "1e-5", "--weight-decay", "0.3"]
    changed += ["--adam-beta1", "0.8", "--adam-beta2", "0.9", "--adam-eps", "1e-6"]
    expected = group_after([0, 1], *changed)  # as if they had been its flags all along
    group_after([0], "--lr", "1e-3", "--weight-decay", "0.1")
    assert group_after([1], *changed, load=True) == expected


def test_what_was_frozen_cannot_train_after_a_resume_and_the_flag_is_named(model_path: Path, tmp_path: Path) -> None:
    with open_worker(make_config(model_path, "--freeze-params", "embedding", "norm")) as worker:
        worker.save(tmp_path, 1, {})
    with open_worker(make_config(model_path, "--freeze-params", "norm", "word_embeddings", "layers.0")) as worker:
        assert worker.load(tmp_path)["step"] == 1
    with (
        open_worker(make_config(model_path, "--freeze-params", "norm")) as worker,
        pytest.raises(ValueError, match=r"--freeze-params embedding norm, this run has norm; embedding\.word"),
    ):
        worker.load(tmp_path)


def test_weights_alone_are_taken_from_a_checkpoint(model_path: Path, tmp_path: Path) -> None:
    batch = make_batch()
    with open_worker(make_config(model_path)) as worker:
        fresh = worker.train(0, batch)
        trained = worker.compute_log_probs(batch)
        worker.save(tmp_path / "saved", 1, {})
    with open_worker(make_config(model_path)) as worker:
        worker.load_weights(tmp_path / "saved")
        assert torch.equal(worker.compute_log_probs(batch), trained)
        again = worker.train(0, batch)
        with pytest.raises(ValueError, match=r"--load: .* holds no training checkpoint"):
            worker.load_weights(tmp_path / "nothing")
    assert again["train/lr"] == fresh["train/lr"]


def test_checkpoint_of_another_model_is_refused(model_path: Path, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "wider", intermediate_size=96)
    with open_worker(make_config(model_path)) as worker:
        worker.train(0, make_batch())
        worker.save(tmp_path / "saved", 1, {})
    message = "does not fit the model of --hf-checkpoint"
    with pytest.raises(ValueError, match=message) as caught, open_worker(make_config(tmp_path / "wider")) as worker:
        worker.load_weights(tmp_path / "saved")
    assert "linear_fc" in str(caught.value) and "Traceback" not in str(caught.value) and len(str(caught.value)) < 600


def test_optimizer_of_experts_is_refused_on_another_split_and_says_what_to_do() -> None:
    from slime_rl.trainer.checkpoint import check_expert_split

    check_expert_split([2, 1], [2, 1], Path("c"))
    check_expert_split(None, None, Path("c"))
    with pytest.raises(ValueError, match=r"saved with --expert-model-parallel-size 2 .*this run has 1 .*--finetune"):
        check_expert_split([2, 1], [1, 1], Path("c"))
