"""What one look found: divergences, the report that carries them, and the errors that carry the report."""

from __future__ import annotations

import enum
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

_FQNS_SHOWN = 3
"""FQNs that a message names for each kind before it says how many more there are."""

_WIDTH = 110
"""Columns that a message is wrapped at."""


class Event(str, enum.Enum):
    """Why the check ran. The values are a public contract for dashboards."""

    LOAD = "load"
    FIRST_FORWARD = "first_forward"
    FIRST_STEP = "first_step"
    SAVE = "save"
    CALL = "call"

    def __str__(self) -> str:
        return self.value


class DivergenceKind(str, enum.Enum):
    """Which invariant is broken. The values are a public contract for dashboards."""

    REPLACED_PARAMETER = "replaced_parameter"
    DETACHED_STORAGE = "detached_storage"
    STALE_COMPUTE_WEIGHT = "stale_compute_weight"
    MIXED_PHASE = "mixed_phase"
    BROKEN_TIE = "broken_tie"
    MISSING_PARAMETER = "missing_parameter"
    UNMANAGED_PARAMETER = "unmanaged_parameter"
    OPTIMIZER_ORPHAN = "optimizer_orphan"
    OPTIMIZER_MISSING = "optimizer_missing"

    def __str__(self) -> str:
        return self.value

    @property
    def cause(self) -> str:
        """What is broken, what follows from it, and what usually did it: one or two sentences."""
        return _CAUSES[self]


_CAUSES = {
    DivergenceKind.REPLACED_PARAMETER: (
        "The module shows a parameter that the runtime does not hold, so forward and the optimizer go on without it. "
        "Typically load_state_dict(assign=True), or an assignment such as module.weight = nn.Parameter(...), "
        "after the model was sharded."
    ),
    DivergenceKind.DETACHED_STORAGE: (
        "The parameter is the runtime's own, but its data no longer lies in the runtime's buffer, so what is written "
        "to one is never read from the other. Typically model.to(dtype), model.half(), torch.utils.swap_tensors, or "
        'Lightning\'s precision="bf16-true" converting a model that was sharded before.'
    ),
    DivergenceKind.STALE_COMPUTE_WEIGHT: (
        "The weights that the optimizer updates were loaded, the lower-precision weights that forward reads were not "
        "refreshed from them."
    ),
    DivergenceKind.MIXED_PHASE: (
        "Some parameters of one group are sharded while others are unsharded; the runtime always switches them "
        "together. Typically an exception that was caught halfway through a forward, or a manual unshard."
    ),
    DivergenceKind.BROKEN_TIE: (
        "One parameter with two names is no longer one parameter: each name would be trained, or left untrained, on "
        "its own. Typically tied embeddings sharded by a version that does not track ties."
    ),
    DivergenceKind.MISSING_PARAMETER: (
        "The runtime holds a parameter under a name that no longer leads to one. Typically a submodule that was "
        "replaced, deleted, pruned or parametrized after the model was sharded."
    ),
    DivergenceKind.UNMANAGED_PARAMETER: (
        "A trainable parameter inside a sharded module belongs to no holder: it is not sharded and its gradients are "
        "not reduced, so ranks drift apart. Typically LoRA or a new head that was added after the model was sharded."
    ),
    DivergenceKind.OPTIMIZER_ORPHAN: (
        "The optimizer steps a parameter that is not the runtime's, so its updates never reach the model. Typically "
        "an optimizer that was built before the model was sharded, or around a load that replaced the parameters."
    ),
    DivergenceKind.OPTIMIZER_MISSING: (
        "A trainable parameter of the runtime is in none of the optimizers, so it never changes. Typically an "
        "optimizer that was built before the model was sharded, or one that was not handed to the guard."
    ),
}


@dataclass(frozen=True)
class Divergence:
    """One binding, or one optimizer entry, that breaks an invariant.

    Args:
        kind: The invariant that is broken.
        fqn: Fully qualified name of the parameter, as ``model.named_parameters()`` gives it, without the prefixes
            that ``torch.compile`` and activation checkpointing insert.
        runtime: Name of the sharding runtime that holds the parameter, for example ``"mfsdp_v2"``.
        detail: What was seen against what was expected: types, dtypes, shapes, object ids as hex. Never values.
        remedy: One sentence that says what to do.
        rank: Rank of the process that found it, 0 without a process group.
    """

    kind: DivergenceKind
    fqn: str
    runtime: str
    detail: str
    remedy: str
    rank: int = 0


