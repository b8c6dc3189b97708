"""Compare what the module and the optimizers show with what the runtime holds. Knows no runtime by name."""

from __future__ import annotations

import contextlib
import fnmatch
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from fsdp_guard.holders import (
    Binding,
    BoundGroup,
    Inventory,
    Loose,
    address_range,
    local_tensor,
    remedy_of,
    take_inventory,
)
from fsdp_guard.inputs import as_modules, as_optimizers, as_patterns, named_roots
from fsdp_guard.report import Divergence, DivergenceKind, Event, Report
from fsdp_guard.values import Stale, find_stale, refresh_stale

_REMEDIES = {
    DivergenceKind.REPLACED_PARAMETER: (
        "Load with load_state_dict(..., assign=False), the default, or load before the model is sharded; to change a "
        "weight by hand, copy into it under torch.no_grad() instead of assigning a new Parameter."
    ),
    DivergenceKind.DETACHED_STORAGE: (
        "Convert the model before it is sharded (or pass the dtypes to the runtime's mixed-precision policy), and do "
        "not call .to(dtype), .half() or swap_tensors on it afterwards."
    ),
    DivergenceKind.STALE_COMPUTE_WEIGHT: (
        "Call fsdp_guard.refresh(model) on every rank after the load and before the first forward, or hand "
        "refresh_stale=True to the guard."
    ),
    DivergenceKind.MIXED_PHASE: (
        "Do not catch exceptions of a forward and go on with the same model; leave unsharding to the runtime."
    ),
    DivergenceKind.BROKEN_TIE: (
        "Untie the parameters before the model is sharded, or use a version of the runtime that tracks ties "
        "(Megatron-FSDP V2 does since August 2026)."
    ),
    DivergenceKind.MISSING_PARAMETER: (
        "Replace, prune, parametrize or wrap submodules before the model is sharded, not after."
    ),
    DivergenceKind.UNMANAGED_PARAMETER: "Add the parameter (LoRA, new head) before the model is sharded.",
    DivergenceKind.OPTIMIZER_ORPHAN: (
        "Build the optimizer from model.parameters() after the model was sharded and loaded."
    ),
    DivergenceKind.OPTIMIZER_MISSING: (
        "Build the optimizer from model.parameters() after the model was sharded and hand all optimizers to the "
        "guard; if the parameter is not meant to train, say so with requires_grad_(False)."
    ),
}


def inspect(
    model: nn.Module | Sequence[nn.Module],
    optimizers: Any = None,
    *,
    values: bool = False,
    allow_unmanaged: Sequence[str] = (),
) -> Report:
    """Look once, and say what was found. Emits nothing, changes nothing, never raises for a divergence.

    Args:
        model: The model, or a sequence of model chunks. Its parameters may be sharded or, inside a forward, unsharded.
        optimizers: One optimizer, a sequence of them, or ``None``. Anything with ``param_groups`` counts. Hand in all
            optimizers of the model: a trainable parameter in none of them is a divergence.
        values: Also compare compute weights with main weights, where the runtime keeps both. This reads the weights
            and synchronises with the device once; everything else costs host time only.
        allow_unmanaged: FQNs of trainable parameters that no holder owns on purpose, such as those that were handed to
            FSDP2's ``ignored_params``, or patterns of them with ``*`` and ``?``.

    Returns:
        The report, with ``event`` set to ``call``.

    Raises:
        TypeError: ``model`` holds something that is no module, or ``optimizers`` something that is no optimizer.
        ValueError: ``model`` is an empty sequence.
        UnsupportedLayoutError: A known runtime was found in a version whose holders fsdp_guard cannot read.
    """
    roots = named_roots(as_modules(model))
    allowed = as_patterns(allow_unmanaged)
    return examine(lambda: take_inventory(roots), as_optimizers(optimizers), Event.CALL, Values(values), allowed)


@dataclass(frozen=True)
class Values:
    """What a look does about values.

    Args:
        compare: Whether to compare compute weights with main weights.
        refresh: Whether to let the runtime refresh what is stale.
        pending: Whether something stale may still be refreshed by the caller, and is no divergence yet.
    """

    compare: bool = False
    refresh: bool = False
    pending: bool = False


