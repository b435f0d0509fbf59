"""A progress bar on a terminal, plain lines in a log file: the same calls for both."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any


class Progress:
    """`with Progress("preparing") as bar: bar(fraction, "1.2M tokens")`. Quiet with `shown=False`."""

    def __init__(self, label: str, shown: bool = True, every: float = 10.0):
        self.label, self.shown, self.every = label, shown, every
        self._terminal = sys.stderr.isatty()
        self._last = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if self.shown and self._terminal:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = [TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%")]
            columns += [TextColumn("{task.fields[detail]}"), TimeElapsedColumn(), TimeRemainingColumn()]
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self.label, total=1.0, detail="")
        return self

    def __call__(self, fraction: float, detail: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=min(fraction, 1.0), detail=detail)
        elif self.shown and time.monotonic() - self._last >= self.every:
            self._last = time.monotonic()
            print(f"{self.label}: {min(fraction, 1.0):.0%}, {detail}", file=sys.stderr, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
