from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
from factories import make_config

from slime_rl.buffer.contract_scene import fill
from slime_rl.buffer.ledger_buffer import LedgerBuffer
from slime_rl.buffer.sources import FilePromptSource
from slime_rl.data.state_files import save_state
from slime_rl.types import Group

TOOL = Path(__file__).parents[3] / "tools" / "inspect_buffer.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("inspect_buffer", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_run(tmp_path: Path) -> Path:
    """A run folder with one checkpoint: group 0 committed, 1 dropped, 2 and 3 generated, 4 waiting."""
    config = make_config(tmp_path, "--n-samples-per-prompt", "2")
    buffer = LedgerBuffer(config, FilePromptSource(config))
    groups = buffer.reserve(5)
    buffer.drop(groups[1], "zero_std")
    for i in (0, 2, 3):
        buffer.admit(fill(groups[i]))
    buffer.take(0, 1)
    buffer.commit(0)
    folder = config.run_dir / "checkpoints" / "step_00000001"
    folder.mkdir(parents=True)
    save_state(folder / "buffer.json", buffer.state_dict())
    (config.run_dir / "checkpoints" / "latest").write_text("step_00000001")
    (config.run_dir / "metrics.jsonl").write_text(
        '{"step": 4, "buffer/waiting": 2.0, "buffer/dropped/zero_std": 1.0}\n'
        '{"step": 5, "train/loss": 1.0}\n{"step": 6, "buf'
    )
    return config.run_dir


def test_overview_lists_states_drops_cursor_and_live_counts(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main([str(make_run(tmp_path))]) == 0
    words = " ".join(capsys.readouterr().out.split())
    for expected in (
        "live, step 4: waiting 2, dropped/zero_std 1",
        "reserved 1",
        "generated 2",
        "committed 1",
        "dropped for zero_std: 1",
        "last committed step 0, next group 5",
        "dataset prompts.jsonl: epoch 1, next row at position 2",
        "groups with tokens 2",
        "2 groups are -3 weight versions old",
    ):
        assert expected in words


def test_one_group_is_shown_with_text_tokens_and_versions(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path)
    assert tool.main([str(run), "--group", "3"]) == 0
    out = capsys.readouterr().out
    assert "response: 'text 7'" in out
    assert "tokens 0:4 (trained on, sampled by version 4): [0, 1, 2, 3]" in out
    assert "log-probs: -0.1, -0.2, -0.3, -0.4" in out
    assert tool.main([str(run), "--groups"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_what_is_not_there_is_one_clear_line(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path)
    assert tool.main([str(run), "--group", "99"]) == 1
    assert "group 99 has no tokens here" in capsys.readouterr().err
    assert tool.main([str(tmp_path / "nope")]) == 1
    assert "must be a folder that exists" in capsys.readouterr().err
    assert tool.main([str(tmp_path)]) == 0
    assert "no checkpoint below" in capsys.readouterr().out


def test_watch_prints_the_live_counts_again_and_again_until_it_is_interrupted(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path)
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            raise KeyboardInterrupt
        with (run / "metrics.jsonl").open("a") as file:
            file.write('fer/x": 0}\n{"step": 7, "buffer/waiting": 5.0}\n')

    monkeypatch.setattr(tool.time, "sleep", wait)
    assert tool.main([str(run), "--watch", "2.5"]) == 0
    out = capsys.readouterr().out
    assert waits == [2.5, 2.5]
    assert out.index("live, step 4: waiting 2") < out.index("live, step 7: waiting 5")


def test_a_damaged_state_is_one_line_that_names_the_run(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path)
    path = run / "checkpoints" / "step_00000001" / "buffer.json"
    whole = json.loads(path.read_text())
    for damaged in (
        {**whole, "ledger": {}},
        {**whole, "payloads": [{}]},
        {**whole, "payloads": 3},
        {**whole, "replay": None},
        {"ledger": 1},
    ):
        path.write_text(json.dumps(damaged))
        for flags in ([], ["--groups"]):
            code = tool.main([str(run), *flags])
            err = capsys.readouterr().err
            assert code == 0 or (err.startswith("error: ") and str(run) in err and err.count("\n") == 1), err
    (run / "buffer_spill").mkdir()
    (run / "buffer_spill" / "segment_000001.safetensors").write_bytes(b"cut")
    path.write_text(json.dumps(whole))
    assert tool.main([str(run), "--groups"]) == 1
    assert "what is there cannot be read: SafetensorError" in capsys.readouterr().err


def test_the_spill_folder_of_the_run_is_looked_at_without_groups_that_are_done(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spill = tmp_path / "elsewhere"
    config = make_config(tmp_path, "--n-samples-per-prompt", "2", "--buffer-spill-dir", str(spill))
    buffer = LedgerBuffer(config, FilePromptSource(config))
    for group in buffer.reserve(6):
        buffer.admit(fill(group))
    buffer.offload()
    config.run_dir.mkdir(parents=True)
    (config.run_dir / "config.json").write_text(json.dumps(dataclasses.asdict(config), default=str))
    assert tool.main([str(config.run_dir)]) == 0
    assert f"spilled: {sum(p.stat().st_size for p in spill.glob('segment_*')):,} bytes in" in capsys.readouterr().out
    buffer.take(0, 2)
    buffer.commit(0)
    folder = config.run_dir / "checkpoints" / "step_00000001"
    folder.mkdir(parents=True)
    save_state(folder / "buffer.json", buffer.state_dict())
    (config.run_dir / "checkpoints" / "latest").write_text("step_00000001")
    assert tool.main([str(config.run_dir), "--groups"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "segment_" in line]
    assert [int(line.split()[1]) for line in lines] == [2, 3, 4, 5]


def test_a_group_without_samples_is_shown(tool: ModuleType) -> None:
    lines = tool.group_lines(
        "checkpoint", Group(group_index=3, source_index=0, epoch=0, samples=[], left_out={"short": 2})
    )
    assert "0 samples" in lines[0]
    assert lines[1] == "no sample is left of it; left out: {'short': 2}"


def test_broken_lines_of_the_metrics_are_named_and_passed_over(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path)
    (run / "metrics.jsonl").write_bytes(
        b'{"step": 1, "buffer/waiting": 2.0}\n{"step": 2, "buffer/wai{"step": 2, "buffer/waiting": 1.0}\n'
        b'{"step": 3, "buffer/x\xff": 1}\n["buffer/"]\n{"step": 4, "buffer/waiting": null, "buffer/generated": 3}\n'
    )
    assert tool.main([str(run)]) == 0
    out = capsys.readouterr().out
    assert [number for number in range(1, 6) if f"metrics.jsonl:{number}: passed over" in out] == [2, 3, 4]
    assert "live, step 4: waiting None, generated 3" in out


def test_watch_has_a_default_and_takes_times_alone(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path)
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        raise KeyboardInterrupt

    monkeypatch.setattr(tool.time, "sleep", wait)
    assert tool.main([str(run), "--watch"]) == 0
    assert waits == [5.0]
    for wrong in ("-1", "0", "nan", "inf"):
        assert tool.main([str(run), f"--watch={wrong}"]) == 1
        assert f"--watch must be a number of seconds > 0, got {wrong}" in capsys.readouterr().err


def test_a_damaged_pointer_to_the_newest_checkpoint_is_named(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "latest").write_bytes(b"\xff\xfe")
    assert tool.main([str(tmp_path)]) == 1
    assert f"error: {tmp_path / 'latest'}: is damaged" in capsys.readouterr().err
