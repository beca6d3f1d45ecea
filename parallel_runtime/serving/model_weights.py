"""The weights of one rank: those that serve, those that will, and the memory they take."""

import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import IO, final

import torch
from torch import Tensor

from parallel_runtime.comm import GroupCoordinator
from parallel_runtime.context import ParallelContext
from parallel_runtime.errors import CheckpointError, ContextStateError
from parallel_runtime.models.causal_lm import CausalLM
from parallel_runtime.models.checkpoint import Checkpoint
from parallel_runtime.models.config import ModelConfig
from parallel_runtime.models.resolve import open_checkpoint
from parallel_runtime.serving.weight_set import WeightSet, is_of_stage
from parallel_runtime.serving.weight_transfer import receive_weights

__all__ = ["ModelWeights"]

_TENSORS = ".pt"
_FREE = ("bos_id", "eos_ids")


@final
class ModelWeights:
    """One rank's part of a model, which can be exchanged for another of the same config while it is not used.

    New weights are built beside the old ones, and an update that fails on any rank fails on all and leaves the old ones as they
    are; so an update needs the memory of a second part for a while.

    Args:
        ctx: Open context of this rank. Borrowed.
        group: Ranks that update together. Borrowed.
        model: As for ``open_checkpoint``.
        build: Builds this rank's part from an open checkpoint.

    Attributes:
        config: Of the whole model.
        version: Of the weights that serve; 0 are those of ``model``.

    Raises:
        CheckpointError: There is no such model, or it cannot be read.
        ConfigError: The model cannot be split like this.
    """

    def __init__(
        self,
        ctx: ParallelContext,
        *,
        group: GroupCoordinator,
        model: str | PathLike[str],
        build: Callable[[Checkpoint], CausalLM],
    ) -> None:
        self._ctx = ctx
        self._group = group
        self._build = build
        self._origin: str | PathLike[str] | None = model
        self._staged: tuple[CausalLM, str | PathLike[str] | None] | None = None
        self._kept: IO[bytes] | None = None
        self.version = 0
        with open_checkpoint(model) as checkpoint:
            self._model: CausalLM | None = build(checkpoint)
            self.config: ModelConfig = checkpoint.config

    @property
    def model(self) -> CausalLM:
        """This rank's part, with the weights that serve.

        Raises:
            ContextStateError: They are asleep.
        """
        if self._model is None:
            raise ContextStateError("the weights are asleep; wake them first")
        return self._model

    @property
    def is_asleep(self) -> bool:
        """Whether they take no memory."""
        return self._model is None

    def load(self, source: str | PathLike[str] | Mapping[str, Tensor]) -> None:
        """Build new weights beside those that serve; ``swap`` exchanges them.

        Args:
            source: A model of the same config, as for ``open_checkpoint``; or full tensors under the names of ``transformers``,
                handed over or in a file that ``torch.save`` wrote (``.pt``). Tensors that are left out keep their values.

        Raises:
            ContextStateError: The weights are asleep.
            PeerFailedError: It failed on some rank. The weights that serve are as before.
            PeerError: A rank failed or left.

        Collective: all ranks of the group agree twice; that of ``CausalLM.full_state`` where tensors are left out.
        """
        serving = self.model
        with ExitStack() as stack:
            with self._alike():
                found = stack.enter_context(self._open(source))
                self._check_config(found)
            self._stage(found, serving, origin=None if isinstance(found, WeightSet) or isinstance(source, Mapping) else source)

    def receive(self, group: GroupCoordinator, *, num_senders: int = 1) -> None:
        """Build new weights from those that a trainer's ranks send with ``send_weights``.

        Args:
            group: The senders, then every serving rank. Borrowed.
            num_senders: How many of its first members send.

        Raises:
            ContextStateError: The weights are asleep.
            PeerFailedError: It failed on some rank. The weights that serve are as before.
            PeerError: A serving rank failed or left.

        Collective: as ``load``, and ``receive_weights`` over ``group``.
        """
        serving = self.model
        with self._alike():
            received = receive_weights(
                group, num_senders=num_senders, wants=lambda name: is_of_stage(name, self.config, serving.layers)
            )
            found = WeightSet(self.config, received.tensors, shapes=received.shapes)
        self._stage(found, serving, origin=None)

    def swap(self, version: int | None = None) -> None:
        """Serve with the new weights. Nothing may use the old ones any more.

        Args:
            version: Theirs; one more than before by default.

        Raises:
            ContextStateError: There are no new ones.
        """
        if self._staged is None:
            raise ContextStateError("there are no new weights to serve with; load or receive some first")
        (self._model, self._origin), self._staged = self._staged, None
        self.version = self.version + 1 if version is None else version

    def drop(self) -> None:
        """Give up the new weights, where there are any."""
        self._staged = None

    def sleep(self) -> None:
        """Give back the memory. Weights that are in no model file are written to a nameless temporary one. Twice is nothing.

        Raises:
            PeerFailedError: A rank could not write them. Nobody sleeps.
            PeerError: A rank failed or left.

        Collective: where they are in no model file, that of ``CausalLM.full_state`` and one agreement.
        """
        self.drop()
        if self._model is not None and self._origin is None:
            state = _full_state(self._model)
            with self._alike():
                self._kept = tempfile.TemporaryFile()  # noqa: SIM115  # closed by ``wake``, and with the process
                torch.save(state, self._kept)
        self._model = None

    def wake(self) -> None:
        """Take the memory again, with the same weights. Twice is nothing.

        Raises:
            PeerFailedError: A rank could not read them. All sleep on.

        Collective: one agreement.
        """
        if self._model is not None:
            return
        with self._alike(), ExitStack() as stack:
            found = stack.enter_context(self._reopen())
            model = self._build(found)
        self._model = model
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def _stage(self, found: Checkpoint, serving: CausalLM, *, origin: str | PathLike[str] | None) -> None:
        self.drop()
        if isinstance(found, WeightSet) and found.missing:
            found = found.over(_full_state(serving))
        with self._alike():
            staged = self._build(found)
        self._staged = (staged, origin)

    def _open(self, source: str | PathLike[str] | Mapping[str, Tensor]) -> Checkpoint:
        if isinstance(source, Mapping):
            return WeightSet(self.config, source)
        if Path(source).suffix != _TENSORS:
            return open_checkpoint(source)
        try:
            return WeightSet(self.config, torch.load(source, mmap=True, weights_only=True))
        except (OSError, RuntimeError) as exc:
            raise CheckpointError(f"{source}: cannot be read as a file of tensors: {exc}") from exc

    def _reopen(self) -> Checkpoint:
        if self._kept is None:
            assert self._origin is not None
            return open_checkpoint(self._origin)
        self._kept.seek(0)
        return WeightSet(self.config, torch.load(self._kept, weights_only=True))

    def _check_config(self, found: Checkpoint) -> None:
        old, new = (
            {field.name: getattr(config, field.name) for field in fields(config)} for config in (self.config, found.config)
        )
        if other := sorted(name for name in old if name not in _FREE and old[name] != new[name]):
            name = other[0]
            raise CheckpointError(
                f"{found.path} is of another model: {name}={new[name]} where the one that serves has {name}={old[name]}"
                + (f"; {', '.join(other[1:])} differ too" if other[1:] else "")
            )

    def _alike(self) -> AbstractContextManager[None]:
        """What fails on one rank fails on all."""
        return self._ctx.guard(group=self._group)


def _full_state(model: CausalLM) -> dict[str, Tensor]:
    """Full tensors of everything this stage reads, so that it can be built from them again.

    Collective: that of ``CausalLM.full_state``, and one all_gatherv where the head is tied to the embedding of another stage.
    """
    state = model.full_state()
    if model.config.tie_word_embeddings and model.lm_head is not None and model.embed_tokens is None:
        state["model.embed_tokens.weight"] = model.lm_head.full_state()["weight"]
    return state
