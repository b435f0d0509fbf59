"""The `relpos` command. Thin: every command reads its arguments, imports relpos, calls one function, prints.

relpos (and with it torch) is imported only inside a command, so that `relpos --help` answers at once.

A mistake of the user is a `relpos.UserError`: one message on stderr, exit status 2, no traceback. Interrupting exits
with 130, a pipe whose reader has gone, or a closed stdout, with 141. To add a command, write a function with
`@app.command()` below, in the place where readers would look for it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

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
        # Read, not imported: the answer should not wait for torch.
        source = (Path(__file__).parent / "relpos" / "__init__.py").read_text(encoding="utf-8")
        print("relpos", source.partition('__version__ = "')[2].partition('"')[0])
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    plugin: Annotated[
        list[Path] | None,
        typer.Option(
            "--plugin", metavar="FILE", help="A Python file with an encoding of your own; may be given again."
        ),
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
        cells = (row.name, row.formula, f"{row.parameters:,}", row.directions, ", ".join(row.implementations))
        shown.add_row(*map(Text, (*cells, row.paper.removeprefix("https://"))))  # Text: [d] is no markup
    _print(shown)


@app.command()
def info(
    what: Annotated[
        str, typer.Argument(metavar="SPEC|RUN", help="An encoding such as 't5:form=clipped', or a folder with a model.")
    ],
) -> None:
    """Show one encoding, or the encodings of a trained model: formula, options, parameters, implementations."""
    from relpos.describe import info as collect

    for heading, rows in collect(what):
        grid = Table(title=Text(heading), title_justify="left", show_header=False, box=None, pad_edge=False)
        grid.add_column(style="bold", no_wrap=True)
        grid.add_column(overflow="fold")
        for key, value in rows:
            grid.add_row(Text(key), Text(value))
        _print(grid)
        print()


# Data, training, evaluation -------------------------------------------------------------------------------------------


data_app = typer.Typer(help="Turn text into token shards.", no_args_is_help=True)
app.add_typer(data_app, name="data")


@data_app.command("prepare")
def data_prepare(
    source: Annotated[
        str,
        typer.Argument(
            help="A text file, a folder, .jsonl, .parquet, a token stream (.bin, .bin.xz), owner/dataset, or stdlib."
        ),
    ] = "stdlib",
    tokenizer: Annotated[
        str | None, typer.Option(help="bytes, bpe:4096, a tiktoken-style rank file, or a tokenizer folder.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the shards.")] = Path("data/tokens"),
    eot: Annotated[int | None, typer.Option(help="The token that ends a document.")] = None,
    field: Annotated[str, typer.Option(help="JSONL field, Parquet or dataset column with the text.")] = "text",
    separator: Annotated[
        str, typer.Option(help="What lies between the documents of a text file; escapes such as \\n work.")
    ] = "\\0",
    split: Annotated[str, typer.Option(help="Split of a Hugging Face dataset.")] = "train",
    config: Annotated[str | None, typer.Option(help="Configuration of a Hugging Face dataset.")] = None,
    validation: Annotated[float, typer.Option(help="Share of the documents kept for validation.")] = 0.01,
    max_tokens: Annotated[int | None, typer.Option(help="Stop after so many tokens.")] = None,
    shard_tokens: Annotated[int, typer.Option(help="Tokens per shard file.")] = 1 << 26,
    workers: Annotated[int | None, typer.Option(help="Threads that encode; all cores unless given.")] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace the data already in the folder.")] = False,
) -> None:
    """Tokenize a corpus into shards for `relpos train`. Killed, the same command goes on where it was."""
    from relpos.data import prepare
    from relpos.data.prepare import describe, unescape

    made = prepare(
        source,
        out,
        tokenizer or (None if eot is not None else "bytes"),
        eot=eot,
        field=field,
        separator=unescape(separator),
        split=split,
        config=config,
        validation=validation,
        max_tokens=max_tokens,
        shard_tokens=shard_tokens,
        workers=workers,
        overwrite=overwrite,
        progress=True,
    )
    print(describe(made))


@data_app.command("check")
def data_check(folder: Annotated[Path, typer.Argument(metavar="DIR", help="Prepared data.")]) -> None:
    """Compare every shard of prepared data with its checksum."""
    from relpos.data import TokenData
    from relpos.data.prepare import describe

    made = TokenData(folder)
    made.verify()
    print(f"{describe(made)}\nevery checksum matches")


@app.command()
def train(
    context: typer.Context,
    encoding: Annotated[
        list[str], typer.Option(help="Such as 't5:form=clipped'; several, with commas or given again: trained in turn.")
    ] = ["kerple"],  # noqa: B006 - typer reads it
    size: Annotated[str, typer.Option(help="nano (a laptop), tiny, small or medium.")] = "nano",
    data: Annotated[
        Path | None, typer.Option(help="Folder of `relpos data prepare`; the standard library's source unless given.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; runs/ENCODING-SIZE unless given.")] = None,
    task: Annotated[str, typer.Option(help="clm (a GPT) or mlm (an encoder).")] = "clm",
    length: Annotated[int | None, typer.Option(help="Tokens in a window.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    tokens_per_step: Annotated[int | None, typer.Option(help="Tokens in a step, over all devices.")] = None,
    rows: Annotated[int | None, typer.Option(help="Windows per device and pass; the rest is accumulated.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    warmup: Annotated[int | None, typer.Option(help="Steps of linear warm-up.")] = None,
    seed: Annotated[int, typer.Option(help="Of the initial weights and the order of the data.")] = 0,
    documents: Annotated[bool, typer.Option(help="Keep attention within documents.")] = False,
    vocab_size: Annotated[int | None, typer.Option(help="Rows of the embedding; from the data unless given.")] = None,
    init_from: Annotated[
        Path | None, typer.Option(help="Start from a relpos model, a GPT-2 or a BERT, with the encoding swapped.")
    ] = None,
    decay_encodings: Annotated[bool, typer.Option(help="Decay the encodings' matrices too, as the paper did.")] = False,
    impl: Annotated[str, typer.Option(help="How attention is computed: auto, reference, blockwise or fused.")] = "auto",
    compile: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="torch.compile; on a GPU unless told otherwise.")
    ] = None,
    fsdp: Annotated[bool, typer.Option(help="Shard the model over the GPUs (FSDP2).")] = False,
    resume: Annotated[bool, typer.Option(help="Go on from the last complete checkpoint of --out.")] = False,
    overwrite: Annotated[bool, typer.Option(help="Replace the run in --out.")] = False,
    config: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="A field of the model's config; may be given again."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any field of TrainingArguments; may be given again."),
    ] = None,
) -> None:
    """Train a model with any encoding. With no arguments: a small one, on this machine, in a few minutes."""
    from relpos.encodings import build, split_list
    from relpos.training import Settings
    from relpos.training import train as run
    from relpos.training.presets import parse_config, parse_overrides

    values: dict[str, Any] = {k: str(v) if isinstance(v, Path) else v for k, v in context.params.items()}
    specs = split_list(encoding)
    for spec in specs:
        build(spec)  # each by itself: joined, what is no encoding would be an option of the one before
    values["encoding"] = ",".join(specs)
    values["overrides"] = parse_overrides(values.pop("set_") or [])
    values["config"] = parse_config(values["config"] or [])
    again, replace = values.pop("resume"), values.pop("overwrite")
    given = {k for k in values if str(context.get_parameter_source(k)).endswith("COMMANDLINE")}
    given |= {"overrides"} if values["overrides"] else set()
    folders = run(Settings(**values), resume=again, overwrite=replace, given=given)
    if os.environ.get("RANK", "0") == "0":
        print(*folders, sep="\n")


# Evaluation -----------------------------------------------------------------------------------------------------------


def _whole_numbers(text: str, what: str) -> tuple[int, ...]:
    """`512,1024` or `512 1k 2k`: whole numbers, with k for 1024."""
    from relpos.errors import UserError

    found = []
    for part in text.replace(",", " ").split():
        scale = 1024 if part[-1:] in "kK" else 1
        digits = part[:-1] if scale > 1 else part
        if not digits.isdecimal() or int(digits) < 1:
            raise UserError(f"{what}: {part!r} is not a whole number of tokens; write {what} 512,1024,2048")
        found.append(int(digits) * scale)
    return tuple(found)


def _quiet_transformers() -> None:
    """Loading bars and advice of transformers would break our own progress bar."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def _first_process() -> bool:
    import os

    return os.environ.get("RANK", "0") == "0"


