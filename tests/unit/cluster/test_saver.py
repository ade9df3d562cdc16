from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import pytest

from slime_rl.cluster import saver as module
from slime_rl.cluster.checkpoint import CheckpointStore, verify
from slime_rl.cluster.load_checks import check_loadable
from slime_rl.cluster.saver import Saver
from slime_rl.config import Config, parse_config


class Trainers:
    """Stands for a train group: `written` says when its threads are done."""

    def __init__(self, name: str = "weights") -> None:
        self.name = name
        self.calls: list[str] = []
        self.written = False
        self.error: Exception | None = None

    def save(self, path: str, step: int) -> None:
        self.calls.append("save")
        Path(path, self.name).write_text(str(step))

    def begin_save(self, path: str, step: int) -> None:
        self.calls.append("begin")
        self.path, self.step = Path(path), step

    def save_is_written(self) -> bool:
        return self.written

    def finish_save(self) -> None:
        self.calls.append("finish")
        if self.error is not None:
            raise self.error
        (self.path / self.name).write_text(str(self.step))

    def save_hf(self, path: str) -> None:
        self.calls.append(f"hf {Path(path).name}")


class Buffer:
    def save(self, path: str) -> None:
        Path(path).write_text("{}")


def make_config(tmp_path: Path, *flags: str) -> Config:
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text('{"model_type": "llama", "hidden_size": 8}')
    return make_config_of(tmp_path, *flags)


def make_config_of(tmp_path: Path, *flags: str) -> Config:
    """With the model that is there."""
    (tmp_path / "p.jsonl").write_text("{}")
    base = [
        "--hf-checkpoint",
        str(tmp_path / "model"),
        "--prompt-data",
        str(tmp_path / "p.jsonl"),
        "--run-dir",
        str(tmp_path / "run"),
    ]
    return parse_config([*base, *flags])


def save(config: Config, step: int) -> None:
    saver = Saver(config, Trainers(), Buffer())
    saver.save(step)
    saver.publish()


def steps(config: Config) -> list[int]:
    return sorted(int(p.name[-4:]) for p in config.checkpoint_dir.glob("step_*") if p.suffix != ".partial")


def test_background_save_is_whole_only_after_poll_and_wait(tmp_path: Path) -> None:
    config, trainers = make_config(tmp_path, "--async-save"), Trainers()
    saver = Saver(config, trainers, Buffer())
    saver.save(3)
    saver.publish()
    saver.poll()
    assert (trainers.calls, steps(config)) == (["begin"], [])
    trainers.written = True
    saver.poll()
    saver.wait()
    assert (trainers.calls, steps(config)) == (["begin", "finish"], [3])
    verify(CheckpointStore(config.checkpoint_dir, keep=1).latest()[0])
    assert all(thread.name != "finish-save" for thread in threading.enumerate())


@pytest.mark.parametrize("flags", [(), ("--async-save",)])
def test_a_checkpoint_is_found_only_when_it_is_published(tmp_path: Path, flags: tuple[str, ...]) -> None:
    config, trainers = make_config(tmp_path, *flags), Trainers()
    saver = Saver(config, trainers, Buffer())
    trainers.written = True
    saver.save(3)
    saver.poll()
    saver.wait()
    assert (steps(config), saver.newest) == ([], None)
    for _ in range(2):  # a second time changes nothing
        saver.publish()
    saver.wait()
    assert (steps(config), saver.newest) == ([3], (config.checkpoint_dir / "step_00000003", 3))


@pytest.mark.parametrize("flags", [(), ("--async-save",)])
def test_a_checkpoint_holds_what_both_train_groups_write(tmp_path: Path, flags: tuple[str, ...]) -> None:
    config, policy, critic = make_config(tmp_path, *flags), Trainers(), Trainers("critic")
    saver = Saver(config, policy, Buffer(), critic)
    saver.save(3)
    saver.publish()
    policy.written = True
    saver.poll()
    assert steps(config) == ([] if flags else [3]), "the critic is still writing"
    critic.written = True
    saver.poll()
    saver.wait()
    folder = CheckpointStore(config.checkpoint_dir, keep=1).latest()[0]
    assert sorted(file.name for file in (folder / "model").iterdir()) == ["critic", "weights"]
    assert policy.calls == critic.calls


def test_next_save_waits_for_the_one_before(tmp_path: Path) -> None:
    config, trainers = make_config(tmp_path, "--async-save"), Trainers()
    saver = Saver(config, trainers, Buffer())
    for step in (1, 2):
        saver.save(step)
        saver.publish()
    saver.wait()
    assert (trainers.calls, steps(config)) == (["begin", "finish", "begin", "finish"], [1, 2])


def test_failure_in_the_background_is_raised_and_leaves_the_one_before(tmp_path: Path) -> None:
    config, trainers = make_config(tmp_path, "--async-save"), Trainers()
    saver = Saver(config, trainers, Buffer())
    saver.save(1)
    saver.publish()
    saver.wait()
    trainers.error = OSError("no space left on device")
    saver.save(2)
    saver.publish()
    with pytest.raises(OSError, match="no space left"):
        saver.wait()
    assert steps(config) == [1]
    verify(CheckpointStore(config.checkpoint_dir, keep=1).latest()[0])


