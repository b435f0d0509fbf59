"""Child processes for tests: forked by a server that has imported relpos once, so kills are real and starts cheap."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(["relpos.data", "relpos.data.tokenizer", "relpos.training"])


def _call(function: Callable[..., None], arguments: tuple[Any, ...], environment: dict[str, str], log: str) -> None:
    os.environ.update({"OMP_NUM_THREADS": "1", **environment})
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    import torch

    torch.set_num_threads(1)
    try:
        function(*arguments)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()  # the first to end takes along the store, which others may still read
    except BaseException:
        traceback.print_exc()
        raise


def start(function: Callable[..., None], *arguments: Any, log: Path, **environment: str) -> Any:
    """A child that calls `function`; what it prints goes to `log`."""
    environment.setdefault("CUDA_VISIBLE_DEVICES", "")
    process = FORK.Process(target=_call, args=(function, arguments, environment, str(log)))
    process.start()
    return process


def finish(process: Any, log: Path, timeout: float = 240) -> None:
    """Wait for it, and fail with what it printed unless it ended well."""
    process.join(timeout)
    assert process.exitcode == 0, f"exit code {process.exitcode}:\n{log.read_text()[-6000:]}"


def together(
    function: Callable[..., None], *arguments: Any, folder: Path, processes: int = 2, gpu: bool = False
) -> None:
    """The same call in several processes that find each other, as torchrun starts them; without a GPU, over gloo."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    started = []
    for rank in range(processes):
        log = folder / f"rank{rank}.log"
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        place |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
        if gpu:
            place["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        started.append((start(function, *arguments, log=log, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **place), log))
    for process, log in started:
        finish(process, log)