def _finish(outcomes: list[Any]) -> None:
    """Say what is missing; exit status 2 where anything is that the user asked for."""
    failed = [outcome for outcome in outcomes if not outcome.complete()]
    if _first_process():
        for outcome in outcomes:
            if outcome.file is not None:
                print(outcome.file)
        for outcome in failed:
            why = outcome.error or f"some lengths were not measured; {outcome.file} says why"
            print(f"relpos: {outcome.path}: {why}", file=sys.stderr)
    if failed:
        raise typer.Exit(2)


_Runs = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN...", help="Folders with a model: a run of `relpos train`, or any causal model of transformers."
    ),
]
_Lengths = Annotated[str, typer.Option(help="Window lengths in tokens, by commas; 16k means 16384.")]
_Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
_Dtype = Annotated[
    str, typer.Option(help="auto (float32 on a CPU, bfloat16 on a GPU), float32, bfloat16, float16, float64.")
]
_Impl = Annotated[str | None, typer.Option(help="How our models attend: auto, reference, blockwise, fused.")]
_Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace results that were made with other settings.")]


@app.command()
def evaluate(
    runs: _Runs,
    data: Annotated[
        Path, typer.Option(help="A folder of `relpos data prepare`, a token stream (.bin, .bin.xz) or a text file.")
    ],
    lengths: _Lengths = "512,1024,2048,4096,8192,16384",
    protocol: Annotated[str, typer.Option(help="blocks, sliding, last; several by commas.")] = "blocks,last",
    out: Annotated[Path, typer.Option(help="Folder for one JSON per model.")] = Path("evaluation"),
    split: Annotated[str, typer.Option(help="Of a prepared folder: validation, train or all.")] = "validation",
    documents: Annotated[
        str, typer.Option(help="stream: windows cross document borders; separate: they do not.")
    ] = "stream",
    min_document: Annotated[int, typer.Option(help="With separate documents: leave out those with fewer tokens.")] = 2,
    stride: Annotated[
        int | None, typer.Option(help="sliding: tokens between windows; half the shortest length.")
    ] = None,
    last: Annotated[int | None, typer.Option(help="last: how many tokens of each window count; 256.")] = None,
    every: Annotated[
        int | None, typer.Option(help="last: tokens between window ends; a quarter of the longest length.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Use only the first so many tokens of the text.")] = None,
    eot: Annotated[
        int | None, typer.Option(help="Token that ends a document in a token stream; the tokenizer's.")
    ] = None,
    bos: Annotated[bool, typer.Option("--bos", help="Begin every window with the beginning-of-text token.")] = False,
    device: _Device = "auto",
    dtype: _Dtype = "auto",
    impl: _Impl = None,
    batch_tokens: Annotated[
        int | None, typer.Option(help="Tokens read together; 8192 on a CPU, 65536 on a GPU.")
    ] = None,
    overwrite: _Overwrite = False,
) -> None:
    """Perplexity by length, with 95% intervals, under protocols that the result states.

    A killed evaluation goes on when the same command is run again. Under torchrun the processes share the windows. Exit
    status 2 if a model or a length could not be measured; a length beyond a learned table is a dash, not a failure.
    """
    from relpos.evaluation import Settings, evaluate_folders

    _quiet_transformers()
    settings = Settings(
        lengths=_whole_numbers(lengths, "--lengths"),
        protocols=tuple(part.strip() for part in protocol.split(",") if part.strip()),
        stride=stride,
        last=last,
        every=every,
        documents=documents,
        min_document=min_document,
    )
    _finish(
        evaluate_folders(
            runs,
            data,
            out,
            settings,
            split=split,
            eot=eot,
            max_tokens=max_tokens,
            device=device,
            dtype=dtype,
            impl=impl,
            bos=bos,
            batch_tokens=batch_tokens,
            overwrite=overwrite,
        )  # fmt: skip
    )


