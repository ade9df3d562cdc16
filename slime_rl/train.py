"""The one loop, for every mode.

    prompts ─► buffer ─► rollout (engines behind the router) ─► batch ─► Megatron workers ─► new weights ─► engines
                 ▲                                                                                            │
                 └────────────────────────── commit: these groups have trained ◄──────────────────────────────┘

`python -m slime_rl.train --help` lists every flag. `--rollout-ahead 0` is synchronous, 1 is one step off, and
`--fully-async` generates without pause within `--max-staleness`; the loop is the same.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime_rl.cluster.cluster import Cluster
from slime_rl.cluster.errors import TrainWorkerLost, explain, write_error_log
from slime_rl.cluster.ray_session import ray_session, with_device
from slime_rl.cluster.run_folder import run_folder
from slime_rl.cluster.signals import Terminated, exit_with, leave_on_signals, signal_behind, signals_held
from slime_rl.config import Config, parse_config
from slime_rl.config.notes import config_notes
from slime_rl.observability.console import Console
from slime_rl.observability.memory import PeakMemory
from slime_rl.observability.streams import keep_standard_streams, say
from slime_rl.observability.timers import PhaseTimer
from slime_rl.observability.trace import PhaseTrace, open_trace, write_trace
from slime_rl.observability.tracker import EVALUATION, Trackers, make_trackers
from slime_rl.preflight import check_on_device, dry_run, preflight


@dataclass
class TrainedStep:
    """A step from its commit until its lines are written."""

    step: int
    metrics: dict[str, float]
    taken: dict[str, Any]  # what the rollout gave
    token_log: dict[int, dict[str, Any]]  # what training saw


@dataclass
class Run:
    """The loop's tools and what it remembers for the summary."""

    config: Config
    cluster: Cluster
    trackers: Trackers
    console: Console
    timer: PhaseTimer
    memory: PeakMemory
    accuracies: list[tuple[int, float]] = field(default_factory=list)  # (finished steps, accuracy of the first set)
    engine_version: int | None = None  # what the engines serve now; None before the first sync
    evaluating: tuple[int, Any] | None = None  # (finished steps, reference) of the evaluation that is under way
    trained: TrainedStep | None = None  # the step whose lines are to be written
    unsaved: int | None = None  # finished steps that no checkpoint has yet, where nothing has changed since they ended
    is_written: bool = False  # a checkpoint waits for the lines of its last step

    def evaluate(self, step: int, *, wait: bool = True) -> None:
        """Score the held-out prompts with the weights after `step` finished steps.

        Without `wait` training goes on meanwhile; `poll_evaluation` and `finish_evaluation` log the result.
        """
        if not self.config.evaluation.datasets:
            return
        self.finish_evaluation()
        self.sync_weights(step)
        self.evaluating = step, self.cluster.rollout.begin("evaluate")
        if wait:
            self.finish_evaluation()

    def poll_evaluation(self) -> None:
        """Log the evaluation under way if it has ended; never waits."""
        if self.evaluating is not None and self.cluster.rollout.has_ended(self.evaluating[1]):
            self.finish_evaluation()

    def finish_evaluation(self) -> None:
        """Wait for the evaluation under way and log it; raises what made it fail."""
        if self.evaluating is None:
            return
        (step, reference), self.evaluating = self.evaluating, None
        with self.timer.phase("evaluate"):
            metrics, samples = self.cluster.rollout.wait(reference)
        self.trackers.log(step, metrics)
        self.trackers.log_samples(step, samples, kind=EVALUATION)
        self.console.evaluation(step, metrics)
        self.accuracies.append((step, metrics[f"eval/{self.config.evaluation.datasets[0][0]}/accuracy"]))

    def sync_weights(self, version: int) -> dict[str, float]:
        """Give the engines the weights of `version` unless they have them.

        An evaluation under way is of the weights that the engines have. They keep them until it has ended, as long as
        step `version` can train on what these weights sample (--max-staleness); then it is waited for.
        """
        self.poll_evaluation()
        if version == self.engine_version:
            return {}
        if self.evaluating is not None and self.engine_version is not None:
            self.cluster.hold_back(version)
            if version <= self.engine_version + self.config.asynchrony.max_staleness:
                return {}
            self.finish_evaluation()
        with self.timer.phase("sync"):
            report = self.cluster.sync_weights(version)
        self.engine_version = version
        self.cluster.rollout.weights_are(version)
        return report

    def start_again(self, error: TrainWorkerLost) -> int:
        """After the loss of a train worker: go back to the last checkpoint; returns its finished steps."""
        self.end_step()  # its checkpoint may be written; else `rewind` takes its lines away again
        self.unsaved = None
        self.timer.abandon_step()
        with self.timer.phase("restart"):
            step = self.cluster.restart_trainers(error)
        self.engine_version = self.evaluating = None
        self.accuracies = [found for found in self.accuracies if found[0] < step]
        self.trackers.rewind(step)
        return step

    def save(self, step: int) -> None:
        """A checkpoint after `step` finished steps; `end_step` lets it be found."""
        self.unsaved = None
        with self.timer.phase("save"):
            self.cluster.save(step)
        self.is_written = True

    def end_step(self) -> None:
        """Write the lines of the step that has trained, if there is one, and then let its checkpoint be found: a run
        that continues from it finds each step logged, once, whenever this one is killed."""
        self.report()
        if self.is_written:
            with self.timer.phase("save"):
                self.publish()

    def report(self) -> None:
        """The first half of `end_step`."""
        with signals_held():
            trained, self.trained = self.trained, None
            if trained is not None:
                report_step(self, trained)

    def publish(self) -> None:
        """The second half. What was logged must outlive the machine, as the checkpoint does."""
        self.trackers.to_disk()
        self.cluster.saver.publish()
        self.is_written = False

    def save_before_leaving(self) -> None:
        """Where checkpoints are written, an error or a signal between two of them takes no finished step away."""
        step, self.unsaved = self.unsaved, None
        try:
            self.report()
        except Exception as error:  # what ended the run is what must be told
            self.console.message(f"could not log a step: {type(error).__name__}: {error}")
        if self.config.checkpoint.save_interval is None:
            return
        try:
            self.publish()
            if step is None:
                step = self.cluster.saver.complete()
            else:
                self.cluster.save(step)
                self.publish()
                self.cluster.saver.wait()
        except Exception as error:
            what = "the checkpoint that was being written" if step is None else f"the {step} finished steps"
            self.console.message(f"could not save {what}: {type(error).__name__}: {error}")
        else:
            if step is not None:
                self.console.message(
                    f"saved the {step} finished steps; --load {self.config.checkpoint_dir} goes on from there"
                )

    @property
    def reached_target(self) -> bool:
        target = self.config.train.stop_at_eval_accuracy
        return target is not None and bool(self.accuracies) and self.accuracies[-1][1] >= target

    def evaluation_is_due(self, finished: int) -> bool:
        interval = self.config.evaluation.eval_interval
        return finished == self.config.train.num_steps or (interval is not None and finished % interval == 0)

    @property
    def evaluates_in_background(self) -> bool:
        """Whether training goes on while an evaluation runs: it may, where steps may train on older weights' tokens and
        the engines do not take turns with the trainer."""
        options = self.config.asynchrony
        return options.is_continuous and not self.config.cluster.colocate


