from __future__ import annotations

import mmap
import os
import pickle
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load

from slime_rl.trainer.hf_export import _write_weights
from slime_rl.trainer.hf_folder import HFFolder, TensorInfo, write_safetensors
from slime_rl.trainer.saved_tensor import saved_tensor
from slime_rl.trainer.torch_dist import METADATA, TorchDistFile, TorchDistReader, write_index

WHOLE = torch.arange(7 * 5, dtype=torch.float32).reshape(7, 5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """`w` in boxes of 3 and 4 rows by two writers, and `e`, one expert of 2 in each file."""
    boxes = []
    for rank, (first, last) in enumerate(((0, 3), (3, 7))):
        with TorchDistFile(tmp_path, rank) as file:
            file.write("w", (7, 5), (first, 0), WHOLE[first:last].clone())
            file.write("e", (2, 4), (rank, 0), torch.full((4,), rank, dtype=torch.bfloat16))
        boxes += file.boxes
    write_index(tmp_path, boxes, {"step": 3})
    return tmp_path


def test_pytorch_reads_what_is_written(folder: Path) -> None:
    found = {"w": torch.zeros(7, 5), "e": torch.zeros(2, 4, dtype=torch.bfloat16)}
    load(found, storage_reader=FileSystemReader(folder), no_dist=True)
    assert torch.equal(found["w"], WHOLE)
    assert found["e"][:, 0].tolist() == [0, 1]


def test_whole_tensors_and_boxes_across_files_are_read(folder: Path) -> None:
    reader = TorchDistReader(folder)
    assert (reader.keys, reader.shape("w"), reader.dtype("e")) == (["w", "e"], (7, 5), torch.bfloat16)
    assert torch.equal(reader.read("w"), WHOLE)
    assert torch.equal(reader.read("w", ((2, 1), (3, 4))), WHOLE[2:5, 1:])
    assert reader.read("e", ((1, 0), (1, 4))).tolist() == [[1, 1, 1, 1]]
    assert reader.common() == {"step": 3}


def test_tensor_without_sums_or_with_strides_is_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        with TorchDistFile(tmp_path, 0) as file:
            file.write("w", (5, 7), (0, 0), WHOLE.T)
    finally:
        torch.serialization.set_crc32_options(True)
    write_index(tmp_path, file.boxes, {})
    assert torch.equal(TorchDistReader(tmp_path).read("w"), WHOLE.T)
    torch.save(WHOLE.T, tmp_path / "strided")
    with open(tmp_path / "strided", "rb") as opened:
        data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    assert torch.equal(saved_tensor(data, 0, len(data)), WHOLE.T)


def test_missing_tensor_file_and_data_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no tensor x"):
        TorchDistReader(folder).read("x")
    with pytest.raises(ValueError, match="w is incomplete: 35 of 40 values"):
        TorchDistReader(folder).read("w", ((0, 0), (8, 5)))
    file = folder / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-900])
    with pytest.raises(ValueError, match=r"__1_0\.distcp: is cut off, the data of e"):
        TorchDistReader(folder).read("e")
    file.write_bytes(b"")
    with pytest.raises(ValueError, match=r"__1_0\.distcp: is cut off, it is empty"):
        TorchDistReader(folder).read("e")
    file.unlink()
    with pytest.raises(ValueError, match=r"data file __1_0\.distcp is missing"):
        TorchDistReader(folder).read("w")
    with pytest.raises(ValueError, match="must hold a torch_dist checkpoint"):
        TorchDistReader(folder / "no")


def test_safetensors_are_written_one_tensor_at_a_time(tmp_path: Path) -> None:
    tensors = [WHOLE, torch.tensor(2, dtype=torch.int64), WHOLE.T.to(torch.bfloat16), torch.zeros(0)]
    infos = [TensorInfo(f"t{i}", t.dtype, tuple(t.shape)) for i, t in enumerate(tensors)]
    write_safetensors(tmp_path / "model.safetensors", infos, iter(tensors))
    folder = HFFolder(tmp_path)
    assert folder.names == ["t0", "t1", "t2", "t3"]
    for i, tensor in enumerate(tensors):
        assert torch.equal(folder.tensor(f"t{i}"), tensor)
    with pytest.raises(ValueError, match=r"t0 must be torch\.float32"):
        write_safetensors(tmp_path / "x.safetensors", infos[:1], [torch.zeros(3)])