@app.command()
def compare(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Results of evaluate and passkey, or folders of them.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the tables and plots.")] = Path("comparison"),
    labels: Annotated[
        str | None, typer.Option(help="Names of the columns, by commas; the encodings by default.")
    ] = None,
    format: Annotated[str, typer.Option(help="Formats of the plots: png, pdf, svg.")] = "png,pdf,svg",
) -> None:
    """The paper's table (Markdown, CSV, LaTeX) and plots from any number of result files."""
    from relpos.evaluation import compare as tables
    from relpos.figures import curves

    formats = curves.formats_of(format)
    comparison = tables.load(list(files), [part.strip() for part in labels.split(",")] if labels else None)
    for path in tables.write(comparison, out):
        print(path)
    for path in curves.write(comparison.perplexity, comparison.passkey, out, formats):
        print(path)
    for warning in comparison.warnings:
        print(f"relpos: {warning}", file=sys.stderr)
    if comparison.unread:
        for message in comparison.unread:
            print(f"relpos: {message}", file=sys.stderr)
        raise typer.Exit(2)


@app.command()
def passkey(
    runs: _Runs,
    lengths: _Lengths = "512,1024,2048,4096",
    depths: Annotated[
        str, typer.Option(help="Where the key stands, 0 (beginning) to 1 (end), by commas.")
    ] = "0,0.25,0.5,0.75,1",
    keys: Annotated[int, typer.Option(help="Prompts per cell.")] = 2,
    seed: Annotated[int, typer.Option(help="Draws the keys.")] = 0,
    filler: Annotated[
        Path | None, typer.Option(help="A text file to hide the key in; repeated sentences by default.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for one JSON and one heat map per model.")] = Path("evaluation"),
    format: Annotated[str, typer.Option(help="Formats of the heat map: png, pdf, svg.")] = "png",
    device: _Device = "auto",
    dtype: _Dtype = "auto",
    impl: _Impl = None,
    overwrite: _Overwrite = False,
) -> None:
    """Is a number said once, far back, still found? A grid of length x depth, scored without generation."""
    from relpos import figures
    from relpos.errors import UserError
    from relpos.evaluation.passkey import Grid, passkey_folders
    from relpos.figures import curves

    _quiet_transformers()
    formats = curves.formats_of(format)
    try:
        where = tuple(float(part) for part in depths.split(",") if part.strip())
    except ValueError:
        raise UserError(f"--depths: {depths!r} is not a list of numbers; write --depths 0,0.5,1") from None
    grid = Grid(_whole_numbers(lengths, "--lengths"), where, keys, seed)
    outcomes = passkey_folders(
        runs, out, grid, filler=filler, device=device, dtype=dtype, impl=impl, overwrite=overwrite
    )
    if _first_process():
        for outcome in outcomes:
            if outcome.value is not None:
                for path in figures.save(
                    curves.passkey([(outcome.name, outcome.value)]), out, f"{outcome.name}.passkey", formats
                ):
                    print(path)
    _finish(outcomes)


