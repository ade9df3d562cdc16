"""convert_hf_to_torch_dist, convert_torch_dist_to_hf and compare_checkpoints on tiny models, in this process."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.hf_parity import same_weights
from benchmarks.tiny_models import SHAPE, make_checkpoint, make_named
from slime_rl.cluster.checkpoint import hold_folder
from slime_rl.cluster.folders import told
from slime_rl.trainer.convert_part import check_stop, run_workers
from tools import compare_checkpoints, convert_hf_to_torch_dist, convert_torch_dist_to_hf

SLOW = """
import sys, time
sys.path.insert(0, {root!r})
from slime_rl.cluster.signals import run_command
from slime_rl.data import write_behind
from tools import {tool}

write_behind.WriteBehind.advance = lambda self: time.sleep(0.2)  # after each tensor
run_command({tool}.main)
"""


def to_dist(hf: Path, save: Path, *flags: str) -> int:
    return convert_hf_to_torch_dist.main(["--hf-checkpoint", str(hf), "--save", str(save), *flags])


def to_hf(source: Path, output: Path, *flags: str) -> int:
    return convert_torch_dist_to_hf.main(["--input-dir", str(source), "--output-dir", str(output), *flags])


@pytest.mark.parametrize(
    "name",
    ["Llama 3 (scaled rotary)", "Qwen2-MoE (gated shared expert)", "GLM-4", "DeepSeek-V3 with MTP layer", "OLMo 2"],
)
def test_round_trip_is_bitwise_and_carries_every_other_file(name: str, tmp_path: Path) -> None:
    make_named(tmp_path / "hf", name)
    others = {"tokenizer.json": "{}", "chat_template.jinja": "x", "modeling_custom.py": "y = 1\n"}
    others["additional_chat_templates/rag.jinja"] = "z"
    (tmp_path / "hf" / "additional_chat_templates").mkdir()
    for file, text in others.items():
        (tmp_path / "hf" / file).write_text(text)
    assert to_dist(tmp_path / "hf", tmp_path / "dist") == 0
    assert to_hf(tmp_path / "dist", tmp_path / "out", "--shard-size-gb", "0.0001") == 0
    assert same_weights(tmp_path / "hf", tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    shards = sorted(tmp_path.glob("out/model-*.safetensors"))
    assert set(index["weight_map"].values()) == {shard.name for shard in shards}
    assert index["metadata"]["total_size"] == sum(t.nbytes for s in shards for t in load_file(s).values())
    assert all((tmp_path / "out" / file).read_text() == text for file, text in others.items())
    assert compare_checkpoints.main([str(tmp_path / "hf"), str(tmp_path / "dist")]) == 0


def test_types_are_kept_or_changed_by_flag(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "hf", "qwen3", num_hidden_layers=1)
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    norm = "model.norm.weight"
    mixed = {n: t if n == norm else t.bfloat16() for n, t in weights.items()}
    save_file(mixed, tmp_path / "hf" / "model.safetensors")
    assert to_dist(tmp_path / "hf", tmp_path / "dist") == 0
    assert to_hf(tmp_path / "dist", tmp_path / "same") == 0
    assert to_hf(tmp_path / "dist", tmp_path / "half", "--dtype", "float16") == 0
    same = load_file(tmp_path / "same" / "model.safetensors")
    assert same[norm].dtype == torch.float32 and same["lm_head.weight"].dtype == torch.bfloat16
    assert all(torch.equal(same[n], t) for n, t in mixed.items())
    assert {t.dtype for t in load_file(tmp_path / "half" / "model.safetensors").values()} == {torch.float16}
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "float16"


def test_two_workers_write_what_one_does(tmp_path: Path) -> None:
    make_named(tmp_path / "hf", "Qwen3-MoE")
    assert to_dist(tmp_path / "hf", tmp_path / "dist", "--num-workers", "2") == 0
    assert len(list((tmp_path / "dist").glob("step_*/model/*.distcp"))) == 2
    assert to_hf(tmp_path / "dist", tmp_path / "out", "--num-workers", "2", "--shard-size-gb", "0.0001") == 0
    assert same_weights(tmp_path / "hf", tmp_path / "out")


def test_differences_are_told_with_name_and_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path / "a", "qwen3", num_hidden_layers=1)
    make_checkpoint(tmp_path / "b", "qwen3", num_hidden_layers=1)
    weights = load_file(tmp_path / "b" / "model.safetensors")
    weights["model.norm.weight"][3] += 0.5
    weights["more"] = weights.pop("model.layers.0.self_attn.q_norm.weight")
    save_file(weights, tmp_path / "b" / "model.safetensors")
    assert compare_checkpoints.main([str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    out = capsys.readouterr().out
    assert "only in A: 1, first model.layers.0.self_attn.q_norm.weight" in out
    assert "only in B: 1, first more" in out
    assert "different: 1, first model.norm.weight" in out
    assert out.splitlines()[-1].endswith("max_abs_diff=0.5 bitwise=no")
    assert compare_checkpoints.main([str(tmp_path / "a"), str(tmp_path / "nothing")]) == 2


def test_bad_input_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path / "hf", "qwen3", num_hidden_layers=1)
    make_checkpoint(tmp_path / "wider", "qwen3", num_hidden_layers=1, intermediate_size=96)
    assert to_dist(tmp_path / "hf", tmp_path / "dist") == 0
    assert to_dist(tmp_path / "hf", tmp_path / "dist") == 2
    assert "exists already" in capsys.readouterr().err
    assert to_hf(tmp_path / "dist", tmp_path / "out", "--origin-hf-dir", str(tmp_path / "wider")) == 2
    assert "checkpoint of another model" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert to_hf(tmp_path / "hf", tmp_path / "out") == 2
    (tmp_path / "hf" / "model.safetensors").write_bytes(b"cut")
    assert to_dist(tmp_path / "hf", tmp_path / "again") == 2
    assert "must be a whole safetensors file" in capsys.readouterr().err
    assert not list(tmp_path.glob("again/step_*"))


def test_path_of_a_model_may_hold_any_character(tmp_path: Path) -> None:
    """A comma and an @ mean something in --prompt-data."""
    model = tmp_path / "a, b@[1:2]"
    make_checkpoint(model, "llama", num_hidden_layers=1)
    assert to_dist(model, tmp_path / "dist") == 0
    assert compare_checkpoints.main([str(model), str(tmp_path / "dist")]) == 0


@pytest.mark.parametrize("name", ["Qwen3-MoE", "DeepSeek-V3 with MTP layer"])
def test_mixed_types_keep_every_value(name: str, tmp_path: Path) -> None:
    """Gate and up projection, and all experts of a layer, are one key in torch_dist, which has one type."""
    make_named(tmp_path / "hf", name)
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    mixed = {n: weights[n].to(kinds[i % 3]) for i, n in enumerate(sorted(weights))}
    save_file(mixed, tmp_path / "hf" / "model.safetensors")
    assert to_dist(tmp_path / "hf", tmp_path / "dist") == 0
    assert to_hf(tmp_path / "dist", tmp_path / "out") == 0
    back = load_file(tmp_path / "out" / "model.safetensors")
    for n, tensor in mixed.items():
        assert torch.equal(back[n].double(), tensor.double()), n


def test_values_that_float16_does_not_hold_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path / "hf", "qwen3", num_hidden_layers=1)
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    weights["model.norm.weight"][3] = 70000.0
    save_file(weights, tmp_path / "hf" / "model.safetensors")
    assert to_dist(tmp_path / "hf", tmp_path / "dist") == 0
    assert to_hf(tmp_path / "dist", tmp_path / "out", "--dtype", "float16") == 2
    assert "--dtype float16: model.norm.weight has values up to 70000" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_damaged_checkpoint_is_neither_converted_nor_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint(tmp_path / "hf", "qwen3", num_hidden_layers=1)
    assert to_dist(tmp_path / "hf", tmp_path / "dist") == 0
    data = min(tmp_path.glob("dist/step_*/model/*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 0x40
    data.write_bytes(bytes(content))
    for named in (tmp_path / "dist", data.parent.parent, data.parent):
        assert to_hf(named, tmp_path / "out") == 2
        assert f"--input-dir {data.parent.parent}: model/{data.name} is damaged" in capsys.readouterr().err
    assert compare_checkpoints.main([str(tmp_path / "hf"), str(tmp_path / "dist")]) == 2
    assert f"B {data.parent.parent}: model/{data.name} is damaged" in capsys.readouterr().err


def test_force_replaces_nothing_that_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path / "hf", "qwen3", num_hidden_layers=1)
    dist = tmp_path / "run" / "checkpoints"
    assert to_dist(tmp_path / "hf", dist) == 0
    step = dist / "step_00000000"
    for output in (tmp_path / "run", dist, step, step / "model"):
        assert to_hf(dist, output, "--force") == 2
        assert f"--output-dir {output} would replace" in capsys.readouterr().err
    assert to_hf(dist, tmp_path / "hf", "--force", "--origin-hf-dir", str(tmp_path / "hf")) == 2
    (tmp_path / "file").write_text("")
    assert to_hf(dist, tmp_path / "file", "--force") == 2
    assert compare_checkpoints.main([str(tmp_path / "hf"), str(dist)]) == 0


@pytest.mark.parametrize("size", ["nan", "inf", "0", "-1"])
def test_shard_size_must_be_a_size(size: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert to_hf(tmp_path, tmp_path / "out", f"--shard-size-gb={size}") == 2
    assert "--shard-size-gb must be" in capsys.readouterr().err


def test_a_shard_of_any_size_may_be_asked_for(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "hf", "qwen3", num_hidden_layers=1)
    assert to_dist(tmp_path / "hf", tmp_path / "dist") == 0
    for size, name in (("1e300", "model.safetensors"), ("1e-12", "model-00001-of-*.safetensors")):
        assert to_hf(tmp_path / "dist", tmp_path / size, "--shard-size-gb", size) == 0
        assert len(list((tmp_path / size).glob(name))) == 1
        assert same_weights(tmp_path / "hf", tmp_path / size)


@pytest.mark.parametrize("output", [".", "..", "link"])
def test_an_output_that_cannot_take_its_place_is_refused_before_the_work(
    output: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path / "in" if output == ".." else tmp_path)
    assert to_hf(tmp_path / "missing", Path(output), "--force") == 2
    assert f"--output-dir {output} is a link to" in (message := capsys.readouterr().err) or (
        f"--output-dir must be a folder with a name, got {output}" in message
    )


@pytest.mark.parametrize("text", ["{", "[]", "null", ""])
def test_a_broken_config_is_named_when_checkpoints_are_compared(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint(tmp_path / "hf", "qwen3", num_hidden_layers=1)
    (tmp_path / "hf" / "config.json").write_text(text)
    assert compare_checkpoints.main([str(tmp_path / "hf"), str(tmp_path / "hf")]) == 2
    assert str(tmp_path / "hf" / "config.json") in capsys.readouterr().err


def test_two_conversions_do_not_write_into_one_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path / "hf", "qwen3", num_hidden_layers=1)
    with hold_folder("--save", tmp_path / "dist"):
        assert to_dist(tmp_path / "hf", tmp_path / "dist") == 2
    assert "another process is writing to it" in capsys.readouterr().err
    (tmp_path / "dist" / "step_00000000.partial" / "model").mkdir(parents=True)  # of a conversion that was killed
    assert to_dist(tmp_path / "hf", tmp_path / "dist") == 0
    assert [path.name for path in sorted((tmp_path / "dist").iterdir())] == ["latest", "step_00000000"]


def test_what_one_worker_raises_ends_a_conversion_and_torch_is_as_before() -> None:
    before = torch.get_num_threads(), torch.serialization.get_crc32_options()
    with pytest.raises(ValueError, match="the matrix of worker 1 is damaged"):
        run_workers(fail_on_one, [0, 1])
    assert (torch.get_num_threads(), torch.serialization.get_crc32_options()) == before


def fail_on_one(rank: int, share: int, stop: threading.Event) -> int:
    if share == 1:
        raise ValueError(f"the matrix of worker {rank} is damaged")
    return share


def test_workers_stop_with_the_one_that_fails_and_its_error_is_told() -> None:
    others_began = threading.Barrier(3)

    def work(rank: int, share: int, stop: threading.Event) -> None:
        others_began.wait(10)
        if rank == 2:
            raise ValueError("the matrix of worker 2 is damaged")
        assert stop.wait(10), "nobody says that the conversion has failed"
        check_stop(stop)

    with pytest.raises(ValueError, match="the matrix of worker 2 is damaged"):
        run_workers(work, [0, 1, 2])


def test_an_interrupt_stops_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[bool] = []

    def interrupted(running: list[object], return_when: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("slime_rl.trainer.convert_part.wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_workers(lambda rank, share, stop: stopped.append(stop.wait(10)), [0, 1])
    assert stopped == [True, True]


def test_infinities_and_stored_tied_output_layers_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weight = torch.tensor([float("inf"), 1.0, float("nan")])
    for name, more in (("a", {"lm_head.weight": weight.nan_to_num(0)}), ("b", {})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        content = {"model.embed_tokens.weight": weight.nan_to_num(0), "w": weight + 0.5 * (name == "b"), **more}
        save_file({n: t.clone() for n, t in content.items()}, tmp_path / name / "model.safetensors")
    paths = [str(tmp_path / name) for name in "ab"]
    assert compare_checkpoints.main(paths) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "different: tensors=2 max_abs_diff=0.5 bitwise=no"
    assert compare_checkpoints.main([*paths, "--tolerance", "0.5"]) == 0
    for tolerance in ("nan", "-1"):
        assert compare_checkpoints.main([*paths, f"--tolerance={tolerance}"]) == 2


def test_signs_of_zero_and_large_whole_numbers_are_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def last_line(**b: torch.Tensor) -> str:
        a = {"zero": torch.zeros(2), "whole": torch.tensor([2**60, 5])}
        for name, content in (("a", a), ("b", {**a, **b})):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "config.json").write_text("{}")
            save_file(content, tmp_path / name / "model.safetensors")
        compare_checkpoints.main([str(tmp_path / "a"), str(tmp_path / "b")])
        return capsys.readouterr().out.splitlines()[-1]

    assert last_line() == "same: tensors=2 max_abs_diff=0 bitwise=yes"
    assert last_line(zero=-torch.zeros(2)) == "same: tensors=2 max_abs_diff=0 bitwise=no"
    assert last_line(whole=torch.tensor([2**60 + 1, 5])) == "different: tensors=2 max_abs_diff=1 bitwise=no"
    assert last_line(whole=torch.tensor([-(2**63), 5])) == "different: tensors=2 max_abs_diff=1.04e+19 bitwise=no"


@pytest.mark.parametrize(
    ("a", "b", "gap"),
    [
        (torch.tensor([2**63 - 1]), torch.tensor([-1]), "9.22e+18"),  # their difference is no int64
        (torch.tensor([1 + 1j]), torch.tensor([1 + 2j]), "1"),
        (torch.tensor([0.25 + 1j]), torch.tensor([0.75 + 1j]), "0.5"),
        (torch.tensor([2**64 - 1], dtype=torch.uint64), torch.tensor([0], dtype=torch.uint64), "1.84e+19"),
    ],
)
def test_numbers_of_every_type_that_differ_are_different(
    a: torch.Tensor, b: torch.Tensor, gap: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("a", a), ("b", b)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        save_file({"w": value}, tmp_path / name / "model.safetensors")
    assert compare_checkpoints.main([str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == f"different: tensors=1 max_abs_diff={gap} bitwise=no"


def test_a_wrong_origin_is_told_with_its_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare_checkpoints.main([str(tmp_path), str(tmp_path), "--origin-hf-dir", str(tmp_path / "no")]) == 2
    assert "--origin-hf-dir must be a folder that exists" in capsys.readouterr().err


def test_model_of_a_plugin_is_converted(tmp_path: Path) -> None:
    from transformers import GraniteConfig, GraniteForCausalLM

    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    GraniteForCausalLM(GraniteConfig(**SHAPE | {"num_hidden_layers": 1}, **special)).save_pretrained(tmp_path / "hf")
    module = "plugins.models.granite"
    flags = ["--model-conversion-path", f"{module}:GraniteConversion", "--model-provider-path", f"{module}:build"]
    assert to_dist(tmp_path / "hf", tmp_path / "dist", *flags) == 0
    assert to_hf(tmp_path / "dist", tmp_path / "out", *flags) == 0
    assert same_weights(tmp_path / "hf", tmp_path / "out")
    assert compare_checkpoints.main([str(tmp_path / "dist"), str(tmp_path / "out"), *flags]) == 0


def test_a_folder_that_cannot_be_written_to_is_named_with_its_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_named(tmp_path / "hf", "GLM-4")
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    (tmp_path / "file").write_text("x")
    assert to_dist(tmp_path / "hf", tmp_path / "file" / "x") == 2
    assert "--save must be a folder, or be inside one" in capsys.readouterr().err
    assert to_dist(tmp_path / "hf", tmp_path / "dist") == 0
    assert to_hf(tmp_path / "dist", tmp_path / "file" / "x") == 2
    assert "--output-dir must be a folder, or be inside one" in capsys.readouterr().err


def test_a_full_disk_is_told_with_the_flag_of_the_output() -> None:
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert told(error, "--save", Path("out")) == "--save out: No space left on device"
    missing = FileNotFoundError(errno.ENOENT, "No such file or directory", "in/x")
    assert "'in/x'" in told(missing, "--save", Path("out"))


TOOLS = {tool.__name__.split(".")[-1]: tool for tool in (convert_hf_to_torch_dist, convert_torch_dist_to_hf)}


def ended_while_writing(tool: str, number: signal.Signals, tmp_path: Path) -> tuple[int, str, list[str]]:
    """Exit code, stderr and arguments of a conversion to `tmp_path`/out/it that got a signal."""
    make_checkpoint(tmp_path / "hf", "qwen3", num_hidden_layers=1)
    assert to_dist(tmp_path / "hf", tmp_path / "dist") == 0
    flags = {
        "convert_hf_to_torch_dist": f"--hf-checkpoint {tmp_path}/hf --save {tmp_path}/out/it",
        "convert_torch_dist_to_hf": f"--input-dir {tmp_path}/dist --output-dir {tmp_path}/out/it",
    }[tool].split()
    (tmp_path / "slow.py").write_text(SLOW.format(root=str(Path(__file__).resolve().parents[3]), tool=tool))
    running = subprocess.Popen(
        [sys.executable, str(tmp_path / "slow.py"), *flags],
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    deadline = time.monotonic() + 60
    while not any(tmp_path.glob("out/**/*.distcp")) and not any(tmp_path.glob("out/.*/**/*.safetensors")):
        assert time.monotonic() < deadline and running.poll() is None
        time.sleep(0.05)
    running.send_signal(number)
    _, told = running.communicate(timeout=30)
    return running.returncode, told.decode().strip(), flags


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("tool", list(TOOLS))
def test_a_conversion_that_is_ended_leaves_nothing(
    tool: str, number: signal.Signals, code: int, tmp_path: Path
) -> None:
    found, told, _ = ended_while_writing(tool, number, tmp_path)
    assert (found, told) == (code, f"ended by {number.name}")
    assert [path for path in (tmp_path / "out").rglob("*") if path.name != "it"] == []


@pytest.mark.parametrize("tool", list(TOOLS))
def test_what_a_killed_conversion_left_is_removed_by_the_next(tool: str, tmp_path: Path) -> None:
    code, _, flags = ended_while_writing(tool, signal.SIGKILL, tmp_path)
    assert code == -signal.SIGKILL and any((tmp_path / "out").rglob("*.partial"))
    assert TOOLS[tool].main(flags) == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["it"]
    assert not any((tmp_path / "out").rglob("*.partial"))
