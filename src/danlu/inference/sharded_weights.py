"""Weights that data ranks shard, as a rollout reads them: gathered once for all of it, or in each forward pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch

from danlu.memory.available_memory import available_bytes
from danlu.models.attend import PackedAttention
from danlu.models.decoder import Decoder
from danlu.parallel import data
from danlu.parallel.ranks import Ranks
from danlu.recipe.sections import Parallel, Rollout


class ShardedWeights:
    """The weights of a decoder that FSDP2 shards among data ranks, between `open` and `close`.

    Gathered as a whole they take the memory of a whole model on each process, and ranks then answer by themselves.
    Where that does not fit, every forward pass gathers a layer at a time, and all data ranks make the same number of
    passes: those that have nothing to compute make empty ones. So they do where experts are distributed among them, for
    in each pass tokens travel to their experts.

    Args:
        whole_bytes: bytes of all weights, as they are gathered.
        processes_here: processes of this run on this machine, which share its memory.
        log: is called once, with a message, where ranks have to step together.
    """

    def __init__(
        self,
        model: Decoder,
        parallel: Parallel,
        rollout: Rollout,
        ranks: Ranks,
        *,
        dtype: torch.dtype,
        whole_bytes: int,
        processes_here: int,
        log: Callable[[str], None],
    ) -> None:
        self.model = model
        self._parallel, self._rollout, self._ranks = parallel, rollout, ranks
        self._dtype, self._whole_bytes, self._processes_here = dtype, whole_bytes, processes_here
        self._log: Callable[[str], None] | None = log
        self._opened = ExitStack()
        self.is_open = False
        self.in_step = False
        """Whether data ranks make the same number of forward passes, for each of them makes collectives."""

    def open(self) -> None:
        """Prepares for forward passes; all processes call it at the same time."""
        if self.is_open:
            return
        self.is_open = True
        is_gathered = self._is_gathered_once()
        self.in_step = not is_gathered or not self._ranks.expert.alone
        if not is_gathered:
            data.reshard(self.model)
        elif self._parallel.shard != "none":
            self._opened.enter_context(data.gathered_once(self.model, self._parallel))
        # FSDP2 keeps the buffers of its first pass, which could not be trained with if that were one of inference mode.
        self.empty_pass()

    def close(self) -> None:
        """Frees the gathered weights."""
        self._opened.close()
        self.is_open = False

    @torch.no_grad()
    def empty_pass(self) -> None:
        """Runs a forward pass of one token, which is thrown away, for the weights that it gathers. Each local chunk of
        a pipeline begins with zeros, without the other stages."""
        token = torch.zeros(1, dtype=torch.int64, device=next(self.model.parameters()).device)
        for chunk in self.model.chunks.local:
            x = None if chunk == 0 else token.new_zeros(1, self.model.config.hidden_size, dtype=self._dtype)
            self.model(token, token, PackedAttention((0, 1)), self._dtype, chunk=chunk, x=x)

    def _is_gathered_once(self) -> bool:
        """Whether all weights are gathered at once; the same on all processes."""
        if self._parallel.shard != "zero3" or self._rollout.gather == "all":
            return True
        fits = self._rollout.gather == "auto" and self._fits()
        fits_everywhere = not self._ranks.world.max(torch.tensor([float(not fits)])).item()
        if not fits_everywhere and self._log is not None and self._rollout.gather == "auto":
            self._log(
                f"rollout: all weights at once take {self._whole_bytes / 2**30:.2f} GiB on each process, which do not "
                "fit, so layers are gathered in each pass and all ranks step together"
            )
            self._log = None
        return fits_everywhere

    def _fits(self) -> bool:
        device = next(self.model.parameters()).device
        available = available_bytes(device)
        if available is None:
            return True
        share = available if device.type == "cuda" else available // self._processes_here
        return self._whole_bytes + int(self._rollout.cache_gib * 2**30) <= share