@app.command()
def harness(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A folder with a model.")],
    tasks: Annotated[str, typer.Option(help="Tasks of the lm-evaluation-harness, by commas.")],
    out: Annotated[Path | None, typer.Option(help="Write the results to this JSON file.")] = None,
    include: Annotated[Path | None, typer.Option(help="A folder with task files of your own.")] = None,
    limit: Annotated[float | None, typer.Option(help="Only so many samples of each task.")] = None,
    num_fewshot: Annotated[int | None, typer.Option(help="Examples before each question.")] = None,
    batch_size: Annotated[int, typer.Option(help="Samples read together.")] = 1,
    max_length: Annotated[int | None, typer.Option(help="Cut longer inputs; no cap by default.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the harness.")] = 0,
    device: _Device = "auto",
    dtype: _Dtype = "auto",
    impl: _Impl = None,
) -> None:
    """Run tasks of the lm-evaluation-harness with no length cap. Needs the extra `eval`."""
    from relpos.evaluation.harness import harness as measure

    _quiet_transformers()
    value = measure(
        run, [part.strip() for part in tasks.split(",") if part.strip()], out=out, include=include, limit=limit,
        num_fewshot=num_fewshot, batch_size=batch_size, max_length=max_length, device=device, dtype=dtype, impl=impl,
        seed=seed,
    )  # fmt: skip
    shown = Table(title=f"{run}, inputs up to {value['max_length']} tokens", title_justify="left")
    for column in ("task", "measure", "value", "stderr"):
        shown.add_column(column, justify="right" if column in ("value", "stderr") else "left")
    for task, scores in value["results"].items():
        for key, score in scores.items():
            if isinstance(score, float) and "," in key and "_stderr" not in key:
                name, _, kind = key.partition(",")
                error = scores.get(f"{name}_stderr,{kind}")
                shown.add_row(task, name, f"{score:.4g}", f"{error:.2g}" if isinstance(error, float) else "")
    _print(shown)
    if out is not None:
        print(out)