@dataclass(frozen=True)
class Report:
    """The outcome of one check. ``str(report)`` is the message that people read.

    Args:
        divergences: Everything that broke an invariant, in the order of the module tree, optimizers last; then what
            other ranks have found.
        parameters_checked: Number of bindings (one name of one parameter) that were compared with their holder.
        parameters_unclaimed: Number of parameters outside every sharded module: no runtime claims them, nothing was
            compared, nothing is wrong with them.
        runtimes: Names of the runtimes that were found, sorted.
        event: Why the check ran.
        rank: Rank of the process that looked, 0 without a process group.
        elapsed_s: Time that the check took on the host, in seconds.
        pending: Compute weights that a load left stale: a divergence if nothing refreshes them before the first
            forward, which looks again.
        refreshed: Compute weights that were stale until the guard let the runtime refresh them.
        omitted: Number of further divergences on other ranks, which ``divergences`` does not list.
    """

    divergences: tuple[Divergence, ...] = ()
    parameters_checked: int = 0
    parameters_unclaimed: int = 0
    runtimes: tuple[str, ...] = ()
    event: Event = Event.CALL
    rank: int = 0
    elapsed_s: float = 0.0
    pending: tuple[Divergence, ...] = ()
    refreshed: tuple[Divergence, ...] = ()
    omitted: int = 0

    @property
    def failed_ranks(self) -> tuple[int, ...]:
        """Ranks that found a divergence, sorted; of many at once, the first few that were heard of."""
        return tuple(sorted({d.rank for d in self.divergences}))

    @property
    def ok(self) -> bool:
        """Whether something was compared and nothing diverged: a check that saw no holder is not ok."""
        return self.parameters_checked > 0 and not self.divergences

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain strings, numbers, lists and dicts, ready for JSON."""
        report = asdict(self)
        report["ok"] = self.ok
        report["failed_ranks"] = list(self.failed_ranks)
        report["event"] = self.event.value
        report["runtimes"] = list(self.runtimes)
        for field in ("divergences", "pending", "refreshed"):
            report[field] = [{**asdict(d), "kind": d.kind.value} for d in getattr(self, field)]
        return report

    def __str__(self) -> str:
        where = f"at event '{self.event}' on rank {self.rank}"
        if self.failed_ranks not in ((), (self.rank,)):
            where = f"on {_ranks(self.failed_ranks)}, said {where}"
        scope = f"{_count(self.parameters_checked, 'parameter')} checked, runtime {', '.join(self.runtimes) or 'none'}"
        if self.divergences:
            count = _count(len(self.divergences) + self.omitted, "holder divergence")
            return "\n\n".join([f"fsdp_guard: {count} {where} ({scope}).", *_explain_all(self.divergences, self.rank)])
        if not self.parameters_checked:
            return (
                f"fsdp_guard: nothing was checked {where}: no sharding runtime that fsdp_guard knows manages this "
                "model. Check or watch the model after it was sharded (fully_shard), not before."
            )
        head = f"fsdp_guard: module and holders agree {where} ({scope}, {self.elapsed_s * 1e3:.2f} ms)."
        if self.pending:
            head += " Compute weights must still be refreshed before the first forward."
        if self.refreshed:
            head += " Stale compute weights were refreshed."
        return "\n\n".join([head, *_explain_all((*self.pending, *self.refreshed), self.rank)])


def _explain_all(divergences: Sequence[Divergence], rank: int) -> list[str]:
    kinds = dict.fromkeys(d.kind for d in divergences)
    return [_explain(kind, [d for d in divergences if d.kind is kind], rank) for kind in kinds]


def _explain(kind: DivergenceKind, divergences: Sequence[Divergence], rank: int) -> str:
    by_fqn: dict[str, list[Divergence]] = {}
    for divergence in divergences:
        by_fqn.setdefault(divergence.fqn, []).append(divergence)
    lines = [f"{kind} ({_count(len(by_fqn), 'parameter')})"]
    for fqn, same in list(by_fqn.items())[:_FQNS_SHOWN]:
        ranks = sorted({d.rank for d in same})
        lines += [f"  {fqn}" if ranks == [rank] else f"  {fqn} ({_ranks(ranks)})", _wrap("    ", same[0].detail)]
    if len(by_fqn) > _FQNS_SHOWN:
        lines.append(f"  ... and {len(by_fqn) - _FQNS_SHOWN} more")
    remedies = dict.fromkeys(d.remedy for d in divergences)
    return "\n".join([*lines, _wrap("  Cause: ", kind.cause), *(_wrap("  Do this: ", remedy) for remedy in remedies)])


def _wrap(label: str, text: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent=label, subsequent_indent=" " * len(label))


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


class FsdpGuardError(RuntimeError):
    """Base of the errors that fsdp_guard raises about a model."""


class _ReportError(FsdpGuardError):
    def __init__(self, report: Report) -> None:
        super().__init__(report)
        self.report = report

    def __str__(self) -> str:
        return str(self.report)


class HolderDivergenceError(_ReportError):
    """Module, optimizer and runtime no longer agree on the parameters.

    Args:
        report: The report of the check that found it.
    """


class NoHoldersError(_ReportError):
    """``require_holders=True`` and no sharding runtime was found.

    Args:
        report: The report of the check that found nothing to compare.
    """


class UnsupportedLayoutError(FsdpGuardError):
    """A sharding runtime was recognised, but this version keeps its holders in a way that fsdp_guard does not read.

    Args:
        cls: The class that was looked at, with its module path.
        version: The package that it comes from and its version.
        attribute: The attribute that was looked for.
    """

    def __init__(self, cls: str, version: str, attribute: str) -> None:
        super().__init__(cls, version, attribute)
        self.cls = cls
        self.version = version
        self.attribute = attribute

    def __str__(self) -> str:
        return (
            f"fsdp_guard cannot read {self.cls} of {self.version}: it looked for the attribute {self.attribute!r} and "
            "did not find it, so it cannot tell whether this model is sound. Upgrade fsdp-guard, or install a version "
            "of the runtime that the README lists; taking the guard out runs unguarded."
        )
