"""Weights through files in a folder that trainer and engines share, for engines that no process group reaches.

    disk:        every bucket of every version is a safetensors file
    disk-delta:  the first version so; then only what changed, as long as all engines have the version before

Files of a version are removed when it has been loaded.
"""

from __future__ import annotations

import os
import zlib
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as safetensors_bytes
from torch import Tensor

from slime_rl.weight_sync import delta
from slime_rl.weight_sync.bucket import FlatBuffer, Slot
from slime_rl.weight_sync.instructions import Instruction
from slime_rl.weight_sync.session import EngineSession


class DiskTransport:
    """See the picture above."""

    room = 1  # the time goes into making the files

    def __init__(self, engines: EngineSession, folder: Path, *, deltas: bool) -> None:
        self.engines, self.folder, self.deltas = engines, folder, deltas
        self.folder.mkdir(parents=True, exist_ok=True)
        self._changed = self._compared = 0  # values, of the update in hand
        self._version = 0  # being sent
        self._base: int | None = None  # what the update in hand starts from; None: from nothing
        self._have: dict[str, int] = {}  # engine -> version it was given last
        self._shadow: dict[str, Tensor] = {}  # the weights of `_shadow_version`
        self._shadow_version: int | None = None
        self._files: list[Path] = []

    @property
    def changed_share(self) -> float:
        """See Transport."""
        return self._changed / self._compared if self._compared else 1.0

    def make_buffer(self) -> FlatBuffer:
        return FlatBuffer(lambda num_bytes, device: torch.empty(num_bytes, dtype=torch.uint8, device=device))

    def begin(self, version: int) -> None:
        """See Transport.begin."""
        self._version = version
        self._changed = self._compared = 0
        known = {self._have.get(engine.url) for engine in self.engines.controls}
        is_whole = self.deltas and self._shadow_version is not None and known == {self._shadow_version}
        self._base = self._shadow_version if is_whole else None
        self._shadow_version = None  # until the end: an update that breaks off leaves a mixture
        if self._base is None:
            self._shadow = {}

    def post(self, flat: Tensor, slots: list[Slot]) -> tuple[Future[Any], int]:
        """See Transport.post."""
        is_delta = self._base is not None
        tensors = {s.name: flat[s.start : s.end].view(s.dtype).view(s.shape).cpu() for s in slots}
        if is_delta:
            content = self._delta_bytes(tensors)
        else:
            content = safetensors_bytes(tensors)
            if self.deltas:
                self._shadow |= {name: tensor.clone() for name, tensor in tensors.items()}
        path = self.folder / f"v{self._version}_{len(self._files)}.{'delta' if is_delta else 'safetensors'}"
        _write(path, content)
        self._files.append(path)
        payload = Instruction(
            kind="delta" if is_delta else "file",
            path=str(path),
            num_bytes=len(content),
            checksum=zlib.crc32(content),
            keep=self.deltas,
            version=self._version,
            base=-1 if self._base is None else self._base,
        ).to_payload()
        return self.engines.start(lambda engine, _: engine.update_by_instruction(payload)), len(content)

    def _delta_bytes(self, tensors: dict[str, Tensor]) -> bytes:
        found = [delta.difference(name, self._shadow[name], tensor) for name, tensor in tensors.items()]
        self._changed += sum(len(part.positions) for part in found)
        self._compared += sum(tensor.numel() for tensor in tensors.values())
        found = [part for part in found if len(part.positions)]
        for part in found:
            delta.apply_delta(part, self._shadow[part.name])
        return delta.pack(found)

    def end(self) -> None:
        """See Transport.end."""
        self._shadow_version = self._version
        self._have |= {engine.url: self._version for engine in self.engines.controls}
        self._remove_files()

    def engines_changed(self) -> None:
        """An engine that was replaced has a new URL, and by it is known to lack the base."""

    def close(self) -> None:
        self._remove_files()

    def _remove_files(self) -> None:
        for path in self._files:
            path.unlink(missing_ok=True)
        self._files = []


def _write(path: Path, content: bytes) -> None:
    """Appears whole or not at all, on the disk of whoever reads it."""
    aside = path.with_name(path.name + ".partial")
    with aside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)