def examine(
    take: Callable[[], Inventory],
    optimizers: Sequence[Any],
    event: Event,
    values: Values,
    allow_unmanaged: Sequence[str] = (),
) -> Report:
    """Take an inventory, compare it, and time both.

    Args:
        take: Called once, gives the inventory.
        optimizers: The optimizers to compare with it; none means that optimizers are not judged.
        event: Why this look happens.
        values: What to do about values.
        allow_unmanaged: See ``inspect``.
    """
    started = time.perf_counter()
    with _without_collections():
        inventory = take()
        if allow_unmanaged:
            inventory.loose = [_allow(loose, allow_unmanaged) for loose in inventory.loose]
        divergences = _check_identities(inventory, optimizers)
    stale, refreshed = _check_values(inventory.groups, values)
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    return Report(
        divergences=_found_on(rank, divergences if values.pending else divergences + stale),
        parameters_checked=sum(len(bindings) for _, bindings in inventory.groups),
        parameters_unclaimed=len(inventory.outside) + sum(loose.left_alone for loose in inventory.loose),
        runtimes=inventory.runtimes,
        event=event,
        rank=rank,
        elapsed_s=time.perf_counter() - started,
        pending=_found_on(rank, stale if values.pending else []),
        refreshed=_found_on(rank, refreshed),
    )


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Hold Python's cycle collector back.

    A look makes several objects a parameter and no cycle. They would set off full collections, each of which walks
    everything that the process has.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _allow(loose: Loose, patterns: Sequence[str]) -> Loose:
    is_allowed = any(fnmatch.fnmatchcase(loose.fqn, pattern) for pattern in patterns)
    return loose._replace(left_alone=True) if is_allowed else loose


def _check_identities(inventory: Inventory, optimizers: Sequence[Any]) -> list[Divergence]:
    divergences = [d for bound in inventory.groups for d in _check_group(bound)]
    if inventory.loose or inventory.outside or optimizers:
        holders = _Holders(inventory)
        divergences += _check_unbound(inventory, holders)
        if optimizers and holders.resting:
            divergences += _check_optimizers(optimizers, inventory, holders)
    return divergences


def _found_on(rank: int, divergences: Sequence[Divergence]) -> tuple[Divergence, ...]:
    return tuple(replace(divergence, rank=rank) for divergence in divergences)


def _check_values(groups: Sequence[BoundGroup], values: Values) -> tuple[list[Divergence], list[Divergence]]:
    """Return what is stale, and what was until it was refreshed."""
    if not values.compare:
        return [], []
    stale = find_stale(groups)
    if not values.refresh:
        return [_stale(found) for found in stale], []
    refresh_stale(groups, stale)
    still = find_stale(groups) if stale else []
    still_stale = {found.binding.fqn for found in still}
    return [_stale(found) for found in still], [_stale(f) for f in stale if f.binding.fqn not in still_stale]


def _check_group(bound: BoundGroup) -> list[Divergence]:
    group, bindings = bound
    divergences, ties = _check_ties(bindings)
    resting: list[Binding] = []
    materialized: list[Binding] = []
    ranges: _Ranges | None = None
    for binding in bindings:
        shown = binding.shown
        if shown is None:
            divergences.append(_missing(binding))
            continue
        if shown is binding.resting:
            resting.append(binding)
            buffers = group.resting_buffers(binding.position)
        elif shown is binding.materialized:
            materialized.append(binding)
            buffers = group.materialized_buffers(binding.position)
        else:
            if id(shown) not in ties:
                divergences.append(_stranger(binding, shown, bindings))
            continue
        if buffers is None:
            continue
        if ranges is None or ranges.buffers is not buffers:
            ranges = _Ranges(buffers)  # once for all parameters of a group that lie in the same buffers
        local = local_tensor(shown)
        if local not in ranges:
            divergences.append(_detached(binding, shown, local))
    if resting and materialized:
        divergences += _mixed(resting, materialized)
    return divergences


class _Ranges:
    """The addresses at which a parameter of a group may lie."""

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        self.buffers = buffers
        self._ranges = [address_range(buffer) for buffer in buffers]

    def __contains__(self, local: torch.Tensor) -> bool:
        address = local.data_ptr()
        for start, end in self._ranges:
            if start <= address < end:
                return True  # also where the runtime has released the buffer: it starts at 0 then, as its views do
        # A shard without rows has no address, but it has a dtype.
        return not local.numel() and any(local.dtype == buffer.dtype for buffer in self.buffers)


def _check_ties(bindings: Sequence[Binding]) -> tuple[list[Divergence], set[int]]:
    """Find holders that share one unsharded parameter; return them and the ids of their sharded ones."""
    first: dict[int, Binding] = {}
    divergences: list[Divergence] = []
    ties: set[int] = set()
    for binding in bindings:
        if binding.materialized is None:
            continue
        twin = first.setdefault(id(binding.materialized), binding)
        if twin.position == binding.position:
            continue
        ties |= {id(twin.resting), id(binding.resting)}
        detail = (
            f"Shares the unsharded {_describe(binding.materialized)} with {twin.fqn}, but is sharded on its own: seen "
            f"two holders, {_describe(twin.resting)} and {_describe(binding.resting)}; expected one."
        )
        divergences.append(_divergence(DivergenceKind.BROKEN_TIE, binding.fqn, binding.runtime, detail))
    return divergences, ties


