from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from factories import make_config

from slime_rl.buffer.contract_scene import fill
from slime_rl.buffer.dumps import DumpedBuffer, RolloutDumps, check_dumped_steps, open_dumps
from slime_rl.buffer.ledger_buffer import LedgerBuffer
from slime_rl.buffer.opening import open_buffer
from slime_rl.buffer.packed import PackedGroups
from slime_rl.buffer.sources import FilePromptSource
from slime_rl.config import Config, parse_config
from slime_rl.data.tensor_file import write_tensors
from slime_rl.rollout.dumped import dumped_groups
from slime_rl.rollout.group_loop import rollout_function_name
from slime_rl.types import Group
from tools.inspect_buffer import main as inspect_buffer

SIZES = ("--n-samples-per-prompt", "2", "--rollout-batch-size", "2")


def dump_steps(tmp_path: Path, folder: Path, num_steps: int) -> list[list[Group]]:
    """What a run of the ledger buffer trains on, dumped as the rollout manager does it."""
    config = make_config(tmp_path, *SIZES, "--dump-rollouts", str(folder))
    dumps, buffer = open_dumps(config), LedgerBuffer(config, FilePromptSource(config))
    assert dumps is not None
    steps = []
    for step in range(num_steps):
        for group in buffer.reserve(2):
            buffer.admit(fill(group))
        steps.append(buffer.take(step, 2))
        dumps.write(step, steps[-1])
    return steps


def replaying(tmp_path: Path, folder: Path, *flags: str) -> Config:
    """A run on dumps: it names no prompts."""
    model = tmp_path / "model"
    return parse_config(["--hf-checkpoint", str(model), "--load-rollouts", str(folder), *SIZES, *flags])


def test_a_run_on_dumps_takes_the_same_groups_and_needs_neither_prompts_nor_engines(tmp_path: Path) -> None:
    expected = dump_steps(tmp_path, tmp_path / "dumps", 3)
    config = replaying(tmp_path, tmp_path / "dumps", "--num-steps", "3")
    assert not config.needs_engines and not config.needs_prompt_data
    assert rollout_function_name(config) == "dumped"
    buffer = open_buffer(config, lambda prompt: [])
    assert isinstance(buffer, DumpedBuffer)
    assert len(buffer) == 6
    for step in range(3):
        output = asyncio.run(dumped_groups(config, step, buffer))
        assert output.groups == expected[step]
        assert buffer.counts() == {"admitted": 2, "committed": 2 * step}
        buffer.commit(step)
    with pytest.raises(ValueError, match="has no prompts to generate for"):
        buffer.reserve(1)


def test_a_run_on_dumps_may_go_on_from_any_runs_checkpoint_but_not_the_other_way_round(tmp_path: Path) -> None:
    dump_steps(tmp_path, tmp_path / "dumps", 3)
    config = make_config(tmp_path, *SIZES)
    ledger = LedgerBuffer(config, FilePromptSource(config))
    dumped = DumpedBuffer(replaying(tmp_path, tmp_path / "dumps"))
    dumped.load_state_dict(ledger.state_dict())
    assert len(dumped.take(2, 2)) == 2
    with pytest.raises(ValueError, match="made with --load-rollouts; continue it with --load-rollouts"):
        ledger.load_state_dict(dumped.state_dict())


def test_what_does_not_fit_the_dumps_is_named(tmp_path: Path) -> None:
    dump_steps(tmp_path, tmp_path / "dumps", 3)
    folder = str(tmp_path / "dumps")
    with pytest.raises(ValueError, match=r"step 3 is not there, but steps 1 to 3 train .* holds steps 0 to 2"):
        check_dumped_steps(replaying(tmp_path, tmp_path / "dumps", "--num-steps", "4"), first_step=1)
    check_dumped_steps(replaying(tmp_path, tmp_path / "dumps", "--num-steps", "3"), first_step=1)
    with pytest.raises(ValueError, match="holds 2 groups, but --rollout-batch-size is 3"):
        DumpedBuffer(replaying(tmp_path, tmp_path / "dumps")).take(0, 3)
    small = tmp_path / "small"
    small.mkdir()
    (small / "config.json").write_text('{"vocab_size": 3}')
    with pytest.raises(ValueError, match=r"has token 4, but --hf-checkpoint .*small knows 3 tokens"):
        DumpedBuffer(replaying(tmp_path, tmp_path / "dumps", "--hf-checkpoint", str(small))).take(0, 2)
    (tmp_path / "dumps" / "step_00000001.safetensors").write_bytes(b"no")
    with pytest.raises(ValueError, match=r"step_00000001.safetensors: not a dumped step"):
        RolloutDumps(tmp_path / "dumps").read(1)
    for flags, message in (
        (("--rollout-function-path", "sft"), "must be auto with --load-rollouts, got 'sft'"),
        (("--dump-rollouts", folder), "must be another folder than --load-rollouts"),
        (("--dump-rollouts", f"{folder}/../{Path(folder).name}/"), "must be another folder than --load-rollouts"),
        (("--load-rollouts", str(tmp_path / "absent")), "--load-rollouts must be a folder that exists"),
    ):
        with pytest.raises(ValueError, match=message):
            replaying(tmp_path, tmp_path / "dumps", *flags)


