"""Compare the weights that forward reads with those that the optimizer updates, bit for bit, and refresh them.

A runtime with mixed precision keeps two buffers a group: *main weights*, which loads and the optimizer write, and
*compute weights* of another dtype, which forward gathers from. This is the only part of the product that reads values.
Groups whose two buffers are one cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from fsdp_guard.holders import Binding, BoundGroup, Weights, take_inventory
from fsdp_guard.inputs import as_modules, named_roots

_SCRATCH_BYTES = 48 * 1024 * 1024
"""Most that is allocated at a time: the main weights cast to the dtype of the compute weights, and a mask."""

_PACKED_NUMEL = 64 * 1024
"""Elements from which on counting them packed is worth its extra kernels."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Stale(NamedTuple):
    """A binding whose compute weights are not its main weights.

    ``differing`` of the ``compared`` elements that this rank has of both differ.
    """

    binding: Binding
    differing: int
    compared: int
    main_dtype: torch.dtype
    compute_dtype: torch.dtype


class _Piece(NamedTuple):
    start: int
    end: int
    position: int


def refresh(model: nn.Module | Sequence[nn.Module]) -> list[str]:
    """Let the runtime refresh the compute weights of each group in which they are not the main weights.

    Call it on every rank, after a load that wrote the main weights alone: for example after
    ``load_state_dict(assign=False)`` into a bf16 model with fp32 main weights. Groups that are fresh are not touched.

    Args:
        model: The model, or a sequence of model chunks.

    Returns:
        FQNs of the parameters that were stale on this rank.

    Raises:
        TypeError: ``model`` holds something that is no module.
        ValueError: ``model`` is an empty sequence.
        UnsupportedLayoutError: A known runtime was found in a version whose holders fsdp_guard cannot read.
    """
    groups = take_inventory(named_roots(as_modules(model))).groups
    stale = find_stale(groups)
    refresh_stale(groups, stale)
    return [found.binding.fqn for found in stale]


def refresh_stale(groups: Iterable[BoundGroup], stale: Iterable[Stale]) -> None:
    """Let the runtime refresh the groups in which something is stale, on this rank or on one it must refresh with."""
    stale_groups = {id(found.binding.group) for found in stale}
    with torch.no_grad():
        for group, _ in groups:
            weights = group.weights()
            if weights and _agree(id(group) in stale_groups, weights[0].main.device, group.refreshed_together()):
                group.refresh()


def find_stale(groups: Iterable[BoundGroup]) -> list[Stale]:
    """Return the bindings whose compute weights differ from the main weights cast to their dtype, in any bit.

    Two NaNs are equal: which NaN a cast gives depends on the code path that it takes. Compares what this rank has of
    both, so it communicates nothing whatever the placements; every main weight is compared on the rank that has it.
    Takes less than 64 MiB of scratch, and synchronises once with each device that has compute weights of their own.
    """
    bound_groups = list(groups)
    compared: dict[tuple[int, int], Weights] = {}
    sums: dict[torch.device, list[tuple[tuple[int, int], torch.Tensor]]] = {}
    with torch.no_grad():
        for number, (group, bindings) in enumerate(bound_groups):
            bound = {binding.position for binding in bindings}
            for weights in group.weights():
                positions = sorted(bound & weights.spans.keys())
                compared.update({(number, position): weights for position in positions})
                for position, differing in _count_differing(weights, positions):
                    sums.setdefault(differing.device, []).append(((number, position), differing))
        totals: dict[tuple[int, int], int] = {}
        for entries in sums.values():
            counts = torch.stack([differing for _, differing in entries]).tolist()
            for (key, _), count in zip(entries, counts, strict=True):
                totals[key] = totals.get(key, 0) + count
    return [
        _stale(binding, compared[number, binding.position], count)
        for number, (_, bindings) in enumerate(bound_groups)
        for binding in bindings
        if (count := totals.get((number, binding.position), 0))
    ]


def _stale(binding: Binding, weights: Weights, differing: int) -> Stale:
    start, end = weights.spans[binding.position]
    return Stale(binding, differing, end - start, weights.main.dtype, weights.compute.dtype)


def _count_differing(weights: Weights, positions: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield positions with numbers of differing elements, as tensors that are still on the device."""
    chunk = max(1, _SCRATCH_BYTES // (weights.compute.element_size() + 1))
    for window in _windows(weights, positions, chunk):
        yield from _count_in(window, weights)


def _count_in(window: Sequence[_Piece], weights: Weights) -> list[tuple[int, torch.Tensor]]:
    first = window[0].start
    cast = weights.main[first : window[-1].end].to(weights.compute.dtype)
    bits = _BITS[cast.element_size()]
    counts = []
    for start, end, position in window:
        ours, theirs = cast[start - first : end - first], weights.compute[start:end]
        differs = ours.view(bits) != theirs.view(bits)
        count = _count(differs)
        # torch's CPU kernels cast a NaN to other bits in a vector than at its end (2.13); its CUDA kernels do not.
        if not count.is_cuda and count:
            count = _count(differs & ~(ours.isnan() & theirs.isnan()))
        counts.append((position, count))
    return counts


def _count(mask: torch.Tensor) -> torch.Tensor:
    """Return the number of true elements of ``mask``, which starts its storage, as a tensor of one element.

    ``mask.sum()`` alone would first copy each element to 8 bytes. Here 8 of them are added as one integer, 128 times
    at most, so that each sum stays within its byte; only those sums are copied.
    """
    rest = mask.numel() % (8 * 128)
    packed = mask.numel() - rest
    if packed < _PACKED_NUMEL:
        return mask.sum()
    count = mask[:packed].view(torch.int64).view(-1, 128).sum(dim=1).view(torch.uint8).sum()
    return count + mask[packed:].sum() if rest else count


def _windows(weights: Weights, positions: Sequence[int], chunk: int) -> Iterator[list[_Piece]]:
    """Cut what is to be compared into runs of pieces, each run of ``chunk`` elements at most."""
    pieces = sorted(
        _Piece(start, min(start + chunk, weights.spans[position][1]), position)
        for position in positions
        for start in range(*weights.spans[position], chunk)
    )
    window: list[_Piece] = []
    for piece in pieces:
        if window and piece.end - window[0].start > chunk:
            yield window
            window = []
        window.append(piece)
    if window:
        yield window


def _agree(stale: bool, device: torch.device, together: Sequence[Any]) -> bool:
    """Return whether ``stale`` holds on any rank of the process groups; without any, on this one."""
    if not together:
        return stale
    flag = torch.tensor([int(stale)], device=device)
    for process_group in together:
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=process_group)
    return bool(flag.item())