def _check_unbound(inventory: Inventory, holders: _Holders) -> list[Divergence]:
    divergences = []
    for fqn, parameter, runtime, left_alone in inventory.loose:
        held = holders.resting.get(id(parameter)) or holders.materialized.get(id(parameter))
        if held is not None:
            # Moved, not aliased, when the holder's own name leads nowhere: that is a missing parameter already.
            if held.shown is not None:
                divergences.append(_alias(fqn, parameter, held))
        elif parameter.requires_grad and not left_alone:
            detail = f"Seen {_describe(parameter)}, which no {runtime} holder owns; expected a sharded parameter."
            divergences.append(_divergence(DivergenceKind.UNMANAGED_PARAMETER, fqn, runtime, detail))
    for fqn, parameter in inventory.outside:
        held = holders.materialized.get(id(parameter))
        if held is not None and held.resting is not parameter:
            divergences.append(_alias(fqn, parameter, held))
    return divergences


class _Holders:
    """Look up, by object id, what the runtime holds and what the module shows."""

    def __init__(self, inventory: Inventory) -> None:
        self.resting: dict[int, Binding] = {}
        self.materialized: dict[int, Binding] = {}
        self.shown: dict[int, Binding] = {}
        for _, bindings in inventory.groups:
            for binding in bindings:
                self.resting.setdefault(id(binding.resting), binding)
                if binding.materialized is not None:
                    self.materialized.setdefault(id(binding.materialized), binding)
                if binding.shown is not None:
                    self.shown.setdefault(id(binding.shown), binding)


def _check_optimizers(optimizers: Sequence[Any], inventory: Inventory, holders: _Holders) -> list[Divergence]:
    divergences: list[Divergence] = []
    stepped: set[int] = set()
    strangers: list[torch.Tensor] = []
    # Shown by the module where no holder is bound: outside every unit a legitimate parameter of another kind, inside
    # one reported already.
    unbound = {id(parameter) for _, parameter in inventory.outside}
    unbound |= {id(loose.parameter) for loose in inventory.loose}
    for optimizer in optimizers:
        for parameter in _parameters(optimizer):
            key = id(parameter)
            if key in holders.resting:
                if key not in stepped:
                    divergences += _check_link(holders.resting[key])
                stepped.add(key)
            elif held := holders.materialized.get(key) or holders.shown.get(key):
                divergences.append(_orphan(held, parameter))
            elif key not in unbound:
                strangers.append(parameter)
        divergences += _check_state(optimizer, holders)
    left_out = [
        held
        for key, held in holders.resting.items()
        # Megatron's optimizers leave out parameters of which this rank has no rows.
        if key not in stepped and held.resting.requires_grad and local_tensor(held.resting).numel()
    ]
    divergences += _pair(strangers, left_out)
    return divergences + [_left_out(held, len(left_out), len(holders.resting)) for held in left_out]


def _check_link(binding: Binding) -> list[Divergence]:
    if binding.group.step_reaches_forward(binding.position):
        return []
    detail = (
        f"The optimizer has {_describe(binding.resting)}, which has lost the runtime's mark; expected the mark by "
        "which each step finds the compute weights to refresh: without it they keep their first values."
    )
    remedy = (
        "Do not call .to() on the model after it was sharded: it rebuilds the parameters even where nothing moves. "
        "Lightning's ModelParallelStrategy calls it; give the strategy a model_to_device() that does nothing."
    )
    return [Divergence(DivergenceKind.OPTIMIZER_ORPHAN, binding.fqn, binding.runtime, detail, remedy)]


def _pair(strangers: Sequence[torch.Tensor], left_out: Sequence[Binding]) -> list[Divergence]:
    """Report the strangers that stand in for a parameter that was left out.

    A stranger alone proves nothing: an optimizer may train a second model, or a loss with parameters of its own.
    """
    places: dict[str, list[Binding]] = {}
    for held in reversed(left_out):
        places.setdefault(_shape(held.resting), []).append(held)
    return [_orphan(place.pop(), stranger) for stranger in strangers if (place := places.get(_shape(stranger)))]


def _check_state(optimizer: Any, holders: _Holders) -> list[Divergence]:
    """Find state that is still keyed by parameters which the optimizer's groups no longer contain."""
    state = getattr(optimizer, "state", None)
    if not isinstance(state, Mapping) or not state:
        return []
    parameters = list(_parameters(optimizer))
    current = {id(parameter) for parameter in parameters}
    stateful = {id(key) for key in state}
    stale = [key for key in state if isinstance(key, torch.Tensor) and id(key) not in current]
    without = [
        held
        for parameter in parameters
        if id(parameter) not in stateful and (held := holders.resting.get(id(parameter))) is not None
    ]
    return _pair(stale, without)


