"""Run Megatron-FSDP, V1 and V2, without a GPU.

On the CPU everything runs in order, so the streams and events that the runtime synchronises have nothing to do. It
asks torch.cuda for them all the same; inert stand-ins for just those names are enough (megatron-fsdp 0.6.0 and 0.6.1).
V1 also asks for the current device, and moves to it what it gathers.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch


class _Stream:
    """Answers for torch.cuda.Stream and torch.cuda.Event, and does nothing."""

    device = torch.device("cpu")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs

    def wait_stream(self, stream: _Stream) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: _Stream) -> None:
        """Nothing to wait for."""

    def wait(self, stream: _Stream | None = None) -> None:
        """Nothing to wait for."""

    def record_event(self, event: _Stream | None = None) -> _Stream:
        """Return an event that has happened."""
        return event or _Stream()


def _stay(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    del args, kwargs
    return tensor


def install_cuda_stand_ins() -> None:
    """Replace the functions of ``torch.cuda`` that the runtime calls, and ``Tensor.cuda``, in this process.

    Raises:
        RuntimeError: There is a GPU, whose real streams must be used.
    """
    if torch.cuda.is_available():
        raise RuntimeError("stand-ins for CUDA streams are for machines without a GPU; this one has one.")
    stand_ins: dict[str, Any] = {
        "Stream": _Stream,
        "Event": _Stream,
        "current_device": lambda: 0,
        "current_stream": lambda device=None: _Stream(),
        "stream": lambda stream: contextlib.nullcontext(),
        "device": lambda device: contextlib.nullcontext(),
    }
    for name, stand_in in stand_ins.items():
        setattr(torch.cuda, name, stand_in)
    torch.Tensor.cuda = _stay  # type: ignore[method-assign, assignment]
    torch.cuda.nvtx.range_push = lambda label: 0
    torch.cuda.nvtx.range_pop = lambda: 0
