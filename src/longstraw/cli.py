"""The command line: `longstraw train`, `longstraw report`. The last line of defence turns errors into one sentence."""

from __future__ import annotations

import shlex
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from longstraw.config import RunConfig
from longstraw.config_file import load_config
from longstraw.errors import LongStrawError

USER_ERROR = 2
INTERRUPTED = 130

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
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(USER_ERROR)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"longstraw {version('longstraw')}")
        raise typer.Exit()


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
    config = load_config(config_path, overrides or [])
    folder = Path(config.run.output_dir)
    sys.path.insert(0, str(Path.cwd()))  # a console script does not look there for reward functions' modules
    try:
        _train(config, is_resumed=is_resumed or resume_from is not None, resume_from=resume_from)
    except KeyboardInterrupt:
        again = ["longstraw", "train", str(config_path)]
        again += [word for override in overrides or [] for word in ("--set", override)]
        typer.echo(_interrupted(folder, shlex.join([*again, "--resume"])))
        raise typer.Exit(INTERRUPTED) from None
    typer.echo(f"report: {_write_report(folder)}")


@app.command()
def report(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="The folder a training run has written.")],
) -> None:
    """Write report.html from what a run has left so far."""
    typer.echo(_write_report(run_folder))


def _train(config: RunConfig, *, is_resumed: bool, resume_from: Path | None) -> None:
    # Imported late: `longstraw --version` and a wrong configuration need no torch.
    import torch

    from longstraw.training.loop import train as train_loop
    from longstraw.training.progress import stage_display
    from longstraw.training.setup import Surroundings, prepare

    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    console = Console(highlight=False, soft_wrap=True)

    def say(text: str) -> None:
        console.print(text, markup=False)

    with stage_display(console) as display:
        surroundings = Surroundings(say=say, display=display, is_resumed=is_resumed, resume_from=resume_from)
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
