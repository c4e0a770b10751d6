"""Out of memory in a forward or backward pass: noticed on the rank where it happens, agreed by all ranks, and survived.

The error is dealt with outside the except block: until then its traceback holds the frames of the pass, and with them the activations
whose memory is wanted back. A rank that has run out skips the rest of the step's work; what the other ranks wait for still reaches them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import torch

# The caching allocator has an error of its own; these are the words of torch's CPU allocator, of cudaMalloc, cuBLAS and cuDNN.
_WORDS = ("out of memory", "can't allocate memory", "cannot allocate memory", "cublas_status_alloc_failed", "cudnn_status_alloc_failed")


class OutOfMemory(Exception):
    """A pass did not fit.

    ``agreed``: every rank raises it, the gradients are dropped everywhere, and the same batch can be run again with fewer rows at once.
    Otherwise this rank alone knows, and the run must end.
    """

    def __init__(self, failures: Sequence[tuple[int, str]], agreed: bool) -> None:
        """``failures``: (rank, the allocator's words) of every rank that ran out."""
        self.ranks = [rank for rank, _ in failures]
        self.agreed = agreed
        super().__init__("; ".join(f"rank {rank} ran out of memory ({words})" for rank, words in failures))


class MemoryGuard:
    """Whether this rank has run out of memory in the present step. What may run out goes through ``runs``."""

    def __init__(self) -> None:
        self.failure: str | None = None  # the allocator's words
        self.release: Callable[[], None] = nothing  # drops what the step has kept for its backward passes

    def runs(self, work: Callable[[], object]) -> bool:
        """Do ``work``; False where it ran out of memory, or was skipped since something before it had."""
        if self.failure is not None:
            return False
        try:
            work()
            return True
        except Exception as error:
            words = out_of_memory_words(error)
            if words is None:
                raise
        self.failure = words
        self.release()
        free_memory()
        return False


def nothing() -> None:
    """No step is under way that keeps anything."""


def out_of_memory_words(error: BaseException) -> str | None:
    """The allocator's own words where an error, or what caused it, is a want of memory; else None.

    torch's pipeline runtime wraps what a stage raises, so the causes are looked through, too.
    """
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in seen:
        text = str(current)
        told = isinstance(current, RuntimeError) and any(word in text.lower() for word in _WORDS)
        if told or isinstance(current, (torch.OutOfMemoryError, MemoryError)):
            return (text.strip().splitlines() or [type(current).__name__])[0][:200]
        seen.append(current)
        current = current.__cause__ or current.__context__
    return None


def free_memory() -> None:
    """Give back what nobody holds: cycles of frames and errors first, then the allocator's cached blocks; the peak is counted anew."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
