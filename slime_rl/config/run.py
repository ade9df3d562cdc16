from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slime_rl.config.checks import check, check_not_negative, check_positive
from slime_rl.config.flags import flag

TRACKER_NAMES = ("wandb", "mlflow", "trackio", "prometheus")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoint: saving, resuming and export."""

    save: str | None = None
    """Folder for checkpoints; RUN_DIR/checkpoints when --save-interval is given without it."""

    save_interval: int | None = None
    """Steps between checkpoints."""

    load: str | None = None
    """Checkpoint folder to continue from: its newest complete checkpoint, with buffer, optimizer and random state."""

    finetune: bool = False
    """Take only the weights of --load (a checkpoint of a run or of tools/convert_hf_to_torch_dist.py): the run begins
    at step 0 with a new optimizer, buffer and random state."""

    async_save: bool = False
    """Write checkpoints to disk in the background while the run goes on."""

    save_hf: str | None = None
    """Folder for the Hugging Face export at the end; RUN_DIR/hf when not given. With {step} in it, as in
    exports/{step}, one is written with every checkpoint too."""

    keep_checkpoints: int = 2
    """Newest checkpoints that stay on disk."""

    keep_checkpoint_every: int | None = None
    """Checkpoints after a multiple of this many steps stay on disk too."""

    def __post_init__(self) -> None:
        check_positive(
            save_interval=self.save_interval,
            keep_checkpoints=self.keep_checkpoints,
            keep_checkpoint_every=self.keep_checkpoint_every,
        )
        check(not self.finetune or self.load is not None, "--finetune", "needs --load", self.load)
        if self.save_hf is not None:
            braces = self.save_hf.replace("{step}", "")
            check(
                "{" not in braces and "}" not in braces,
                "--save-hf",
                "may have {step} in it, and no other",
                self.save_hf,
            )
        if self.load is not None:
            check(Path(self.load).is_dir(), "--load", "must be a folder that exists", self.load)

    def hf_folder(self, run_dir: Path, step: int) -> Path:
        """Where the export after `step` finished steps goes."""
        return Path(self.save_hf.replace("{step}", str(step))) if self.save_hf else run_dir / "hf"


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Logging: what the run leaves behind and shows."""

    run_dir: str = "runs/default"
    """Folder of this run: metrics.jsonl, report.html, pictures, checkpoints, engine logs, export."""

    overwrite: bool = False
    """Start anew in a run folder that already holds a finished or broken-off run."""

    dry_run: bool = False
    """Check everything that can be checked without starting a process, print what would run, and stop."""

    trace: bool = False
    """Write a timeline of phases, workers, engine requests, tools and rewards to RUN_DIR/trace.json, for Perfetto."""

    tensorboard: bool = flag(False, aliases=("--use-tensorboard",))
    """Write TensorBoard events to RUN_DIR/tensorboard."""

    trackers: tuple[str, ...] = ()
    """Further destinations of metrics: wandb, mlflow, trackio, prometheus. Each needs its package; where its server is
    and how to log in are its own settings, such as WANDB_MODE or MLFLOW_TRACKING_URI."""

    tracker_project: str = flag("slime_rl", aliases=("--wandb-project",))
    """Project or experiment that --trackers file the run under."""

    tracker_run: str | None = None
    """Name of the run in --trackers; the last part of --run-dir when not given."""

    prometheus_address: str = "127.0.0.1:9400"
    """HOST:PORT that --trackers prometheus listens on; host 0.0.0.0 lets other machines read."""

    log_function_path: str | None = None
    """Extra metrics from finished samples, as package.module:name."""

    log_samples: int = 2
    """Samples of each step that are written to RUN_DIR/samples.jsonl."""

    log_token_training: bool = True
    """Write what training saw of each response token of these samples, too: the trainer's log-prob, the advantage and
    the mask."""

    dump_train_steps: tuple[int, ...] = ()
    """Steps whose optimizer updates are written whole to RUN_DIR/train_dumps, weights included, for
    tools/replay_step.py. An update whose loss or gradient is not finite is always written."""

    @property
    def logs_token_training(self) -> bool:
        """Whether there are samples that it is wanted for."""
        return self.log_token_training and self.log_samples > 0

    def __post_init__(self) -> None:
        check_not_negative(log_samples=self.log_samples)
        for name in self.trackers:
            check(name in TRACKER_NAMES, "--trackers", f"takes {', '.join(TRACKER_NAMES)}", name)
        check(len(set(self.trackers)) == len(self.trackers), "--trackers", "must name each once", self.trackers)
        host, _, port = self.prometheus_address.rpartition(":")
        is_port = port.isdigit() and int(port) < 2**16
        check(bool(host) and is_port, "--prometheus-address", "must be HOST:PORT", self.prometheus_address)
        for step in self.dump_train_steps:
            check(step >= 0, "--dump-train-steps", "must be >= 0", step)
        check(bool(self.run_dir), "--run-dir", "must not be empty", self.run_dir)