def train(run: Run) -> int:
    """Run every remaining step; returns the number of finished steps."""
    start = run.cluster.restore()
    lost: TrainWorkerLost | None = None
    while True:
        try:
            if lost is not None:
                start, lost = run.start_again(lost), None
            return train_from(run, start)
        except TrainWorkerLost as error:
            lost = error
        except BaseException:
            run.save_before_leaving()
            raise


def train_from(run: Run, start: int) -> int:
    """`train` from a number of finished steps on.

    Raises:
        TrainWorkerLost: the process of a train worker ended.
    """
    config, cluster, timer = run.config, run.cluster, run.timer
    run.sync_weights(start)
    run.evaluate(start)
    finished = start
    for step in range(start, config.train.num_steps):
        if run.reached_target:
            break
        timer.start_step(step)
        with timer.phase("rollout"):
            cluster.rollout.submit_through(step + config.rollout.rollout_ahead)
            taken = cluster.rollout.take(step)
        run.unsaved = None
        with timer.phase("train"), cluster.training():
            values = cluster.critic.train(step, taken["batch"]) if cluster.critic else None
            metrics = cluster.actor.train(step, taken["batch"], values)
        token_log = cluster.actor.token_log() if config.logging.logs_token_training else {}
        finished = step + 1
        with timer.phase("commit"):
            cluster.rollout.commit(step)
        trained = TrainedStep(step, metrics, taken, token_log)
        run.trained, run.unsaved = trained, finished
        cluster.saver.poll()
        is_due = _save_is_due(config, finished)
        if is_due and not _saves_during_rollout(config):
            run.save(finished)
        if config.train.loss != "sft":  # supervised steps need no engine; an evaluation asks for the weights itself
            trained.metrics |= run.sync_weights(finished)
        if is_due and _saves_during_rollout(config):
            run.save(finished)
        run.end_step()
        if run.evaluation_is_due(finished):
            run.evaluate(finished, wait=not run.evaluates_in_background)
    run.finish_evaluation()
    if run.unsaved is not None and config.checkpoint.save_interval is not None:  # left at --stop-at-eval-accuracy
        run.save(run.unsaved)
        run.end_step()
    with timer.phase("save"):
        cluster.saver.wait()
    return finished


def report_step(run: Run, trained: TrainedStep) -> None:
    """Log and show a step. The run's own files come first: another program may fail."""
    timing = run.timer.end_step()
    metrics = trained.metrics | trained.taken["metrics"] | timing.metrics()
    if timing.total_s > 0 and "train/tokens" in metrics:
        metrics["perf/tokens_per_s"] = metrics["train/tokens"] / timing.total_s
    metrics |= run.cluster.fault_metrics()
    metrics["perf/peak_rss_gib"] = run.memory.peak_gib
    samples = trained.taken["samples"]
    run.trackers.log_samples(trained.step, samples, trained.taken["texts"], trained.token_log)
    run.trackers.log(trained.step, metrics)
    run.console.step(trained.step, metrics, samples[0] if samples else None)


