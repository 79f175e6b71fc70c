"""The command line: `longstraw train`, `longstraw report`. The last line of defence turns errors into one sentence."""

from __future__ import annotations

import os
import shlex
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from longstraw.config import RunConfig
from longstraw.config_file import load_config
from longstraw.errors import InputError, JointError, LongStrawError

if TYPE_CHECKING:
    from longstraw.training.ranks import Ranks

USER_ERROR = 2
INTERRUPTED = 130
SECONDS_TO_TELL = 20.0

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="GRPO on very long prompts with a fixed number of GPUs and the exact gradient.",
)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line. A `LongStrawError` is printed as one red sentence and exits with status 2."""
    try:
        app(args=arguments)
    except LongStrawError as error:
        if isinstance(error, JointError) and _Launched.from_environment().rank > 0:
            # What all ranks raise, the first one tells; its end ends the job. If another ended earlier, nobody would.
            time.sleep(SECONDS_TO_TELL)
        else:
            Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(USER_ERROR)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"longstraw {version('longstraw')}")
        raise typer.Exit()


@dataclass(frozen=True)
class _Launched:
    """What torchrun says of this process. Read here and nowhere else."""

    num_processes: int = 1
    rank: int = 0
    local_rank: int = 0

    def command(self) -> list[str]:
        """How `longstraw` is started as it was."""
        if self.num_processes == 1:
            return ["longstraw"]
        return ["torchrun", "--nproc-per-node", str(self.num_processes), "-m", "longstraw"]

    @classmethod
    def from_environment(cls) -> _Launched:
        names = ("WORLD_SIZE", "RANK", "LOCAL_RANK")
        return cls(*(int(os.environ[name]) for name in names)) if all(name in os.environ for name in names) else cls()


@app.callback()
def options(
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """GRPO on very long prompts with a fixed number of GPUs and the exact gradient."""


@app.command()
def train(
    config_path: Annotated[Path, typer.Argument(metavar="RUN_YAML", help="The run's configuration.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a setting; may be given several times."),
    ] = None,
    is_resumed: Annotated[bool, typer.Option("--resume", help="Go on from the run's latest checkpoint.")] = False,
    resume_from: Annotated[
        Path | None, typer.Option("--resume-from", metavar="CHECKPOINT", help="Go on from this checkpoint folder.")
    ] = None,
) -> None:
    """Train a policy by GRPO as a configuration file says."""
    launched = _Launched.from_environment()
    config = _load_config(config_path, overrides or [], launched)
    folder = Path(config.run.output_dir)
    sys.path.insert(0, str(Path.cwd()))  # a console script does not look there for reward functions' modules
    try:
        _train(config, launched, is_resumed=is_resumed or resume_from is not None, resume_from=resume_from)
    except KeyboardInterrupt:
        if launched.rank > 0:
            raise typer.Exit(INTERRUPTED) from None
        again = [*launched.command(), "train", str(config_path)]
        again += [word for override in overrides or [] for word in ("--set", override)]
        typer.echo(_interrupted(folder, shlex.join([*again, "--resume"])))
        raise typer.Exit(INTERRUPTED) from None
    if launched.rank == 0:
        typer.echo(f"report: {_write_report(folder)}")


@app.command()
def report(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="The folder a training run has written.")],
) -> None:
    """Write report.html from what a run has left so far."""
    typer.echo(_write_report(run_folder))


def _load_config(path: Path, overrides: list[str], launched: _Launched) -> RunConfig:
    """The configuration, if it fits the processes that were started. All ranks read the same; the first one tells."""
    try:
        config = load_config(path, overrides)
        _check_processes(config, launched, path)
    except InputError as error:
        raise JointError(str(error)) from error
    return config


def _check_processes(config: RunConfig, launched: _Launched, path: Path) -> None:
    parallel = config.parallel
    if launched.num_processes > 1 and ":" in config.model.device:
        raise InputError(
            f"configuration: model.device ({config.model.device}) is one device, but each of the "
            f"{launched.num_processes} processes takes one of its own; set it to cuda, cpu or auto."
        )
    if parallel.num_processes == launched.num_processes:
        return
    raise InputError(
        f"configuration: parallel.context ({parallel.context}) times parallel.data ({parallel.data}) is "
        f"{parallel.num_processes} processes, but there are {launched.num_processes}; change them, or start "
        f"torchrun --nproc-per-node {parallel.num_processes} -m longstraw train {path} (with --nnodes on several "
        "machines)."
    )


@contextmanager
def _process_group(config: RunConfig, launched: _Launched) -> Iterator[Ranks]:
    """The job's ranks: NCCL between CUDA devices, gloo between CPUs; of one process, itself."""
    import torch
    import torch.distributed as dist

    from longstraw.parallel.topology import Topology
    from longstraw.training.ranks import Ranks

    if launched.num_processes == 1:
        yield Ranks()
        return
    on_cuda = config.model.device.startswith("cuda") or (config.model.device == "auto" and torch.cuda.is_available())
    if on_cuda:
        torch.cuda.set_device(launched.local_rank)
    parallel = config.parallel
    timeout = timedelta(seconds=parallel.timeout_seconds)
    dist.init_process_group("nccl" if on_cuda else "gloo", timeout=timeout)
    try:
        yield Ranks(
            Topology.create(
                context=parallel.context,
                data=parallel.data,
                expert=parallel.expert,
                token_order=parallel.token_order,
                compares_copies=parallel.compare_parameters,
                timeout=timeout,
            )
        )
    except JointError:
        dist.destroy_process_group()
        raise
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise LongStrawError(
            f"rank {launched.rank} lost another rank, which ended, was killed or did not answer within "
            f"parallel.timeout_seconds ({parallel.timeout_seconds:g}); its own message says why. What was saved before "
            "is whole: if there is a checkpoint, --resume goes on from it."
        ) from error
    # After any other error this process just ends: others may wait for it in a collective, and so would the group.
    dist.destroy_process_group()


def _train(config: RunConfig, launched: _Launched, *, is_resumed: bool, resume_from: Path | None) -> None:
    # Imported late: `longstraw --version` and a wrong configuration need no torch.
    import torch

    from longstraw.execution.progress import Silent
    from longstraw.models.loading import silence_warnings
    from longstraw.training.loop import train as train_loop
    from longstraw.training.progress import stage_display
    from longstraw.training.setup import Surroundings, prepare

    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    if launched.rank > 0:
        warnings.simplefilter("ignore")  # the first rank has the same to say
        silence_warnings()
    console = Console(highlight=False, soft_wrap=True)

    def say(text: str) -> None:
        if launched.rank == 0:
            console.print(text, markup=False)

    shown = stage_display(console) if launched.rank == 0 else nullcontext(Silent())
    with _process_group(config, launched) as ranks, shown as display:
        surroundings = Surroundings(
            say=say, display=display, is_resumed=is_resumed, resume_from=resume_from, ranks=ranks
        )
        train_loop(*prepare(config, surroundings))


def _write_report(run_folder: Path) -> Path:
    from longstraw.report.html import write_report

    return write_report(run_folder)


def _interrupted(run_folder: Path, command: str) -> str:
    latest = run_folder / "checkpoints" / "latest"
    if not latest.is_file():
        return "interrupted before the first checkpoint; nothing to resume from was saved."
    name = latest.read_text(encoding="utf-8").strip()
    return f"interrupted; the last checkpoint is {name}. Go on with: {command}"