def test_another_runs_dumps_are_not_overwritten_unasked_and_a_resumed_run_dumps_its_steps_again(tmp_path: Path) -> None:
    dump_steps(tmp_path, tmp_path / "dumps", 3)
    flags = ("--dump-rollouts", str(tmp_path / "dumps"))
    with pytest.raises(ValueError, match=r"--dump-rollouts: .* holds steps 0 to 2; choose another folder"):
        open_dumps(make_config(tmp_path, *flags))
    config = make_config(tmp_path, *flags)
    resumed = open_dumps(replace(config, checkpoint=replace(config.checkpoint, load=str(tmp_path))))
    assert resumed is not None
    resumed.remove_from(2)
    assert resumed.steps() == [0, 1]
    overwriting = open_dumps(make_config(tmp_path, *flags, "--overwrite"))
    assert overwriting is not None and overwriting.steps() == []


def test_dumps_can_be_looked_into(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump_steps(tmp_path, tmp_path / "dumps", 2)
    assert inspect_buffer([str(tmp_path / "dumps")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [" ".join(line.split()) for line in lines] == [
        "step 0 2 groups 4 samples 15 tokens reward 0.150 ± 0.112",
        "step 1 2 groups 4 samples 16 tokens reward 0.550 ± 0.112",
    ]
    assert inspect_buffer([str(tmp_path / "dumps"), "--group", "3"]) == 0
    assert "response: 'text 7'" in capsys.readouterr().out


def test_a_dump_that_is_damaged_or_of_something_else_is_named(tmp_path: Path) -> None:
    dump_steps(tmp_path, tmp_path / "dumps", 1)
    dumps = RolloutDumps(tmp_path / "dumps")
    flat = PackedGroups.load(dumps.path(0)).to_flat()
    flat = {name: tensor.clone() for name, tensor in flat.items()}
    less = {name: tensor for name, tensor in flat.items() if name != "groups/group_index"}
    write_tensors(dumps.path(1), less)
    write_tensors(dumps.path(2), {**flat, "groups/text/values": torch.zeros_like(flat["groups/text/values"])})
    write_tensors(dumps.path(3), {"weights": torch.zeros(3)})
    dumps.path(4).write_bytes(dumps.path(0).read_bytes()[:100])
    for step in (1, 2, 3, 4):
        with pytest.raises(ValueError, match=rf"step_0000000{step}.safetensors: not a dumped step: "):
            dumps.read(step)


def test_a_dumped_step_is_committed_once_and_forgotten_when_the_run_goes_back(tmp_path: Path) -> None:
    dump_steps(tmp_path, tmp_path / "dumps", 2)
    buffer = DumpedBuffer(replaying(tmp_path, tmp_path / "dumps"))
    buffer.take(0, 2)
    buffer.commit(0)
    with pytest.raises(ValueError, match="step 0 cannot be committed: no groups were taken for it"):
        buffer.commit(0)
    buffer.take(1, 2)
    buffer.load_state_dict(buffer.state_dict())
    assert buffer.counts()["admitted"] == 0


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match=r"--dump-rollouts must be a folder, got '.*/file'"):
        open_dumps(make_config(tmp_path, *SIZES, "--dump-rollouts", str(tmp_path / "file")))

    def full(self: PackedGroups, path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PackedGroups, "save", full)
    with pytest.raises(
        ValueError, match=r"--dump-rollouts .*/dumps: cannot write \d+ bytes of step 0: .*No space left"
    ):
        dump_steps(tmp_path, tmp_path / "dumps", 1)


def test_dumped_groups_without_samples_and_folders_of_a_step_s_name_are_named(tmp_path: Path) -> None:
    (groups,) = dump_steps(tmp_path, tmp_path / "dumps", 1)
    (tmp_path / "dumps" / "step_00000001.safetensors").mkdir()
    assert RolloutDumps(tmp_path / "dumps").steps() == [0]
    RolloutDumps(tmp_path / "dumps").write(0, [replace(group, samples=[]) for group in groups])
    with pytest.raises(ValueError, match=r"step_00000000.safetensors: the groups \[0, 1\] have no samples"):
        DumpedBuffer(replaying(tmp_path, tmp_path / "dumps", "--num-steps", "1")).take(0, 2)