def _saves_during_rollout(config: Config) -> bool:
    """Whether trainers plan a save while engines generate already; where they share devices, trainers are away then."""
    return config.checkpoint.async_save and not config.cluster.colocate


def _save_is_due(config: Config, finished: int) -> bool:
    interval = config.checkpoint.save_interval
    return interval is not None and (finished % interval == 0 or finished == config.train.num_steps)


def run(config: Config, folder: Path) -> dict[str, Any]:
    """Start everything, train, export, report; returns what summary.json holds."""
    started = time.monotonic()
    with PeakMemory() as memory, Console.for_config(config) as console:
        trace = open_trace(config, "driver")
        mark_phase = PhaseTrace(trace)

        def on_phase(name: str | None) -> None:
            console.phase(name)
            mark_phase(name)

        timer = PhaseTimer(on_phase=on_phase)
        with ray_session(config):
            config = with_device(config)
            check_on_device(config)
            console.start(facts(config))
            for note in config_notes(config):
                console.message(f"note: {note}")
            cluster = Cluster(config)
            with timer.phase("start"):
                cluster.start()
            with cluster, make_trackers(config, cluster.checkpoint_step()) as trackers:
                state = Run(config, cluster, trackers, console, timer, memory)
                finished = train(state)
                if config.train.num_steps > 0:
                    with timer.phase("export"):
                        cluster.export(finished)
            with timer.phase("stop"):
                cluster.stop()
        summary = {
            "finished_steps": finished,
            "accuracy_before": state.accuracies[0][1] if state.accuracies else None,
            "accuracy_after": state.accuracies[-1][1] if state.accuracies else None,
            "seconds": round(time.monotonic() - started, 1),
            "peak_rss_gib": round(memory.peak_gib, 2),
            "phases_s": {name: round(seconds, 2) for name, seconds in timer.breakdown().phases_s.items()},
        }
        trace.close()
        write_trace(folder)
        from slime_rl.observability.report import write_report  # draws with matplotlib: not needed before

        (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        console.finish(outcome(config, summary, write_report(folder)))
    return summary


def facts(config: Config) -> dict[str, str]:
    """What runs, for the head of the console."""
    workers, engines = config.cluster.train_num_workers, config.cluster.rollout_num_engines
    critics = config.critic.critic_num_workers
    parts = {
        "model": f"{config.model.hf_checkpoint} ({config.model.train_dtype})",
        "training": f"{workers} Megatron worker{'s'[: workers > 1]}"
        f"{f' and {critics} of the critic' if config.critic_is_apart else ''} on {config.cluster.device}, "
        f"--loss {config.train.loss}",
        "engines": f"{engines} SGLang engine{'s'[: engines > 1]}" if config.needs_engines else "none",
        "a step": f"{config.train.rollout_batch_size} prompts x {config.train.n_samples_per_prompt} samples",
        "logs": str(config.run_dir / "logs"),
    }
    return parts


def outcome(config: Config, summary: dict[str, Any], report: Path) -> dict[str, str]:
    """What came out, for the foot of the console."""
    lines = {"report": str(report)}
    if summary["accuracy_before"] is not None:
        lines["accuracy"] = f"{summary['accuracy_before']:.3f} -> {summary['accuracy_after']:.3f}"
    if config.train.num_steps > 0:
        lines["model"] = str(config.checkpoint.hf_folder(config.run_dir, summary["finished_steps"]))
    return lines | {"time": f"{summary['seconds']:.0f} s", "peak memory": f"{summary['peak_rss_gib']:.2f} GiB"}


def main(argv: list[str] | None = None) -> int:
    """Command line: 0 after a whole run, 2 for what the user can mend, 1 for anything else."""
    keep_standard_streams()
    config = None
    try:
        checked = parse_config(argv)
        if checked.logging.dry_run:
            text, ready = dry_run(checked)
            say(text)
            return 0 if ready else 2
        leave_on_signals()
        preflight(checked)
        with run_folder(checked) as folder:
            config = checked
            run(config, folder)
    except (Exception, KeyboardInterrupt, Terminated) as error:
        if (number := signal_behind(error)) is not None:
            how = "interrupted" if number == signal.SIGINT else "ended by SIGTERM"
            say(f"slime_rl: {how}; nothing is left running", sys.stderr)
            return 128 + number
        message, is_users = explain(error)
        say(f"slime_rl: {message}", sys.stderr)
        if config is not None or not is_users:
            folder = Path() if config is None else config.run_dir
            say(f"slime_rl: {write_error_log(folder, error)}", sys.stderr)
        return 2 if is_users else 1
    return 0


if __name__ == "__main__":
    exit_with(main())
