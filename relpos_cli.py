"""The `relpos` command. Thin: every command reads its arguments, imports relpos, calls one function, prints.

relpos (and with it torch) is imported only inside a command, so that `relpos --help` answers at once.

A mistake of the user is a `relpos.UserError`: one message on stderr, exit status 2, no traceback. Interrupting exits
with 130. To add a command, write a function with `@app.command()` below, in the place where readers would look for it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(
    name="relpos",
    help="Relative positional encodings: list them, train with them, test them at length, and see what each head does.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        from relpos import __version__

        print(f"relpos {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
    plugin: Annotated[
        Optional[list[Path]], typer.Option("--plugin", metavar="FILE", help="A Python file with an encoding of your own; may be given again.")
    ] = None,
) -> None:
    if plugin:
        from relpos.encodings import load_file

        for path in plugin:
            load_file(path)


def _print(thing: Any) -> None:
    # Piped output keeps whole lines; only a terminal wraps.
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(thing)


# Encodings ------------------------------------------------------------------------------------------------------------


@app.command()
def encodings(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List every encoding: formula, parameters, directions, implementations, paper."""
    from relpos.describe import table

    rows = table()
    if as_json:
        import dataclasses
        import json

        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=2, default=str))
        return
    shown = Table(title="Encodings (parameters of a whole GPT-2 Small)", title_justify="left")
    for column in ("name", "formula", "parameters", "directions", "implementations", "paper"):
        shown.add_column(column, justify="right" if column == "parameters" else "left", overflow="fold")
    for row in rows:
        count = f"{row.parameters:,}"
        shown.add_row(
            row.name, row.formula, count, row.directions, ", ".join(row.implementations), row.paper.removeprefix("https://")
        )
    _print(shown)


@app.command()
def info(
    what: Annotated[str, typer.Argument(metavar="SPEC|RUN", help="An encoding such as 't5:form=clipped', or a folder with a model.")],
) -> None:
    """Show one encoding, or the encodings of a trained model: formula, options, parameters, implementations."""
    from relpos.describe import info as collect

    for heading, rows in collect(what):
        grid = Table(title=heading, title_justify="left", show_header=False, box=None, pad_edge=False)
        grid.add_column(style="bold", no_wrap=True)
        grid.add_column(overflow="fold")
        for key, value in rows:
            grid.add_row(key, value)
        _print(grid)
        print()


# Data, training, evaluation -------------------------------------------------------------------------------------------


# Captures and figures -------------------------------------------------------------------------------------------------


@app.command()
def figure(
    sources: Annotated[
        Optional[list[str]],
        typer.Argument(metavar="[MODEL|CAPTURE|SPEC]...", help="A model folder, a capture file or an encoding; none draws the captures that ship with relpos."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("figures"),
    length: Annotated[int, typer.Option(help="Tokens; up to 16384.")] = 512,
) -> None:
    """Draw what every head does with position."""
    from relpos.figures import write

    for path in write(sources or [], out=out, length=length):
        print(path)


# Study and explorer ---------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> None:
    """Entry point: runs the command and turns mistakes of the user into one message and exit status 2."""
    command = typer.main.get_command(app)
    try:
        status = command.main(args=arguments, prog_name="relpos", standalone_mode=False)
        sys.exit(status if isinstance(status, int) else 0)
    except typer.Exit as error:
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except BrokenPipeError:  # `relpos encodings | head`
        sys.stderr.close()
        sys.exit(0)
    except Exception as error:
        if hasattr(error, "format_message"):  # click's own; typer carries a private copy of click in some versions
            _fail(error.format_message(), "Try 'relpos --help'." if hasattr(error, "ctx") else "")
        errors = sys.modules.get("relpos.errors")
        if errors is None or not isinstance(error, errors.UserError):
            raise
        _fail(str(error))


def _fail(message: str, hint: str = "") -> None:
    print(f"relpos: {message}" + (f" {hint}" if hint else ""), file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
