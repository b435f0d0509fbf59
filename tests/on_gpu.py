"""The tests of the kernels on a GPU, by many processes that take them one after the other: most of their time is
compilation. It needs pytest and nothing else.

    python tests/on_gpu.py                            # all of them
    python tests/on_gpu.py --first fire,window        # those with such names before the others
    python tests/on_gpu.py --sanitizer memcheck       # each process under compute-sanitizer, each tensor by itself
    python tests/on_gpu.py --seconds 300 --passed done    # in parts: what `done` names is not run again
    python tests/on_gpu.py -k "fire and not decod"    # what else is said goes to pytest

A process that loses its CUDA context ends, and the others go on: behind an illegal access every test would fail.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FILES = [f"tests/test_{name}.py" for name in ("fused", "loss", "norm")]
LOST = 23  # exit status of a process whose CUDA context is lost


class Claims:
    """A pytest plugin: of all tests this process runs those that no other has taken."""

    def __init__(self, folder: Path, end: float, first: list[str], passed: set[str]):
        self.folder, self.end, self.first, self.passed = folder, end, first, passed

    def say(self, what: str, name: str, text: str = "") -> None:
        with (self.folder / "log").open("a", encoding="utf-8") as log:
            log.write(json.dumps([what, name, text]) + "\n")

    def take(self) -> int:
        with (self.folder / "next").open("a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            number = int(file.read() or 0)
            file.truncate(0)
            file.write(str(number + 1))
        return number

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        def rank(item: Any) -> int:
            return next((n for n, word in enumerate(self.first) if word in item.nodeid), len(self.first))

        items[:] = sorted((item for item in items if item.nodeid not in self.passed), key=rank)

    def pytest_runtestloop(self, session: Any) -> bool:
        import torch

        if session.testsfailed:
            raise session.Interrupted("not all tests could be collected")
        (self.folder / "all").write_text(json.dumps([item.nodeid for item in session.items]), encoding="utf-8")
        while time.time() < self.end and (number := self.take()) < len(session.items):
            item = session.items[number]
            self.say("began", item.nodeid)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:
                self.say("lost", item.nodeid, str(error).splitlines()[0])
                os._exit(LOST)
        return True

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or not report.passed:
            self.say(report.outcome, report.nodeid, str(report.longrepr)[-1500:] if report.failed else "")


def work(claims: Claims, more: list[str]) -> int:
    import pytest

    return int(pytest.main(["-q", "-p", "no:cacheprovider", *FILES, *more], plugins=[claims]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=1e6, help="no test begins later")
    parser.add_argument("--first", default="", help="words in the names of tests, with commas between them")
    parser.add_argument("--sanitizer", help="a tool of compute-sanitizer: memcheck, racecheck, initcheck, synccheck")
    parser.add_argument("--passed", type=Path, help="a file of tests not to run again; it gets those that pass")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options, more = parser.parse_known_args()
    first = [word for word in options.first.split(",") if word]
    log = options.passed and options.passed.resolve()
    passed = set(log.read_text().splitlines()) if log and log.exists() else set()
    os.chdir(ROOT)
    if options.worker:
        return work(Claims(Path(options.worker), options.seconds, first, passed), more)
    import torch

    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    under = ["compute-sanitizer", "--tool", options.sanitizer, "--error-exitcode", "9"] if options.sanitizer else []
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as name:
        folder, end = Path(name), time.time() + options.seconds
        command = [*under, sys.executable, __file__, "--worker", name, "--seconds", str(end), "--first", options.first]
        command += ["--passed", str(log)] if log else []
        # What lies beyond a tensor is then not another's, and the sanitizer sees it read.
        apart = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if under else {}
        running = []
        for n in range(options.processes):
            out = (folder / f"out-{n}").open("w", encoding="utf-8")
            env = {**os.environ, **apart, "PYTHONPATH": path}
            running.append(subprocess.Popen([*command, *more], stdout=out, stderr=subprocess.STDOUT, env=env))
        codes = [process.wait() for process in running]
        found = [json.loads(x) for x in (folder / "log").read_text().splitlines()] if (folder / "log").exists() else []
        every = json.loads((folder / "all").read_text()) if (folder / "all").exists() else []
        said = [(folder / f"out-{n}").read_text(errors="replace") for n in range(options.processes)]
    for what, test, text in found:
        if what in ("failed", "lost"):
            print(f"{what}: {test}\n{text}\n")
    clean, told = True, [0, *([1, LOST] if found else []), *([5] if passed else [])]  # 5: no tests are left
    for n, text in enumerate(said):
        if codes[n] not in told or (under and "ERROR SUMMARY: 0 errors" not in text):
            clean = False
            print(f"process {n} ended with {codes[n]}:\n{text[-3000:]}\n")
    ended = {test for what, test, _ in found if what != "began"}
    missing = [test for test in every if test not in ended]
    if missing:
        print(f"not run to the end: {len(missing)}, {missing[0]} and so on")
    if log and (clean or not under):
        bad = {test for what, test, _ in found if what in ("failed", "lost")}
        good = {test for what, test, _ in found if what in ("passed", "skipped")} - bad
        with log.open("a", encoding="utf-8") as file:
            file.writelines(f"{test}\n" for test in sorted(good))
    count = {what: sum(x == what for x, *_ in found) for what in ("passed", "failed", "skipped", "lost")}
    print(f"{count['passed']} passed, {count['failed'] + count['lost']} failed, {count['skipped']} skipped")
    return int(bool(count["failed"] or count["lost"] or missing or not clean or not (every or passed)))


if __name__ == "__main__":
    sys.exit(main())