def test_full_disk_is_an_error_of_the_system(tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"), TorchDistFile(tmp_path, 0) as file:
        file.write("w", (999, 999), (0, 0), torch.zeros(999, 999))
    (tmp_path / "part-0.safetensors").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        _write_weights(iter([("w", torch.zeros(999, 999))]), tmp_path)


def test_more_files_than_a_process_may_open_are_read(tmp_path: Path) -> None:
    boxes = []
    for rank in range(300):
        with TorchDistFile(tmp_path, rank) as file:
            file.write("w", (300, 5), (rank, 0), torch.full((1, 5), rank))
        boxes += file.boxes
    write_index(tmp_path, boxes, {})
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 200, limit[1]))
    try:
        reader = TorchDistReader(tmp_path)
        rows = [reader.read("w", ((rank, 0), (1, 5))).clone() for rank in range(300)]
        assert torch.equal(torch.cat(rows)[:, 4], torch.arange(300))
        assert torch.equal(reader.read("w")[:, 0], torch.arange(300))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)


def test_index_that_is_another_pickle_is_refused(folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps([1]))
    with pytest.raises(
        ValueError, match=r"\.metadata: must hold the index of a torch_dist checkpoint, got <class 'list'>"
    ):
        TorchDistReader(folder)


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        ("[]", r'must hold \{"sharded_backend": "torch_dist", .*, got \[\]'),
        ("3", "must hold .*, got 3"),
        ("{}", r"must hold .*, got \{\}"),
        ('{"checksums": 3}', r'must hold .*, got \{"checksums": 3\}'),
        ('{"sharded_backend": "zarr", "sharded_backend_version": 1}', 'must hold .*, got {"sharded_backend": "zarr"'),
        ('{"sharded_backend": "torch_dist", "common_backend": []}', "must hold .*, got "),
        ('{"sharded_backend": "torch_dist", "checksums": 3}', "must hold .*, got "),
        ("{", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
    ],
)
def test_a_format_file_that_says_something_else_is_refused(folder: Path, content: str, rule: str) -> None:
    from slime_rl.trainer.checkpoint import _common

    (folder / "metadata.json").write_text(content)
    for read in (TorchDistReader, _common):  # the tools, and a run
        with pytest.raises(ValueError, match=rf"metadata\.json: {rule}"):
            read(folder)


def test_a_format_file_without_what_megatron_takes_as_given_is_read(folder: Path) -> None:
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    assert torch.equal(TorchDistReader(folder).read("w"), WHOLE)


def test_an_index_that_keeps_its_plan_as_megatrons_does_is_read(folder: Path) -> None:
    index = pickle.loads((folder / METADATA).read_bytes())
    box = index.state_dict_metadata["w"].chunks[0]
    data = TensorWriteData(box, index.state_dict_metadata["w"].properties, torch.Size((7, 5)))
    plan = SavePlan([WriteItem(MetadataIndex("w", torch.Size((0, 0)), 0), WriteItemType.SHARD, tensor_data=data)])
    index.planner_data, index.storage_meta = {"plan": plan}, StorageMeta(checkpoint_id=folder)
    (folder / METADATA).write_bytes(pickle.dumps(index))
    assert torch.equal(TorchDistReader(folder).read("w"), WHOLE)


class Harmful:
    """What a pickle from elsewhere may hold: a call of anything."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("called"),)


def test_an_index_from_elsewhere_runs_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (folder / METADATA).write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(
        ValueError, match=r"\.metadata: cannot be read: UnpicklingError: .* is not expected in an index"
    ):
        TorchDistReader(folder)
    assert not (folder / "called").exists()


@pytest.mark.parametrize("name", [METADATA, "__0_0.distcp"])
@pytest.mark.filterwarnings("ignore:TypedStorage")
def test_any_damaged_byte_gives_the_same_kind_of_tensors_or_an_error_with_the_file(folder: Path, name: str) -> None:
    whole = (folder / name).read_bytes()
    kinds = {"w": (torch.float32, (7, 5)), "e": (torch.bfloat16, (2, 4))}
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 0xFF
        (folder / name).write_bytes(damaged)
        try:
            reader = TorchDistReader(folder)
            found = {key: reader.read(key) for key in reader.keys}
        except ValueError as error:
            assert str(folder) in str(error), place
        else:
            assert all((t.dtype, tuple(t.shape)) == kinds.get(key, (t.dtype, t.shape)) for key, t in found.items())


def test_data_of_another_type_or_shape_than_the_index_says_is_refused(folder: Path, tmp_path: Path) -> None:
    for other in (WHOLE[:3].long(), WHOLE[:2], WHOLE[:3].T):
        with TorchDistFile(tmp_path, 0) as file:
            file.write("w", (7, 5), (0, 0), other)
        index = pickle.loads((folder / METADATA).read_bytes())
        index.storage_data[MetadataIndex("w", torch.Size((0, 0)))].length = file.boxes[0].length
        (folder / METADATA).write_bytes(pickle.dumps(index))
        with pytest.raises(
            ValueError, match=r"__0_0.distcp: the data of w is damaged: it must be torch.float32 \[3, 5\]"
        ):
            TorchDistReader(folder).read("w")
