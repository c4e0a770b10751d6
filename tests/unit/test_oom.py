"""What counts as out of memory, and what a rank does after it."""

from __future__ import annotations

import weakref

import pytest
import torch

from mpfinetune.strategies.oom import MemoryGuard, out_of_memory_words
from tests.oom_injection import CPU_WORDS


def wrapped(cause: Exception) -> Exception:
    """As torch's pipeline runtime hands on what a stage raises."""
    try:
        try:
            raise cause
        except Exception as error:
            raise RuntimeError("[Stage 1] failed to run forward") from error
    except RuntimeError as error:
        return error


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError(CPU_WORDS),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        MemoryError(),
        wrapped(torch.OutOfMemoryError("CUDA out of memory.")),
        wrapped(wrapped(RuntimeError(CPU_WORDS))),
    ],
    ids=lambda error: type(error).__name__,
)
def test_wants_of_memory_are_recognised(error: Exception) -> None:
    words = out_of_memory_words(error)
    assert words and "failed to run forward" not in words


@pytest.mark.parametrize("error", [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("out of memory"), wrapped(KeyError("x"))])
def test_other_errors_are_not(error: Exception) -> None:
    assert out_of_memory_words(error) is None
    guard = MemoryGuard()

    def work() -> None:
        raise error

    with pytest.raises(type(error)):
        guard.runs(work)
    assert guard.failure is None


def test_a_real_cpu_allocation_that_fails_is_recognised() -> None:
    guard = MemoryGuard()
    assert not guard.runs(lambda: torch.empty(2**60, dtype=torch.uint8))
    assert guard.failure is not None and "allocate" in guard.failure


def test_what_the_broken_pass_held_is_freed_before_it_goes_on() -> None:
    guard, held = MemoryGuard(), []

    def work() -> None:
        activations = torch.ones(8)
        held.append(weakref.ref(activations))
        raise wrapped(torch.OutOfMemoryError("no room"))

    assert not guard.runs(work)
    assert held[0]() is None
    assert not guard.runs(lambda: pytest.fail("the rest of the step is skipped"))


def test_release_comes_before_the_rest() -> None:
    guard, order = MemoryGuard(), []
    guard.release = lambda: order.append("released")

    def work() -> None:
        raise torch.OutOfMemoryError("no room")

    assert not guard.runs(work)
    assert order == ["released"]