# Captures and figures -------------------------------------------------------------------------------------------------


@app.command()
def figure(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL|CAPTURE|SPEC]...",
            help="A model folder, a capture file or an encoding; none draws the captures that ship with relpos.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("figures"),
    layer: Annotated[int, typer.Option(help="Layer, from 0, or from the end: -1 is the last.")] = -1,
    heads: Annotated[str, typer.Option(help="all, or numbers from 1: 1,3,5-8.")] = "all",
    kind: Annotated[
        str | None, typer.Option(help="bias, scores or weights; by default bias where there is one, else scores.")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="Text a model reads; by default the one relpos brings.")] = None,
    length: Annotated[
        int | None, typer.Option(help="Tokens, up to 16384; by default 512, or a capture's own length.")
    ] = None,
    format: Annotated[str, typer.Option(help="png, pdf, svg, with commas between them.")] = "png,pdf",
    view: Annotated[
        str,
        typer.Option(help="maps, profile (against distance), window (and entropy), difference (of two), training."),
    ] = "maps",
    checkpoints: Annotated[
        bool, typer.Option("--checkpoints", help="The same heads through training: short for --view training.")
    ] = False,
    shared: Annotated[bool, typer.Option("--shared", help="One colour range for all heads.")] = False,
) -> None:
    """Draw what every head does with position: pictures, and the numbers beside them as NAME.npz."""
    from relpos.figures import write

    written = write(
        sources or [],
        out=out,
        layer=layer,
        heads=heads,
        kind=kind,
        text=text,
        length=length,
        format=format,
        view=view,
        checkpoints=checkpoints,
        shared=shared,
        progress=True,
    )
    for path in written:
        print(path)


