"""Work shared by the processes of torchrun, and a progress bar with the time left.

Every process takes each n-th piece of work, and the pieces are cut the same way for any number of processes, so two
processes give the numbers of one, bit for bit. Only small arrays travel, over gloo; the models never talk.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist


class World:
    """This process among all of them. With one process every call is local."""

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", 0))
        self.size = int(os.environ.get("WORLD_SIZE", 1))
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self._group: Any = None
        self._ours = False
        if self.size > 1:
            if not dist.is_initialized():
                dist.init_process_group("gloo")
                self._ours = True
            elif dist.get_backend() != "gloo":
                self._group = dist.new_group(backend="gloo")

    @property
    def first(self) -> bool:
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, in every process."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def close(self) -> None:
        if self._ours and dist.is_initialized():
            dist.destroy_process_group()


class Progress:
    """`step(cost)` moves on; `say(text)` prints a line above the bar. Plain lines where there is no terminal."""

    def __init__(self, total: float, label: str, shown: bool):
        self.total, self.label, self.shown = max(total, 1e-9), label, shown
        self.done = 0.0
        self.fresh = 0.0  # work done now rather than found done: the speed is that of now
        self.start = self.told = time.monotonic()
        self.bar: Any = None
        self.task: Any = None

    def step(self, cost: float, what: str = "", found: bool = False) -> None:
        self.done += cost
        self.fresh += 0 if found else cost
        if not self.shown:
            return
        if self.bar is not None:
            self.bar.update(self.task, completed=self.done, what=what)
        elif time.monotonic() - self.told > 30:
            self.told = time.monotonic()
            left = (self.told - self.start) * (self.total - self.done) / max(self.fresh, 1e-9)
            print(
                f"{self.label}: {what}, {100 * self.done / self.total:.0f}%, about {left:.0f} s left",
                file=sys.stderr,
                flush=True,
            )

    def say(self, text: str) -> None:
        if not self.shown:
            return
        if self.bar is not None:
            self.bar.console.print(text, highlight=False, markup=False)
        else:
            print(text, file=sys.stderr, flush=True)


@contextmanager
def progress(total: float, label: str, shown: bool = True) -> Iterator[Progress]:
    """A bar on a terminal; otherwise a line on stderr every half minute."""
    state = Progress(total, label, shown)
    if not shown or not sys.stderr.isatty():
        yield state
        return
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}", markup=False),
        TextColumn("{task.fields[what]}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=Console(stderr=True), speed_estimate_period=120, transient=True) as bar:
        state.bar, state.task = bar, bar.add_task(label, total=state.total, what="")
        yield state
