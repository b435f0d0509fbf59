"""One measurement over many model folders: each on its own, so that one that fails does not stop the others."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relpos.errors import UserError
from relpos.evaluation.scoring import load_model, load_tokenizer, pick_device, pick_dtype, release
from relpos.evaluation.sharing import World
from relpos.files import final


@dataclass
class Outcome:
    """What became of one model."""

    name: str
    path: str
    file: Path | None = None
    value: dict[str, Any] | None = None
    error: str | None = None

    def complete(self) -> bool:
        """Nothing asked for is missing. A length the model declines by its nature is an answer, not a failure."""
        if self.value is None:
            return False
        entries = self.value["protocols"].values() if "protocols" in self.value else [self.value]
        return all(row["status"] in ("ok", "unsupported") for entry in entries for row in entry["results"])


def model_folder(path: str | Path) -> str:
    """The folder of the model that is meant: of a run without a model of its own its last checkpoint, which is said."""
    found = final(Path(path)) if os.path.isdir(path) else Path(path)
    if found == Path(path):  # a name on the hub, too
        return str(path)
    if os.environ.get("RANK", "0") == "0":
        why = "has not ended, or has lost its config.json"
        print(f"{path} {why}: its last checkpoint is measured, {found.name}", file=sys.stderr, flush=True)
    return str(found)


def names_of(paths: list[str]) -> list[str]:
    """Short distinct names: the folder's own name, `run-checkpoint-100` for a checkpoint, the parent's before it where
    two would be alike."""
    parts = [Path(p).resolve().parts if Path(p).exists() else tuple(Path(p).parts) for p in paths]
    depth = [2 if p[-1].startswith("checkpoint-") and len(p) > 2 else 1 for p in parts]
    while True:
        names = ["-".join(p[-d:]) for p, d in zip(parts, depth, strict=True)]
        double = {n for n in names if names.count(n) > 1}
        grow = [n in double and d < len(p) - 1 for n, p, d in zip(names, parts, depth, strict=True)]
        if not any(grow):
            return names
        depth = [d + g for d, g in zip(depth, grow, strict=True)]


def each_folder(
    paths: list[str],
    out: str | Path,
    suffix: str,
    work: Callable[[Any, Any, Outcome, Path, World], dict[str, Any]],
    *,
    device: str,
    dtype: str,
    impl: str | None,
) -> list[Outcome]:
    """`work(model, tokenizer, outcome, file, world)` for each folder, where `file` is `OUT/NAME + suffix`. What it
    raises as UserError is kept as the outcome's error."""
    world = World()
    where = pick_device(device, world.local_rank)
    how = pick_dtype(dtype, where)
    # Those that the first process saw: a run may write a checkpoint meanwhile.
    unique = list(dict.fromkeys(world.gather([str(p) for p in paths])[0]))
    outcomes = [Outcome(name, path) for name, path in zip(names_of(unique), unique, strict=True)]
    for outcome in outcomes:
        model = None
        try:
            model = load_model(outcome.path, device=where, dtype=how, impl=impl)
        except (UserError, RuntimeError, MemoryError) as error:
            outcome.error = str(error).splitlines()[0]
        # If one process has no model (no memory, say), the others must not wait for it later on.
        outcome.error = next((e for e in world.gather(outcome.error) if e), None)
        if outcome.error is None:
            file = Path(out) / f"{outcome.name}{suffix}"
            try:
                outcome.value = work(model, load_tokenizer(outcome.path), outcome, file, world)
                outcome.file = file
            except UserError as error:
                outcome.error = str(error)
        model = None
        release()
    world.close()
    return outcomes