@app.command()
def capture(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A folder with a model: ours, or of a supported family.")],
    out: Annotated[Path, typer.Option(help="The file to write.")],
    text: Annotated[Path | None, typer.Option(help="Text the model reads; by default the one relpos brings.")] = None,
    layers: Annotated[str, typer.Option(help="last, all, or numbers from 0 with commas between them.")] = "last",
    length: Annotated[int, typer.Option(help="Tokens of the text.")] = 512,
    content: Annotated[bool, typer.Option(help="Keep q and k of the captured layers: for scores and weights.")] = False,
    half: Annotated[bool, typer.Option("--half", help="Keep q, k and large matrices in float16.")] = False,
    note: Annotated[str | None, typer.Option(help="A remark for the caption.")] = None,
) -> None:
    """Keep what pictures of a model need, in one small safetensors file (docs/capture.md)."""
    from relpos.capture.model import capture_run

    made = capture_run(
        run, out, text=text, layers=layers, length=length, content=content, half=half, note=note, progress=True
    )
    held = f"layer{'s' * (len(made.layers) > 1)} {', '.join(map(str, made.layers))} (0 to {made.num_layers - 1})"
    print(f"{out}: {made.title}, {made.length} tokens, {held}")


# Study and explorer ---------------------------------------------------------------------------------------------------


@app.command()
def study(
    data: Annotated[Path, typer.Option(help="Folder of `relpos data prepare` to train on.")],
    eval_data: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR|FILE",
            help="Text to test on, a prepared folder or a token stream; may be given again. The validation split of "
            "--data unless given.",
        ),
    ] = None,
    size: Annotated[str, typer.Option(help="nano, tiny, small or medium.")] = "small",
    length: Annotated[int, typer.Option(help="Tokens in a training window.")] = 512,
    tokens: Annotated[str, typer.Option(help="Tokens that each model reads: 96M, 1.5B.")] = "96M",
    dense_tokens: Annotated[
        str | None,
        typer.Option(help="The same for encodings that cannot be fused and those they build on; an eighth."),
    ] = None,
    encodings: Annotated[
        list[str] | None,
        typer.Option(help="Encodings, with commas or given again; the fourteen of docs/study.md unless given."),
    ] = None,
    seeds: Annotated[str, typer.Option(help="Whole numbers with commas between them: a model for each.")] = "0",
    out: Annotated[Path, typer.Option(help="Folder for one JSON and one capture per model.")] = Path("results/study"),
    lengths: _Lengths = "512,1024,2048,4096,8192,16384",
    tokens_per_step: Annotated[int, typer.Option(help="Tokens in an optimizer step.")] = 65_536,
    learning_rate: Annotated[float | None, typer.Option(help="Peak learning rate; the size's.")] = None,
    eval_tokens: Annotated[int, typer.Option(help="Use so many tokens of each test text.")] = 262_145,
    rows: Annotated[int | None, typer.Option(help="Windows per pass; as many as a large GPU holds.")] = None,
    compile: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="torch.compile; on a GPU unless told otherwise.")
    ] = None,
    keep_weights: Annotated[bool, typer.Option("--keep-weights", help="Keep the models in OUT/weights.")] = False,
    time_limit: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Start nothing that would likely end later than this.")
    ] = None,
    ahead: Annotated[
        int | None, typer.Option(help="Models that get ready (compile) while one trains: 1, and 0 without a GPU.")
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="A field of the models' config; may be given again."),
    ] = None,
) -> None:
    """Train, test and capture one model with each of many encodings. Run again, it goes on with what is missing."""
    from relpos import study as whole
    from relpos.encodings import split_list
    from relpos.errors import UserError
    from relpos.training.presets import parse_config

    _quiet_transformers()
    numbers = [part.strip() for part in seeds.split(",") if part.strip()]
    if not all(part.isdecimal() for part in numbers):
        raise UserError(f"--seeds: {seeds!r} is not a list of whole numbers; write --seeds 0,1,2")
    outcomes = whole.run(
        whole.Study(
            data=str(data),
            eval_data=tuple(map(str, eval_data or ())),
            out=str(out),
            size=size,
            length=length,
            tokens=whole.parse_count(tokens, "--tokens"),
            dense_tokens=whole.parse_count(dense_tokens, "--dense-tokens") if dense_tokens else None,
            encodings=tuple(split_list(encodings)) if encodings else whole.ENCODINGS,
            seeds=tuple(map(int, numbers)),
            tokens_per_step=tokens_per_step,
            learning_rate=learning_rate,
            lengths=_whole_numbers(lengths, "--lengths"),
            eval_tokens=eval_tokens,
            rows=rows,
            compile=compile,
            keep_weights=keep_weights,
            time_limit=time_limit,
            ahead=ahead,
            config=parse_config(config or []),
        )
    )
    for outcome in outcomes:
        note = f": {outcome.error}" if outcome.error else ""
        print(f"{outcome.status:6}  {outcome.job}{note}")
    if any(outcome.status == "left" for outcome in outcomes):
        print("relpos: there was no time for all; the same command goes on with what is missing", file=sys.stderr)
    if any(outcome.status == "failed" for outcome in outcomes):
        raise typer.Exit(2)


