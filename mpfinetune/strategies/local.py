"""One process, microbatch after microbatch: the reference that every other strategy is compared with.

On one device, or on several by a map of modules (see ``dispatch``): then one device computes at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mpfinetune.data.batches import GlobalBatch
from mpfinetune.strategies.base import Observer, Strategy


class LocalStrategy(Strategy):
    """Microbatch after microbatch; the batch goes to the device of the embeddings, the labels to that of the logits."""

    def _forward_backward(self, batch: GlobalBatch, loss_scale: float) -> Tensor:
        total = torch.zeros((), device=self.context.device)
        for inputs, labels in self._microbatches(batch):
            total += self._train_microbatch(inputs, labels, max(1, batch.target_count), loss_scale).to(total.device)
        return total

    def _train_microbatch(self, inputs: dict[str, Tensor], labels: Tensor, target_count: int, loss_scale: float) -> Tensor:
        """Apart, so that the graph is gone before the next microbatch (bitsandbytes' int8 layers hold their inputs until then)."""
        loss = self._microbatch_loss(inputs, labels) / target_count
        (loss * loss_scale).backward()
        return loss.detach()

    def _microbatch_loss(self, inputs: dict[str, Tensor], labels: Tensor) -> Tensor:
        """Apart, so that the logits do not live on through the backward pass."""
        logits = self.stages[0](**inputs)
        return self.loss_sum(logits, labels.to(logits.device))

    def _forward(self, batch: GlobalBatch, observe: Observer) -> None:
        for inputs, labels in self._microbatches(batch):
            logits = self.stages[0](**inputs)
            observe(logits, labels.to(logits.device))

    def _microbatches(self, batch: GlobalBatch) -> list[tuple[dict[str, Tensor], Tensor]]:
        """Slices of at most micro_size rows; the last may be smaller."""
        device = self._input_device()
        rows = batch.tensors["input_ids"].shape[0]
        pairs = []
        for start in range(0, rows, self.plan.micro_size):
            part = {name: t[start : start + self.plan.micro_size].to(device) for name, t in batch.tensors.items()}
            labels = part.pop("labels")
            pairs.append((part, labels))
        return pairs

    def _input_device(self) -> torch.device:
        return self.context.device if self.plan.placement is None else self.context.nth_device(self.plan.placement.homes[""])