def _parameters(optimizer: Any) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _missing(binding: Binding) -> Divergence:
    if binding.owner is None:
        seen = "no module at that name"
    else:
        seen = f"a {type(binding.owner).__name__} without a parameter {binding.attribute!r}"
    detail = f"Seen {seen}; expected {_describe(binding.resting)}."
    return _divergence(DivergenceKind.MISSING_PARAMETER, binding.fqn, binding.runtime, detail)


def _stranger(binding: Binding, shown: torch.Tensor, bindings: Sequence[Binding]) -> Divergence:
    """Report a parameter that is not the runtime's: it broke a tie if the holder is still shown under another name."""
    expected = f"the runtime's own {_describe(binding.resting)}"
    if binding.materialized is not None and binding.materialized is not binding.resting:
        expected += f" (sharded) or {_describe(binding.materialized)} (unsharded)"
    held = (binding.resting, binding.materialized)
    for other in bindings:
        shows_holder = other.shown is not None and any(other.shown is holder for holder in held)
        if other.position == binding.position and shows_holder:
            detail = f"Seen {_describe(shown)}; expected, as at {other.fqn}, {expected}."
            return _divergence(DivergenceKind.BROKEN_TIE, binding.fqn, binding.runtime, detail)
    detail = f"Seen {_describe(shown)}; expected {expected}."
    return _divergence(DivergenceKind.REPLACED_PARAMETER, binding.fqn, binding.runtime, detail)


def _detached(binding: Binding, shown: torch.Tensor, local: torch.Tensor) -> Divergence:
    detail = (
        f"Seen {_describe(shown)} with its data at {local.data_ptr():#x} ({_dtype_name(local.dtype)}, {local.device}), "
        "outside the runtime's buffer; expected a view of that buffer."
    )
    return _divergence(DivergenceKind.DETACHED_STORAGE, binding.fqn, binding.runtime, detail)


def _stale(found: Stale) -> Divergence:
    detail = (
        f"Seen {found.differing} of this rank's {found.compared} {_dtype_name(found.compute_dtype)} compute weights "
        f"differ from the {_dtype_name(found.main_dtype)} main weights cast to their dtype; expected none."
    )
    return _divergence(DivergenceKind.STALE_COMPUTE_WEIGHT, found.binding.fqn, found.binding.runtime, detail)


def _mixed(resting: Sequence[Binding], materialized: Sequence[Binding]) -> list[Divergence]:
    """Report the smaller side, which is the one that was left behind or brought forward."""
    phases = [("sharded", resting), ("unsharded", materialized)]
    (few_phase, few), (many_phase, many) = sorted(phases, key=lambda phase: len(phase[1]))
    detail = (
        f"Seen {few_phase} while {len(many)} of its group, such as {many[0].fqn}, are {many_phase}; expected one phase."
    )
    return [_divergence(DivergenceKind.MIXED_PHASE, binding.fqn, binding.runtime, detail) for binding in few]


def _alias(fqn: str, parameter: torch.Tensor, held: Binding) -> Divergence:
    detail = (
        f"Seen {_describe(parameter)}, which the runtime holds as {held.fqn} and switches there alone; "
        "expected a holder that knows both names."
    )
    return _divergence(DivergenceKind.BROKEN_TIE, fqn, held.runtime, detail)


def _orphan(binding: Binding, parameter: torch.Tensor) -> Divergence:
    if parameter is binding.materialized:
        seen = "the unsharded parameter, whose gradient the runtime takes away"
    elif parameter is binding.shown:
        seen = "the parameter that replaced the runtime's on the module"
    else:
        seen = "a parameter of the same shape that neither the module nor the runtime has"
    detail = f"The optimizer has {_describe(parameter)}, {seen}; expected {_describe(binding.resting)}."
    return _divergence(DivergenceKind.OPTIMIZER_ORPHAN, binding.fqn, binding.runtime, detail)


def _left_out(held: Binding, left_out: int, total: int) -> Divergence:
    detail = (
        f"No optimizer has {_describe(held.resting)}; expected each trainable parameter in one "
        f"({left_out} of {total} are left out)."
    )
    return _divergence(DivergenceKind.OPTIMIZER_MISSING, held.fqn, held.runtime, detail)


def _divergence(kind: DivergenceKind, fqn: str, runtime: str, detail: str) -> Divergence:
    return Divergence(kind, fqn, runtime, detail, remedy_of(runtime, kind) or _REMEDIES[kind])


def _describe(tensor: torch.Tensor) -> str:
    """Say what ``tensor`` is, never what is in it."""
    placements = getattr(tensor, "placements", None)
    where = f" {list(placements)}" if placements is not None else ""
    return f"{type(tensor).__name__} {_dtype_name(tensor.dtype)} {_shape(tensor)}{where} {id(tensor):#x}"


def _shape(tensor: torch.Tensor) -> str:
    return "uninitialized" if is_lazy(tensor) else str(tuple(tensor.shape)).replace(" ", "")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