@app.command()
def explore(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN|CAPTURE|HF_DIR]...",
            help="Model folders, capture files, encodings, result files; none shows the captures that ship.",
        ),
    ] = None,
    export: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write one self-contained HTML file instead of serving.")
    ] = None,
    layers: Annotated[
        str, typer.Option(help="Layers in an exported file: held (with their text), last or all.")
    ] = "held",
    length: Annotated[int | None, typer.Option(help="Tokens that models and encodings are shown on.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; others than this machine's are seen by others.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port; 8737, or a free one.")] = None,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the browser.")] = True,
) -> None:
    """Look at position in a browser: every head, any text, two models side by side, an encoding playground."""
    from relpos.explorer import Library, serve

    if export is not None:
        from relpos.explorer.export import page
        from relpos.files import check_place, write_text

        check_place(export)
        print(write_text(export, page(Library(sources or [], length=length), layers=layers, progress=True)))
        return
    serve(sources or [], length=length, host=host, port=port, browser=browser)


def main(arguments: list[str] | None = None) -> None:
    """Entry point: runs the command and turns mistakes of the user into one message and exit status 2."""
    if sys.stdout is None:
        _without_stdout()
    command = typer.main.get_command(app)
    status = 0
    try:
        made = command.main(args=arguments, prog_name="relpos", standalone_mode=False)
        status = made if isinstance(made, int) else 0
        print(end="", flush=True)  # a reader that has gone is met here, not when Python ends
        sys.exit(status)
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # how typer and rich end when the reader has gone
            _reader_gone(status)
        raise
    except typer.Exit as error:
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except BrokenPipeError:
        _reader_gone(status)
    except Exception as error:
        if hasattr(error, "format_message"):  # click's own; typer carries a private copy of click in some versions
            _fail(error.format_message(), "Try 'relpos --help'." if hasattr(error, "ctx") else "")
        errors = sys.modules.get("relpos.errors")
        if errors is not None and isinstance(error, errors.UserError):
            _fail(str(error))
        if isinstance(error, OSError) and error.strerror:  # a path that cannot be used, a full disk
            _fail(f"{error.filename!r}: {error.strerror}" if error.filename is not None else error.strerror)
        raise


def _without_stdout() -> None:
    """`relpos info rope >&-`: Python has no sys.stdout then. A pipe whose reader has gone takes its place, and the rest
    follows from that. Left closed, its number would go to the first file that a command opens."""
    read, write = os.pipe()
    os.close(read)
    os.dup2(write, 1)
    sys.stdout = open(1, "w", encoding="utf-8")  # noqa: SIM115


def _reader_gone(status: int) -> None:
    """`relpos encodings | head`: no complaint, also not from Python, which writes what is left when it ends. The status
    is SIGPIPE's, as of other commands: 0 would call work done that was cut off, or whose failure could not be said."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(status or 141)


def _fail(message: str, hint: str = "") -> None:
    print(f"relpos: {message}" + (f" {hint}" if hint else ""), file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
