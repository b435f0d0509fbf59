"""transformers' Trainer with four things of our own: who is decayed, a record of every step, checkpoints that are
whole or absent, and no pickles.

A checkpoint is written into `RUN/.checkpoint-N`, its files are synced and listed with their sizes in `checkpoint.json`,
and one rename makes it `RUN/checkpoint-N`. A kill at any moment leaves the old ones as they were; a folder without its
list, or with files of other sizes, is not a checkpoint.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DynamoBackend
from torch import Tensor, nn
from transformers import Trainer
from transformers.trainer_utils import rotate_checkpoints

from relpos.encodings import Encoding
from relpos.errors import UserError
from relpos.files import MANIFEST, checkpoints, complete

TRAINER_STATE = "trainer_state.json"
GRAPHS = ("reduce-overhead", "max-autotune")  # modes of torch.compile that record CUDA graphs


def decayed(model: nn.Module, decay_encodings: bool = False) -> list[str]:
    """Names of the parameters that are weight-decayed: matrices, and none of an encoding unless asked for."""
    spared: set[int] = set()
    if not decay_encodings:
        for module in model.modules():
            if isinstance(module, Encoding):
                spared |= {id(p) for p in module.parameters()}
    return [name for name, p in model.named_parameters() if p.dim() >= 2 and id(p) not in spared]


def last_checkpoint(run: Path) -> tuple[int, Path | None, list[Path]]:
    """Step and folder of the last whole checkpoint (0 and None where there is none), and what was passed over."""
    skipped: list[Path] = []
    for step, path in reversed(checkpoints(run)):
        if complete(path):
            return step, path, skipped
        skipped.append(path)
    return 0, None, skipped


def sync_folder(folder: Path) -> dict[str, int]:
    """Bring all files of a folder to the disk; their sizes by name."""
    sizes = {}
    for root, _, files in os.walk(folder):
        for name in files:
            path = Path(root) / name
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
            sizes[path.relative_to(folder).as_posix()] = path.stat().st_size
    return dict(sorted(sizes.items()))


def write_atomically(path: Path, text: str) -> None:
    staged = path.with_name(f".{path.name}")
    with open(staged, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(staged, path)


class RelPosTrainer(Trainer):
    """`on_flush` receives the finished steps as dicts, on every process; it may raise to stop the run. The `grad_norm`
    of a step that the optimizer skipped is None."""

    def __init__(
        self,
        *args: Any,
        on_flush: Callable[[list[dict[str, Any]]], None],
        decay_encodings: bool = False,
        **kwargs: Any,
    ):
        self.decay_encodings, self.on_flush = decay_encodings, on_flush
        self._loss_of_step: Tensor | None = None
        self._norm_of_step: Any = None
        self._parameters: int | None = None
        self._steps: list[tuple[int, Tensor, Any, float, bool]] = []  # not yet read back from the device
        model = args[0] if args else kwargs["model"]
        self._use_cache: bool = model.config.use_cache  # the parent turns it off, and would save that
        super().__init__(*args, **kwargs)

    # Who is decayed.

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        return decayed(model, self.decay_encodings)

    # A record of every step. Losses stay on the device until a flush: reading each one would make the GPU wait.

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The model's loss, without logits. The items are those of all processes, whose gradients are then averaged.

        The parent scales the loss in place, which under FSDP2 silently drops the hook that gathers the weights again.
        """
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch, skip_logits=True)
        loss = outputs["loss"]
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            loss = loss * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss

    def floating_point_ops(self, inputs: dict[str, Any]) -> float:
        # The parent counts all parameters anew for every batch.
        if self._parameters is None:
            self._parameters = self.accelerator.unwrap_model(self.model).num_parameters(exclude_embeddings=True)
        return 6.0 * inputs["input_ids"].numel() * self._parameters

    @property
    def graphs(self) -> bool:
        """Whether the compiled step is launched as CUDA graphs."""
        plugin = self.accelerator.state.dynamo_plugin
        return plugin.mode in GRAPHS or plugin.backend == DynamoBackend.CUDAGRAPHS

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """The parent's. CUDA graphs write every pass into the same memory, so what outlives a pass is copied: the loss,
        and where a step has several, a parameter's first gradient, to which later passes add theirs."""
        graphs = self.graphs
        fresh = [parameter for parameter in self.model.parameters() if parameter.grad is None] if graphs else []
        if graphs:
            torch.compiler.cudagraph_mark_step_begin()
        loss = super().training_step(*args, **kwargs)
        if graphs:
            loss = loss.clone()
        if not self.accelerator.sync_gradients:
            for parameter in fresh:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()
        self._loss_of_step = loss if self._loss_of_step is None else self._loss_of_step + loss
        return loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        self._norm_of_step = super()._get_grad_norm(model, grad_norm=grad_norm)
        return self._norm_of_step

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self._loss_of_step is not None:  # the second call at the end of an epoch has no step of its own
            rate = kwargs.get("learning_rate")
            rate = self._get_learning_rate() if rate is None else rate
            # As float16 does now and then: the gradients overflow, and from the next step on are scaled down.
            skipped = self.accelerator.optimizer_step_was_skipped
            self._steps.append((self.state.global_step, self._loss_of_step, self._norm_of_step, float(rate), skipped))
            self._loss_of_step = self._norm_of_step = None
        wanted = self.control.should_log or self.control.should_save or self.control.should_evaluate
        if wanted or self.control.should_training_stop or self.args.device.type == "cpu":
            self.flush()
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def flush(self) -> None:
        """Read the finished steps back, averaged over the processes, and hand them on."""
        if not self._steps:
            return
        steps, self._steps = self._steps, []
        losses = torch.stack([loss.detach().float() for _, loss, *_ in steps])
        norms = torch.stack([_plain(norm, losses.device) for _, _, norm, *_ in steps])
        if self.args.world_size > 1:
            losses = self.accelerator.reduce(losses, "mean")
        both = torch.stack([losses, norms]).tolist()
        self.on_flush(
            [
                {"step": step, "loss": loss, "grad_norm": None if skipped else norm, "learning_rate": rate}
                for (step, _, _, rate, skipped), loss, norm in zip(steps, *both, strict=True)
            ]
        )

    # Checkpoints.

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """As the parent, but staged, synced, listed and renamed."""
        run = Path(self.args.output_dir)
        final = run / f"checkpoint-{self.state.global_step}"
        staged = run / f".{final.name}"
        self.store_flos()
        try:
            if self.args.should_save:
                shutil.rmtree(staged, ignore_errors=True)
                staged.mkdir(parents=True)
            self.accelerator.wait_for_everyone()
            self.save_model(str(staged), _internal_call=True)
            if not self.args.save_only_model:
                self._save_optimizer_and_scheduler(str(staged))
                self._save_scaler(str(staged))
                self._save_rng_state(str(staged))
            if self.args.should_save:
                self._keep_best(final)
                self._export_callbacks()
                self.state.save_to_json(str(staged / TRAINER_STATE))
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                files = sync_folder(staged)
                listed = {"step": self.state.global_step, "files": files}
                write_atomically(staged / MANIFEST, json.dumps(listed) + "\n")
                shutil.rmtree(final, ignore_errors=True)  # an incomplete one of the same step
                os.rename(staged, final)
                _sync_directory(run)
        except Exception as error:  # OSError, RuntimeError from torch.save, SafetensorError from safetensors
            shutil.rmtree(staged, ignore_errors=True)
            raise could_not_write(error, run, final.name) from error
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(final))
        if self.args.should_save:
            rotate_checkpoints(
                output_dir=str(run),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
            )

    def _keep_best(self, final: Path) -> None:
        if self.state.best_global_step:
            best = final.with_name(f"checkpoint-{self.state.best_global_step}")
            if best == final or best.is_dir():
                self.state.best_model_checkpoint = str(best)

    def _export_callbacks(self) -> None:
        from transformers.trainer_callback import ExportableState

        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                self.state.stateful_callbacks[type(callback).__name__] = callback.state()

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Weights, config and tokenizer. The parent also pickles its arguments; run.json holds them as text."""
        folder = output_dir if output_dir is not None else self.args.output_dir
        assert folder is not None
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        now, model.config.use_cache = model.config.use_cache, self._use_cache
        try:
            model.save_pretrained(folder, state_dict=state_dict)
        finally:
            model.config.use_cache = now
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Our own models save one safetensors file or an index of several; every weight must be there."""
        if self.is_fsdp_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        import safetensors.torch

        model = self.model if model is None else model
        state: dict[str, Tensor] = {}
        for file in sorted(Path(resume_from_checkpoint).glob("*.safetensors")):
            state |= safetensors.torch.load_file(file, device="cpu")
        missing, unexpected = model.load_state_dict(state, strict=False)
        tied = set(getattr(model, "all_tied_weights_keys", {}) or {})
        lost = [*(set(missing) - tied), *unexpected]
        if lost:
            raise UserError(f"{resume_from_checkpoint} holds another model's weights: {sorted(lost)[0]} does not fit")
        self.model.tie_weights()


def _plain(norm: Any, device: torch.device) -> Tensor:
    """A gradient norm as a float32 tensor; under FSDP2 it is a DTensor."""
    if hasattr(norm, "full_tensor"):
        norm = norm.full_tensor()
    if isinstance(norm, Tensor):
        return norm.detach().float().reshape(()).to(device)
    return torch.tensor(float("nan") if norm is None else float(norm), device=device)


def _sync_directory(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_full(error: Exception) -> bool:
    code = error.errno if isinstance(error, OSError) else None
    return code in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)


def could_not_write(error: Exception, run: Path, what: str) -> UserError:
    """What a failed save means for the user."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    full = is_full(error) or shutil.disk_usage(run).free < 1 << 20
    _, last, _ = last_checkpoint(run)
    kept = f"{last} is intact: make room and go on with --resume" if last else "there was no earlier checkpoint"
    return UserError(f"{'the disk is full' if full else text}: {what} could not be written. {kept}")