class PollingBuffer:
    """As in a run: whoever waits for the rollout side polls the saver."""

    saver: Saver

    def save(self, path: str) -> None:
        self.saver.poll()
        self.saver.wait()
        Path(path).write_text("{}")


def test_a_save_that_is_polled_while_its_buffer_is_written_holds_the_buffer(tmp_path: Path) -> None:
    config, trainers, buffer = make_config(tmp_path, "--async-save"), Trainers(), PollingBuffer()
    buffer.saver = Saver(config, trainers, buffer)
    trainers.written = True
    buffer.saver.save(3)
    buffer.saver.publish()
    buffer.saver.wait()
    folder = CheckpointStore(config.checkpoint_dir, keep=1).latest()[0]
    assert (folder / "buffer.json").is_file() and verify(folder) > 0


def test_a_save_under_way_is_made_whole_when_the_run_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, trainers = make_config(tmp_path, "--async-save"), Trainers()
    saver = Saver(config, trainers, Buffer())
    assert saver.complete() is None, "none is under way"
    saver.save(3)
    saver.publish()
    monkeypatch.setattr(module, "_LEAVING_S", 2.0)
    threading.Timer(3.0, lambda: setattr(trainers, "written", True)).start()  # they answer, and write for longer
    assert saver.complete() == 3
    assert steps(config) == [3] and saver.complete() is None
    saver.save(4)
    saver.publish()
    trainers.error = OSError("no space left on device")
    with pytest.raises(OSError, match="no space left"):
        saver.complete()
    trainers.error = None
    saver.save(5)
    saver.publish()
    ended = threading.Event()
    monkeypatch.setattr(trainers, "finish_save", ended.wait)  # they are stuck in a step
    with pytest.raises(TimeoutError, match=r"the trainers did not end their step within 2 s"):
        saver.complete()
    ended.set()
    assert steps(config) == [3]


def test_a_model_folder_that_is_gone_takes_no_checkpoint_away(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    saver = Saver(config, Trainers(), Buffer())
    shutil.rmtree(tmp_path / "model")
    saver.save(3)
    saver.publish()
    assert CheckpointStore(config.checkpoint_dir, keep=1).latest()[1].model_type == "llama"


def test_exports_along_the_way_and_once_at_the_end(tmp_path: Path) -> None:
    config, trainers = make_config(tmp_path, "--save-hf", str(tmp_path / "hf" / "{step}")), Trainers()
    saver = Saver(config, trainers, Buffer())
    saver.save(5)
    saver.publish()
    assert saver.export(5) == tmp_path / "hf" / "5"
    assert saver.export(6) == tmp_path / "hf" / "6"
    assert trainers.calls == ["save", "hf 5", "hf 6"]


def test_weights_only_and_other_models_are_refused_before_anything_starts(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    save(config, 4)
    load = ("--load", str(config.checkpoint_dir))
    assert check_loadable(make_config(tmp_path, *load)) == config.checkpoint_dir / "step_00000004"
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama", "hidden_size": 16}')
    other = parse_config(
        ["--hf-checkpoint", str(tmp_path / "model"), "--prompt-data", str(tmp_path / "p.jsonl"), *load]
    )
    with pytest.raises(ValueError, match=r"llama model \(.*model\) \(8xNonexNone.*is llama \(16xNonexNone\)"):
        check_loadable(other)


def test_checkpoint_of_a_model_of_the_same_shape_is_refused(tmp_path: Path) -> None:
    """Rotary base and heads are in no weight's shape; what is no matter of maths may change."""
    config, file = make_config(tmp_path), tmp_path / "model" / "config.json"
    own = json.loads(file.read_text()) | {"num_attention_heads": 4, "rope_theta": 10000.0, "transformers_version": "4"}
    file.write_text(json.dumps(own))
    save(config, 4)
    load = ("--load", str(config.checkpoint_dir))
    moved = {name: value for name, value in own.items() if name != "rope_theta"} | {"transformers_version": "5"}
    file.write_text(json.dumps(moved | {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}))
    assert check_loadable(make_config_of(tmp_path, *load)).name == "step_00000004"
    file.write_text(json.dumps(own | {"rope_theta": 1e6}))
    with pytest.raises(ValueError, match=r"whose rope_theta is 10000\.0 .*is 1000000\.0; .*alone with --finetune"):
        check_loadable(make_config_of(tmp_path, *load))
    check_loadable(make_config_of(tmp_path, *load, "--finetune"))
    file.write_text(json.dumps(own | {"num_attention_heads": 2}))
    with pytest.raises(ValueError, match=r"whose num_attention_heads is 4 .*is 2; name the model that was trained$"):
        check_loadable(make_config_of(tmp_path, *load, "--finetune"))


def test_names_with_other_braces_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--save-hf may have \{step\} in it"):
        make_config(tmp_path, "--save-hf", "hf/{rollout_id}")
    with pytest.raises(ValueError, match="--finetune needs --load"):
        make_config(tmp_path, "--finetune")
