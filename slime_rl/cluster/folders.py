"""Folders that a run writes to: whether it can, and that nothing it reads is in the way."""

from __future__ import annotations

import tempfile
from pathlib import Path

from slime_rl.config import Config
from slime_rl.config.checks import data_path


def check_folders(config: Config) -> None:
    """Check every folder that is written to, also the one of the export at the very end; nothing is left there.

    Raises:
        ValueError: a folder that cannot be made or written to, or an export that would replace a model that is read.
    """
    for flag, folder in output_folders(config).items():
        check_writable(flag, folder)
    if config.train.num_steps == 0 or "{step}" in (config.checkpoint.save_hf or ""):
        return
    export = config.checkpoint.hf_folder(config.run_dir, config.train.num_steps)
    for flag, path in _models(config).items():
        if path.resolve() == export.resolve():
            raise ValueError(
                f"--save-hf must be another folder than {flag}, which the export at the end would replace, got {export}"
            )


def check_writable(flag: str, folder: Path) -> None:
    """Check that a folder can be made, if it is not there, and that files can be written in it.

    Raises:
        ValueError: with the flag, the folder and what the system says.
    """
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise ValueError(f"{flag} must be a folder, or be inside one, got {folder}: {existing} is a file")
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        raise ValueError(f"{flag} must be a folder that can be written to, got {folder}: {error.strerror}") from error


def told(error: OSError, flag: str, folder: Path) -> str:
    """What the system says, with the flag of the folder that is written to where it names no file (a full disk)."""
    return str(error) if error.filename is not None else f"{flag} {folder}: {error.strerror or error}"


def output_folders(config: Config) -> dict[str, Path]:
    """By flag, the folders that this run writes to. Of a cluster elsewhere only the run folder is known here."""
    folders = {"--run-dir": config.run_dir}
    if config.cluster.ray_address is not None:
        return folders
    export = config.checkpoint.save_hf
    given = {
        "--save": config.checkpoint.save if config.checkpoint.save_interval is not None else None,
        "--save-hf": export.split("{step}")[0] or "." if export is not None and config.train.num_steps > 0 else None,
        "--dump-rollouts": config.rollout.dump_rollouts,
        "--buffer-spill-dir": config.buffer.buffer_spill_dir,
        "--weight-sync-dir": config.weight_sync.weight_sync_dir if config.needs_engines else None,
    }
    return folders | {flag: Path(path) for flag, path in given.items() if path is not None}


def check_spared(config: Config, removed: list[Path]) -> None:
    """Check that nothing the run reads is among what --overwrite removes.

    Raises:
        ValueError: with the flag of the input and what would be removed.
    """
    for flag, path in _inputs(config).items():
        for output in removed:
            if path.resolve().is_relative_to(output.resolve()):
                raise ValueError(
                    f"--overwrite would remove {output}, which {flag} reads; choose another --run-dir, or move it away"
                )


def _models(config: Config) -> dict[str, Path]:
    paths = {
        "--hf-checkpoint": config.model.hf_checkpoint,
        "--ref-load": config.model.ref_load,
        "--teacher-load": config.model.teacher_load,
        "--critic-load": config.critic.critic_load,
    }
    return {flag: Path(path) for flag, path in paths.items() if path is not None}


def _inputs(config: Config) -> dict[str, Path]:
    """Files and folders that are read; of a model also its config.json, for a run folder that is the model's own."""
    found = {flag: path / "config.json" for flag, path in _models(config).items()}
    others: dict[str, str | None] = {
        "--load": config.checkpoint.load,
        "--load-rollouts": config.rollout.load_rollouts,
        "--judge-prompt": config.reward.judge_prompt,
        "--tool-config": config.agent.tool_config,
        "--sglang-config": config.engine.sglang_config,
    }
    specs = {"--prompt-data": config.data.prompt_data or ""}
    specs |= {f"--eval-prompt-data {name}": spec for name, spec in config.evaluation.datasets}
    for flag, spec in specs.items():
        for part in spec.split(","):
            path = data_path(part)
            others[flag if spec == part else f"{flag} {path}"] = path
    return found | {flag: Path(path) for flag, path in others.items() if path}
