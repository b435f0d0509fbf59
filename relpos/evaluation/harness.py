"""The lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness) on a run folder, with no length cap.

Left alone, the harness takes a model's `n_positions` or `max_position_embeddings`, or 2048 where neither is there, as
the most tokens it may read, and cuts longer inputs from the left without a word. Here the length is always passed: the
end of a learned table where the model has one, else more than any task holds. Needs the extra `[eval]`.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

from relpos.errors import UserError, nearest
from relpos.evaluation import result
from relpos.evaluation.folders import model_folder, names_of
from relpos.evaluation.scoring import load_model, load_tokenizer, pick_device, pick_dtype, position_limit

UNCAPPED = 1 << 20
FORMAT = "relpos-harness"


def _library() -> Any:
    try:
        import lm_eval
        import lm_eval.models.huggingface
        import lm_eval.tasks
    except ImportError as error:
        raise UserError(f"the harness is not installed ({error}): pip install 'relpos[eval]'") from None
    return lm_eval


def adapter(model: Any, tokenizer: Any, *, max_length: int | None = None, batch_size: int = 1) -> Any:
    """The harness' own wrapper around a loaded model, told its length."""
    lm_eval = _library()
    limit = position_limit(model)
    if max_length is not None and limit is not None and max_length > limit:
        raise UserError(
            f"the model's table of learned positions ends at {limit} tokens: --max-length {max_length} is more"
        )
    return lm_eval.models.huggingface.HFLM(
        pretrained=model,
        tokenizer=tokenizer,
        max_length=max_length or limit or UNCAPPED,
        batch_size=batch_size,
        backend="causal",
    )


def harness(
    path: str,
    tasks: list[str],
    *,
    out: str | Path | None = None,
    include: str | Path | None = None,
    limit: float | None = None,
    num_fewshot: int | None = None,
    batch_size: int = 1,
    max_length: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    impl: str | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Run tasks by name (`include` adds a folder of task files) and return what the harness measured."""
    lm_eval = _library()
    manager = lm_eval.tasks.TaskManager(include_path=None if include is None else str(include))
    known = manager.all_tasks
    for task in tasks:
        if task not in known and not Path(task).is_file():
            hint = nearest(task, known).partition(" Known:")[0]
            raise UserError(f"the harness has no task {task!r}.{hint} `lm-eval ls tasks` lists them")
    path = model_folder(path)
    where = pick_device(device)
    model = load_model(path, device=where, dtype=pick_dtype(dtype, where), impl=impl)
    tokenizer = load_tokenizer(path)
    if tokenizer is None:
        raise UserError(f"{path} has no tokenizer, and the harness' tasks are text")
    wrapped = adapter(model, tokenizer, max_length=max_length, batch_size=batch_size)
    try:
        found = lm_eval.simple_evaluate(
            wrapped, tasks=list(tasks), task_manager=manager, limit=limit, num_fewshot=num_fewshot, random_seed=seed,
            numpy_random_seed=seed, torch_random_seed=seed, fewshot_random_seed=seed, log_samples=False,
            bootstrap_iters=1000,
        )  # fmt: skip
    except (OSError, ConnectionError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"the harness could not get the data of {', '.join(tasks)}: {first}") from error
    value = {
        "format": FORMAT,
        "format_version": result.FORMAT_VERSION,
        "model": {
            "name": names_of([path])[0],
            "class": type(model).__name__,
            "dtype": str(model.dtype).removeprefix("torch."),
        },
        "max_length": wrapped.max_length,
        "tasks": list(tasks),
        "limit": limit,
        "num_fewshot": num_fewshot,
        "seeds": {"harness": seed},
        "results": {task: _plain(scores) for task, scores in found["results"].items()},
        "task_versions": {k: str(v) for k, v in found.get("versions", {}).items()},
        "samples": {k: dict(v) for k, v in found.get("n-samples", {}).items()},
        "versions": result.versions(where),
        "command": result.command(),
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    if out is not None:
        result.write_json(Path(out), value)
    return value


def _plain(scores: dict[str, Any]) -> dict[str, Any]:
    """Numbers and words that JSON can hold."""
    found: dict[str, Any] = {}
    for key, value in scores.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            found[key] = float(value) if math.isfinite(value) else None
        elif isinstance(value, str):
            found[key] = value
    return found
