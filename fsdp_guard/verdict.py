"""How ranks tell one another what they found: over torch.distributed's key-value store, on the host.

- A rank that has diverged *publishes*; the others *hear* of it at their next look, in one request that does not block.
- At points that all ranks reach outside a forward they *agree*: nobody passes until all have arrived, or one has
  failed. Hooks inside a forward never wait for other ranks: pipeline stages wait for one another there.
- A rank that reports to W&B *acknowledges* what it has reported. Those that are about to raise wait for that, since a
  launcher ends every process at the first failure.

Keys, below ``fsdp_guard/<number of the guard>/``: ``token`` (tells one store from another), ``failures`` (how many
were published), ``failure/<i>`` (one of them, as JSON) and ``failure/<i>/read`` (by how many ranks; the last deletes
both), ``heard/<i>`` (it was acknowledged), ``reporting`` (some rank reports to W&B), ``round/<n>/arrived`` (how many
ranks have reached the n-th point of agreement) and ``round/<n>/open`` (they may pass); the next round deletes these
two.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from fsdp_guard.report import Divergence, DivergenceKind, Event, Report

_DIVERGENCES_SENT = 64
"""Divergences that a rank publishes; of further ones it sends the number."""

_FAILURES_HEARD = 8
"""Failed ranks whose reports one look reads: enough to act on, and bounded when every rank has failed."""

_POLL_S = 0.5

_ON_ITS_WAY_S = 5.0
"""Longest wait, in seconds, for the report of a rank that has counted itself as failed; it takes milliseconds."""

_T = TypeVar("_T")

_logger = logging.getLogger(__name__)


class Verdicts:
    """One guard's line to the same guard on the other ranks. Silent where there is no process group.

    A store that fails is logged once and then left alone: each rank goes on with its own verdict.

    Args:
        number: Which guard of its process this is, the same on every rank.
        agree_timeout_s: Longest wait at a point of agreement, in seconds.
        acknowledge_timeout_s: Longest wait for a rank that reports to W&B, in seconds.
    """

    def __init__(self, number: int, agree_timeout_s: float, acknowledge_timeout_s: float) -> None:
        self.agree_timeout_s = agree_timeout_s
        self.lock = threading.RLock()
        self._number = number
        self._acknowledge_timeout_s = acknowledge_timeout_s
        self._listener: threading.Thread | None = None
        self._group: weakref.ref[Any] | None = None
        self._store: Any = None
        self._token = b""
        self._rank, self._size = 0, 1
        self._is_announced = False
        self._start_anew()

    def _start_anew(self) -> None:
        self._round = 0
        self._next = 0
        self._acknowledged = 0
        self._own: set[int] = set()
        self._awaited: int | None = None
        self._looks: Counter[Event] = Counter()
        self._raised: set[str] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        # A guard that travels to another process, as Lightning's callbacks do, starts there afresh.
        return type(self), (self._number, self.agree_timeout_s, self._acknowledge_timeout_s)

    def announce(self) -> None:
        """Let the other ranks know that this one reports to W&B."""
        self._tolerate(self._announce, None)

    def share(self, report: Report, *, collective: bool) -> Report:
        """Publish what this rank has found, and return it with what other ranks have.

        Args:
            report: This rank's own.
            collective: Whether all ranks reach this point, so that none may pass before all are known to be sound.
        """
        return self._tolerate(lambda: self._share(report, collective), report)

    def hear(self) -> list[Report]:
        """Return what other ranks have published since the last call, without waiting."""
        return self._tolerate(self._hear, [])

    def listen(self, overhear: Callable[[], bool]) -> None:
        """Call ``overhear`` every half second in a thread, until it returns false or the object it belongs to is gone.

        A rank that reports to W&B may be waiting in a collective for the one that has failed: its next look comes too
        late. Does nothing while such a thread runs.
        """
        if _world() is None or (self._listener is not None and self._listener.is_alive()):
            return
        ref = weakref.WeakMethod(overhear)

        def run() -> None:
            while (method := ref()) is not None and method():
                del method
                time.sleep(_POLL_S)

        self._listener = threading.Thread(target=run, name="fsdp_guard", daemon=True)
        self._listener.start()

    def settle(self, *, reports: bool) -> None:
        """Acknowledge what this rank has reported to W&B, or wait until another rank has."""
        self._tolerate(self._acknowledge if reports else self._await_acknowledgement, None)

    def _tolerate(self, act: Callable[[], _T], otherwise: _T) -> _T:
        try:
            return act() if self._connect() else otherwise
        except Exception:
            self._store = None
            _logger.warning(
                "fsdp_guard: torch.distributed's store failed; from now on each rank goes on with its own verdict.",
                exc_info=True,
            )
            return otherwise

    def _connect(self) -> bool:
        world = _world()
        if world is None:
            return False
        if self._group is None or self._group() is not world:
            self._group = weakref.ref(world)
            self._store = None
            store = world.get_group_store()
            # Fails at once where the store's host is gone; clone() would go on connecting until the group's time-out.
            store.check(["fsdp_guard"])
            # A connection of our own: while one thread waits on a client, the client's other users wait with it.
            self.join(store.clone(), dist.get_rank(), dist.get_world_size())
        return self._store is not None

    def join(self, store: Store, rank: int, size: int) -> None:
        """Join the other ranks of this guard: ``size`` of them, this one included, over ``store``."""
        joined = PrefixStore(f"fsdp_guard/{self._number}", store)
        # A process group that is made anew may come with a new store or with the old one: only then do counts go on.
        token = joined.compare_set("token", "", uuid.uuid4().hex)
        if token != self._token:
            self._token = token
            self._start_anew()
        self._is_announced = False
        self._store, self._rank, self._size = joined, rank, size

    def _announce(self) -> None:
        if not self._is_announced:
            self._store.set("reporting", str(self._rank))
            self._is_announced = True

    def _share(self, report: Report, collective: bool) -> Report:
        self._looks[report.event] += 1
        if report.divergences:
            self._publish(report, collective)
        elif collective:
            self._agree()
        return merge(report, self._hear(self._round if collective else None))

    def _publish(self, report: Report, collective: bool) -> None:
        # Ranks that do the same thing look equally often: by this, each knows what it has failed at together with
        # others, and does not raise again when it hears of them later.
        look = f"{report.event}/{self._looks[report.event]}"
        following = self._round + 1
        index = self._store.add("failures", 1) - 1
        self._own.add(index)
        self._raised.add(look)
        self._awaited = index
        self._store.set(f"failure/{index}", _encode(report, look, following if collective else 0))
        # Let those pass who wait, or will wait, at the next point of agreement: they hear of this right after it.
        if collective:
            self._arrive()
        self._store.set(f"round/{following}/open", "")

    def _agree(self) -> None:
        if self._arrive():
            self._store.set(f"round/{self._round}/open", "")
        elif not self._wait(f"round/{self._round}/open", self.agree_timeout_s):
            _logger.warning(
                "fsdp_guard: rank %d waited %g s for all %d ranks to be checked; %d were. Going on with this rank's "
                "own verdict. Either a rank has died or hangs, or not every rank makes this call: then pass "
                "collective=False to it.",
                self._rank,
                self.agree_timeout_s,
                self._size,
                self._store.add(f"round/{self._round}/arrived", 0),
            )

    def _arrive(self) -> bool:
        """Count this rank in, and return whether it is the last one."""
        self._round += 1
        is_last: bool = self._store.add(f"round/{self._round}/arrived", 1) == self._size
        if is_last:
            # All have arrived here, so all have passed the round before.
            self._store.delete_key(f"round/{self._round - 1}/arrived")
            self._store.delete_key(f"round/{self._round - 1}/open")
        return is_last

    def _hear(self, agreed: int | None = None) -> list[Report]:
        """Read what was published; after a point of agreement, nothing that belongs to a later one.

        A faster rank may have failed there already. This one will too, at the same look as the others.
        """
        heard: list[Report] = []
        looks: set[str] = set()
        while len(heard) < _FAILURES_HEARD and self._reach_unread(wait=agreed is not None):
            look, round_, report = _decode(self._store.get(f"failure/{self._next}"))
            if agreed is not None and round_ > agreed:
                break
            self._count_read(self._next)
            self._awaited = self._next
            self._next += 1
            if look not in self._raised:
                looks.add(look)
                heard.append(report)
        if len(heard) == _FAILURES_HEARD:
            self._next = max(self._next, self._store.add("failures", 0))
        self._raised |= looks
        return heard

    def _reach_unread(self, *, wait: bool) -> bool:
        """Go to the next failure of another rank, and return whether there is one.

        Args:
            wait: Whether to wait for one that is counted and not yet there: its rank is about to write it, and another
                one that failed as well may have let all ranks pass meanwhile.
        """
        while True:
            while self._next in self._own:  # its readers may have deleted it by now
                self._own.remove(self._next)
                self._next += 1
            key = f"failure/{self._next}"
            if not wait:
                return bool(self._store.check([key]))
            if self._store.add("failures", 0) <= self._next:
                return False
            if self._wait(key, _ON_ITS_WAY_S):
                return True
            self._next += 1  # its rank has died in between

    def _count_read(self, index: int) -> None:
        if self._store.add(f"failure/{index}/read", 1) == self._size - 1:
            self._store.delete_key(f"failure/{index}")
            self._store.delete_key(f"failure/{index}/read")

    def _acknowledge(self) -> None:
        published = self._store.add("failures", 0)
        for index in range(self._acknowledged, published):
            self._store.set(f"heard/{index}", "")
        self._acknowledged = published

    def _await_acknowledgement(self) -> None:
        if self._awaited is None or not self._store.check(["reporting"]):
            return
        if not self._wait(f"heard/{self._awaited}", self._acknowledge_timeout_s):
            _logger.warning(
                "fsdp_guard: the rank that reports to W&B has not reported this within %g s; raising all the same.",
                self._acknowledge_timeout_s,
            )

    def _wait(self, key: str, timeout_s: float) -> bool:
        """Wait for ``key``, and return whether it came in time."""
        started = time.monotonic()
        try:
            self._store.wait([key], timedelta(seconds=timeout_s))
        except RuntimeError:
            # Which error says that the time is over, and which that the store is gone, differs from store to store.
            if time.monotonic() - started < timeout_s:
                raise
            return False
        return True


def merge(report: Report, heard: Sequence[Report]) -> Report:
    """Return ``report`` with what was heard from other ranks."""
    divergences = (*report.divergences, *(d for other in heard for d in other.divergences))
    return replace(report, divergences=divergences, omitted=report.omitted + sum(other.omitted for other in heard))


def _world() -> Any:
    """Return the default process group, or ``None`` if there is none or it has one rank."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.group.WORLD


def _encode(report: Report, look: str, round_: int) -> str:
    sent = report.divergences[:_DIVERGENCES_SENT]
    return json.dumps(
        {
            "look": look,
            "round": round_,
            "event": report.event,
            "rank": report.rank,
            "divergences": [asdict(divergence) for divergence in sent],
            "omitted": report.omitted + len(report.divergences) - len(sent),
        }
    )


def _decode(text: bytes) -> tuple[str, int, Report]:
    sent = json.loads(text)
    divergences = tuple(Divergence(**{**d, "kind": DivergenceKind(d["kind"])}) for d in sent["divergences"])
    report = Report(divergences, event=Event(sent["event"]), rank=sent["rank"], omitted=sent["omitted"])
    return sent["look"], sent["round"], report
