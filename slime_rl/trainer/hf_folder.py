"""Reading the weights of a Hugging Face folder, tensor by tensor and slice by slice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from slime_rl.config.model_folder import weight_files


class HFFolder:
    """The safetensors files of a folder, memory-mapped: nothing is read before it is asked for."""

    def __init__(self, path: str | Path) -> None:
        """Open every weight file.

        Raises:
            ValueError: there is none, the index names one that is missing, or one is not whole.
        """
        self.path = Path(path)
        self._files: dict[str, Any] = {}
        self._where: dict[str, str] = {}
        for file in weight_files(self.path):
            try:
                opened = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{file}: cannot be read as safetensors: {error}") from error
            self._files[file.name] = opened
            self._where.update(dict.fromkeys(opened.keys(), file.name))

    def __contains__(self, name: str) -> bool:
        return name in self._where

    @property
    def names(self) -> list[str]:
        return list(self._where)

    def source(self, name: str) -> Any:
        """A tensor that is read when it is indexed.

        Raises:
            ValueError: there is no such tensor.
        """
        if name not in self._where:
            raise ValueError(f"{self.path}: the weight {name} is missing")
        return self._files[self._where[name]].get_slice(name)

    def tensor(self, name: str) -> Tensor:
        """A whole tensor."""
        return self.source(name)[:]
