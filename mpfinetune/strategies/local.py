"""One process, one device: the reference that every other strategy is compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from mpfinetune.data.batches import GlobalBatch
from mpfinetune.strategies.base import Observer, Strategy


class LocalStrategy(Strategy):
    """Microbatch after microbatch on one device."""

    def _forward_backward(self, batch: GlobalBatch, loss_scale: float) -> Tensor:
        total = torch.zeros((), device=self.context.device)
        for inputs, labels in self._microbatches(batch):
            loss = self.loss_sum(self.stages[0](**inputs), labels) / max(1, batch.target_count)
            (loss * loss_scale).backward()
            total += loss.detach()
        return total

    def _forward(self, batch: GlobalBatch, observe: Observer) -> None:
        for inputs, labels in self._microbatches(batch):
            observe(self.stages[0](**inputs), labels)

    def _microbatches(self, batch: GlobalBatch) -> list[tuple[dict[str, Tensor], Tensor]]:
        """Slices of at most micro_size rows; the last may be smaller."""
        rows = batch.tensors["input_ids"].shape[0]
        pairs = []
        for start in range(0, rows, self.plan.micro_size):
            part = {name: t[start : start + self.plan.micro_size].to(self.context.device) for name, t in batch.tensors.items()}
            labels = part.pop("labels")
            pairs.append((part, labels))
        return pairs
