"""Whether two checkpoints hold the same weights: Hugging Face folders or torch_dist checkpoints, one on either side.

    python tools/compare_checkpoints.py A B [--tolerance X]

Exit code 0: the same (within --tolerance); 1: they differ; 2: one cannot be read, or its checksums say that it is
damaged. Two torch_dist checkpoints are compared under Megatron's names, optimizer included; otherwise a torch_dist
checkpoint is read under the Hugging Face names of its model (--origin-hf-dir where it does not say which).
"""

from __future__ import annotations

import argparse
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slime_rl.cluster.checkpoint import find_model_folder
from slime_rl.cluster.signals import run_command
from slime_rl.config.checks import check_model_folder


class Side(Protocol):
    """One checkpoint: the names of its tensors, and each of them."""

    @property
    def names(self) -> list[str]: ...

    def tensor(self, name: str) -> Any: ...


class RawTorchDist:
    """A torch_dist checkpoint under Megatron's names."""

    def __init__(self, folder: Path) -> None:
        from slime_rl.trainer.torch_dist import TorchDistReader

        self.reader = TorchDistReader(folder)
        self.names = self.reader.keys
        self.tensor = self.reader.read


class TorchDistAsHF:
    """A torch_dist checkpoint under Hugging Face names; a parameter's tensors are read together."""

    def __init__(self, folder: Path, origin: Path, plugins: tuple[str, str | None]) -> None:
        """`plugins`: --model-conversion-path and --model-provider-path."""
        from slime_rl.trainer.convert import conversion_config, list_parameters, open_conversion
        from slime_rl.trainer.torch_dist import TorchDistReader

        self.reader = TorchDistReader(folder)
        config = conversion_config(origin, plugins[0], False, plugins[1])
        with open_conversion(config) as conversion:
            parameters = list_parameters(config, conversion)
            kept = dict(conversion.kept_weights(str(origin))) if any(origin.glob("*.safetensors")) else {}
        self.owners = {name: parameter for parameter in parameters for name in parameter.names}
        self.kept: dict[str, Any] = kept  # layers that are not trained
        self.names = [*self.owners, *kept]
        self._last: dict[str, Any] = {}

    def tensor(self, name: str) -> Any:
        from slime_rl.trainer.convert_part import read_parameter

        if name in self.kept:
            return self.kept[name]
        if name not in self._last:
            parameter = self.owners[name]
            self._last = dict(zip(parameter.names, read_parameter(self.reader, parameter), strict=True))
        return self._last[name]


@dataclass
class Report:
    """What is different. `first` is the first tensor that differs, in the order of A."""

    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    compared: int = 0
    max_abs_diff: float = 0.0
    is_bitwise: bool = True  # of what was compared: 0.0 and -0.0 are the same value in other bits

    @property
    def is_same(self) -> bool:
        return not (self.missing or self.extra or self.shapes or self.different)


def compare(a: Side, b: Side, tolerance: float = 0.0) -> Report:
    """Every tensor of both, by name; values are compared in float64, whole numbers exactly, NaN equal to NaN."""
    import torch

    report = Report(missing=_only_in(a, b), extra=_only_in(b, a))
    common = set(b.names)
    for name in (name for name in a.names if name in common):
        x, y = a.tensor(name), b.tensor(name)
        report.compared += 1
        if x.shape != y.shape:
            report.shapes.append(f"{name} {tuple(x.shape)} / {tuple(y.shape)}")
            continue
        if x.dtype == y.dtype and torch.equal(_bytes(x), _bytes(y)):
            continue
        report.is_bitwise = False
        largest = _largest_difference(x, y)
        report.max_abs_diff = max(report.max_abs_diff, largest)
        if largest > tolerance or (tolerance == 0.0 and x.dtype != y.dtype):
            report.different.append(f"{name} ({x.dtype} / {y.dtype}, largest difference {largest:.3g})")
    return report


def _largest_difference(x: Any, y: Any) -> float:
    import torch

    if x.is_complex() or y.is_complex():
        x, y = (torch.view_as_real(side.to(torch.complex128)) for side in (x, y))
    is_whole = not (x.is_floating_point() or y.is_floating_point())
    x_wide, y_wide = (x.long(), y.long()) if is_whole else (x.double(), y.double())
    is_equal = (x_wide == y_wide) | (x_wide.isnan() & y_wide.isnan())  # infinities too
    gap = (x_wide - y_wide).abs()
    if is_whole:
        rounded = (x.double() - y.double()).abs()
        gap = torch.where(rounded < 2.0**62, gap.double(), rounded)  # beyond, int64 overflows
    gap = gap.masked_fill(is_equal, 0.0)
    return float("inf") if bool(gap.isnan().any()) else float(gap.max()) if gap.numel() else 0.0


def _bytes(x: Any) -> Any:
    import torch

    return x.contiguous().flatten().view(torch.uint8)


def _only_in(one: Side, other: Side) -> list[str]:
    """The names that only `one` has. An output layer that is stored beside the equal embedding is not one."""
    import torch

    names = sorted(set(one.names) - set(other.names))
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    if head in names and embedding in one.names and torch.equal(one.tensor(head), one.tensor(embedding)):
        names.remove(head)
    return names


def open_sides(a: Path, b: Path, origin: Path | None, plugins: tuple[str, str | None]) -> tuple[Side, Side]:
    """Both checkpoints, under names that can be compared."""
    from slime_rl.trainer.hf_folder import HFFolder

    is_hf = [(path / "config.json").is_file() for path in (a, b)]
    sides: list[Side] = []
    for side, path, own in zip("AB", (a, b), is_hf, strict=True):
        if own:
            sides.append(HFFolder(path))
            continue
        model_dir, carried = find_model_folder(path, side)
        if not any(is_hf):
            sides.append(RawTorchDist(model_dir))
            continue
        known = origin or carried or (a if is_hf[0] else b)
        sides.append(TorchDistAsHF(model_dir, known, plugins))
    return sides[0], sides[1]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a", type=Path, metavar="A")
    parser.add_argument("b", type=Path, metavar="B")
    parser.add_argument("--tolerance", type=float, default=0.0, help="largest difference that counts as the same")
    parser.add_argument("--origin-hf-dir", type=Path, metavar="DIR", help="model of the torch_dist checkpoints")
    parser.add_argument("--model-conversion-path", default="families", help="as in training")
    parser.add_argument("--model-provider-path", help="as in training")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    try:
        if not args.tolerance >= 0:
            raise ValueError(f"--tolerance must be >= 0, got {args.tolerance}")
        if args.origin_hf_dir is not None:
            check_model_folder("--origin-hf-dir", str(args.origin_hf_dir))
        plugins = args.model_conversion_path, args.model_provider_path
        report = compare(*open_sides(args.a, args.b, args.origin_hf_dir, plugins), args.tolerance)
    except (ValueError, OSError) as error:
        print(f"compare_checkpoints: {error}", file=sys.stderr)
        return 2
    for title, names in (
        ("only in A", report.missing),
        ("only in B", report.extra),
        ("of another shape", report.shapes),
        ("different", report.different),
    ):
        if names:
            print(f"{title}: {len(names)}, first {names[0]}")
    verdict = "same" if report.is_same else "different"
    bitwise = "yes" if report.is_same and report.is_bitwise else "no"
    print(f"{verdict}: tensors={report.compared} max_abs_diff={report.max_abs_diff:.3g} bitwise={bitwise}")
    return 0 if report.is_same else 1


if __name__ == "__main__":
    run_command(main)
