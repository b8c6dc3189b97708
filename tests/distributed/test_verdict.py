"""What one rank finds, all ranks raise; and no rank waits for ever."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from fsdp_guard import Divergence, Guard, HolderDivergenceError, Report, verdict
from fsdp_guard import DivergenceKind as Kind
from fsdp_guard.verdict import Verdicts
from tests import main_layout
from tests.distributed.ranks import Ranks, free_port
from tests.mfsdp import checkpoint, loss, replace_parameter, sharded_linear

SECONDS = 20
"""More than anything but a time-out takes here."""

Raised = tuple[str, tuple[int, ...], int]
"""Event, ranks that failed as far as this rank has heard, divergences."""


def caught(function: Callable[..., Any], *args: Any, **options: Any) -> Report | None:
    try:
        function(*args, **options)
    except HolderDivergenceError as error:
        return error.report
    return None


def summed_up(report: Report | None) -> Raised | None:
    return None if report is None else (report.event.value, report.failed_ranks, len(report.divergences))


def raised(function: Callable[..., Any], *args: Any, **options: Any) -> Raised | None:
    return summed_up(caught(function, *args, **options))


def run_check(failing: list[int]) -> tuple[Raised | None, str, float]:
    model = sharded_linear()
    if dist.get_rank() in failing:
        replace_parameter(model)
    started = time.monotonic()
    report = caught(Guard(reporters=[]).check, model)
    return summed_up(report), str(report or ""), time.monotonic() - started


@pytest.mark.parametrize("which", ["first", "last", "two at once"])
def test_all_ranks_fail_together(team: Ranks, which: str) -> None:
    failing = {"first": [0], "last": [team.size - 1], "two at once": [0, team.size - 1]}[which]
    for rank, (outcome, message, seconds) in enumerate(team(run_check, failing)):
        assert outcome is not None, f"rank {rank} went on"
        _, heard, divergences = outcome
        assert set(heard) <= set(failing)
        assert len(heard) == divergences >= 1
        assert seconds < SECONDS
        if rank in failing:
            assert rank in heard
        else:
            assert f"on rank{'s' * (len(heard) > 1)} {', '.join(map(str, heard))}, said at event 'call'" in message
            assert "replaced_parameter" in message


def test_healthy_ranks_pass_together(team: Ranks) -> None:
    assert {outcome for outcome, _, _ in team(run_check, [])} == {None}


def run_many_checks(rounds: int) -> list[tuple[int, ...]]:
    """Fail on another rank each time, and look that each time is told apart from the one before."""
    guard, heard = Guard(reporters=[]), []
    for number in range(rounds):
        model = sharded_linear()
        failing = number % (dist.get_world_size() + 1)
        if dist.get_rank() == failing:
            replace_parameter(model)
        outcome = raised(guard.check, model)
        heard.append(outcome[1] if outcome else ())
    return heard


def test_a_hundred_times(team: Ranks) -> None:
    size = team.size
    for heard in team(run_many_checks, 100):
        assert heard == [(number % (size + 1),) if number % (size + 1) < size else () for number in range(100)]


def run_failing_together_then_healthy() -> tuple[Raised | None, Raised | None]:
    guard, model = Guard(reporters=[]), sharded_linear()
    replace_parameter(model)
    be_late(1, 0.5)  # rank 0 has raised before the other ranks publish
    together = raised(guard.check, model)
    dist.barrier()
    return together, raised(guard.check, sharded_linear())


def test_what_ranks_fail_at_together_is_raised_once(ranks: Ranks) -> None:
    for together, later in ranks(run_failing_together_then_healthy):
        assert together is not None
        assert later is None


def test_a_hundred_runs_in_a_row() -> None:
    """Eight new processes each time, failing on another rank, on two, or on none."""
    for number in range(100):
        failing = [[0], [7], [0, 7], []][number % 4]
        group = Ranks(8, over="tcp")
        outcomes = [outcome for outcome, _, _ in group(run_check, failing)]
        group.stop()
        if failing:
            assert all(outcome and outcome[1] and set(outcome[1]) <= set(failing) for outcome in outcomes), outcomes
        else:
            assert outcomes == [None] * 8


def be_late(rank: int, seconds: float) -> None:
    """Make the rank of that number come later than the others."""
    if dist.get_rank() == rank:
        time.sleep(seconds)


def run_nobody_passes_early() -> float:
    model, guard = sharded_linear(), Guard(reporters=[])
    guard.check(model)
    started = time.monotonic()
    be_late(dist.get_world_size() - 1, 1.0)
    guard.check(model)
    return time.monotonic() - started


def test_nobody_passes_until_all_have(ranks: Ranks) -> None:
    assert min(ranks(run_nobody_passes_early)) >= 0.9


def run_load_on_one_rank(failing: int) -> tuple[Raised | None, Raised | None]:
    model = sharded_linear()
    state = checkpoint()
    with Guard(reporters=[]).watch(model):
        at_load = raised(model.load_state_dict, state, assign=dist.get_rank() == failing)
        dist.barrier()
        return at_load, raised(loss, model) if at_load is None else None


@pytest.mark.parametrize("failing", [0, 1])
def test_the_others_hear_at_their_next_look(ranks: Ranks, failing: int) -> None:
    outcomes = ranks(run_load_on_one_rank, failing)
    assert outcomes[failing][0] == ("load", (failing,), 1)
    heard = [found for found in outcomes[1 - failing] if found]
    assert [found[1:] for found in heard] == [((failing,), 1)]
    assert heard[0][0] in ("load", "first_forward")


def run_hook_releases_a_check(failing: int) -> tuple[Raised | None, float]:
    """One rank fails inside a load while the other waits in a check."""
    model, guard = sharded_linear(), Guard(reporters=[])
    state, started = checkpoint(), time.monotonic()
    if dist.get_rank() != failing:
        return raised(guard.check, model), time.monotonic() - started
    with guard.watch(model):
        time.sleep(0.5)
        return raised(model.load_state_dict, state, assign=True), time.monotonic() - started


def test_a_failing_hook_frees_those_who_wait(ranks: Ranks) -> None:
    for outcome, seconds in ranks(run_hook_releases_a_check, 1):
        assert outcome is not None
        assert outcome[1] == (1,)
        assert seconds < SECONDS


def run_with(on_divergence: Any) -> tuple[bool, list[tuple[int, ...]]]:
    seen: list[tuple[int, ...]] = []
    model = sharded_linear()
    if dist.get_rank() == 1:
        replace_parameter(model)
    guard = Guard(reporters=[lambda report: seen.append(report.failed_ranks)], on_divergence=on_divergence)
    return guard.check(model).ok, seen


def test_warn_goes_on_everywhere(ranks: Ranks) -> None:
    assert ranks(run_with, "warn") == [(False, [(1,)])] * 2


@contextlib.contextmanager
def warnings() -> Iterator[list[str]]:
    messages: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno == logging.WARNING:
                messages.append(record.getMessage())

    handler = Handler()
    logging.getLogger("fsdp_guard").addHandler(handler)
    yield messages
    logging.getLogger("fsdp_guard").removeHandler(handler)


def run_check_on_one_rank(collective: bool) -> tuple[float, list[str]]:
    model, guard, started = sharded_linear(), Guard(reporters=[], agree_timeout_s=1.0), time.monotonic()
    with warnings() as messages:
        if dist.get_rank() == 0:
            assert guard.check(model, collective=collective).ok
    seconds = time.monotonic() - started
    if collective:
        dist.barrier()
        be_late(0, 0.5)
        # The late ones arrive where rank 0 has been already.
        assert guard.check(model).ok if dist.get_rank() else True
    return seconds, messages


def test_check_that_only_one_rank_makes(ranks: Ranks) -> None:
    (seconds, messages), _ = ranks(run_check_on_one_rank, True)
    assert 0.9 < seconds < SECONDS
    assert len(messages) == 1
    assert "all 2 ranks to be checked; 1 were" in messages[0]
    assert "collective=False" in messages[0]
    (seconds, messages), _ = ranks(run_check_on_one_rank, False)
    assert seconds < 0.9
    assert messages == []


def count_keys() -> int:
    return dist.group.WORLD.get_group_store().num_keys()


def run_month(rounds: int) -> tuple[int, int]:
    """Many checks, one in ten of them diverged and only warned of."""
    guard = Guard(reporters=[], on_divergence="warn")
    logging.getLogger("fsdp_guard").disabled = True
    counts = []
    for number in range(rounds):
        model = sharded_linear()
        if number % 10 == 0 and dist.get_rank() == 1:
            replace_parameter(model)
        guard.check(model)
        if number in (rounds // 2, rounds - 1):
            dist.barrier()
            counts.append(count_keys())
            dist.barrier()
    logging.getLogger("fsdp_guard").disabled = False
    return counts[0], counts[1]


def test_the_store_does_not_fill(team: Ranks) -> None:
    for half, whole in team(run_month, 60):
        assert half == whole


def run_two_guards() -> list[Raised | None]:
    """Two models, two guards, checked in other orders by other ranks."""
    first, second = sharded_linear(), sharded_linear()
    one, other = Guard(reporters=[]), Guard(reporters=[])
    if dist.get_rank() == 0:
        replace_parameter(second)
    return [raised(one.check, first), raised(other.check, second), raised(one.check, first)]


def test_guards_do_not_mix(ranks: Ranks) -> None:
    for outcomes in ranks(run_two_guards):
        assert outcomes == [None, ("call", (0,), 1), None]


def run_group_made_anew(port: int) -> tuple[bool, Raised | None]:
    """As some scripts do after a failure, or between phases."""
    model, guard = sharded_linear(), Guard(reporters=[])
    before = guard.check(model).ok
    rank, size, backend = dist.get_rank(), dist.get_world_size(), dist.get_backend()
    dist.destroy_process_group()
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    model = sharded_linear()
    if rank == 1:
        replace_parameter(model)
    return before, raised(guard.check, model)


def test_process_group_made_anew() -> None:
    group = Ranks(2, over="tcp")
    assert group(run_group_made_anew, free_port()) == [(True, ("call", (1,), 1))] * 2
    group.stop()


def die(*args: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def run_killed(victim: int, when: str) -> tuple[list[Raised | None], float, list[str]]:
    with warnings() as messages:  # from the first check on: a rank that dies right after it may take the store along
        model, guard = sharded_linear(), Guard(reporters=[], agree_timeout_s=2.0)
        guard.check(model)
        is_victim = dist.get_rank() == victim
        if is_victim and when == "before voting":
            die()
        if is_victim and when == "while voting":
            arrive = Verdicts._arrive
            Verdicts._arrive = lambda self: die(arrive(self))  # type: ignore[method-assign]
        if is_victim and when == "while failing":  # it has told the others already
            replace_parameter(model)
            Verdicts._hear = die  # type: ignore[method-assign]
        started = time.monotonic()
        outcomes = [raised(guard.check, model)]
        if is_victim:
            die()
        outcomes.append(raised(guard.check, model))
    return outcomes, time.monotonic() - started, messages


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("when", ["before voting", "while voting", "after voting", "while failing"])
def test_a_rank_that_dies_costs_the_time_out_at_most(victim: int, when: str) -> None:
    """Rank 0 hosts the store: with it, the store is gone."""
    group = Ranks(2, over="tcp")
    answers = group.answers(run_killed, victim, when)
    group.stop()
    assert [outcome for outcome, _ in answers] == ["died" if rank == victim else "ok" for rank in range(2)]
    for outcomes, seconds, messages in (answer for outcome, answer in answers if outcome == "ok"):
        assert seconds < SECONDS
        if when == "while failing" and victim != 0:
            assert outcomes[0] == ("call", (victim,), 1)
        elif when != "while failing":
            assert outcomes == [None, None]
        assert any("for all 2 ranks to be checked" in text or "store failed" in text for text in messages)


def run_store_gone_before_the_first_check() -> tuple[Raised | None, float, list[str]]:
    model = sharded_linear()
    dist.barrier()
    if dist.get_rank() == 0:
        die()
    time.sleep(1.0)
    with warnings() as messages:
        started = time.monotonic()
        outcome = raised(Guard(reporters=[], agree_timeout_s=2.0).check, model)
    return outcome, time.monotonic() - started, messages


def test_a_store_that_was_gone_before_the_first_check_costs_nothing() -> None:
    group = Ranks(2, over="tcp")
    (died, _), (ended, answer) = group.answers(run_store_gone_before_the_first_check)
    group.stop()
    assert (died, ended) == ("died", "ok")
    outcome, seconds, messages = answer
    assert outcome is None
    assert seconds < 2.0
    assert any("store failed" in text for text in messages)


def test_no_process_group_no_store() -> None:
    assert not dist.is_initialized()
    verdicts, report = Verdicts(0, 1.0, 1.0), Report(parameters_checked=1)
    assert verdicts.share(report, collective=True) is report
    assert verdicts.hear() == []
    verdicts.announce()
    verdicts.settle(reports=False)


class Member(Verdicts):
    """One of several ranks in one process, each with a client of its own."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        super().__init__(7, 5.0, 5.0)
        self.join(store, rank, size)

    def _connect(self) -> bool:
        return True


def make_store(kind: str, folder: Path) -> Any:
    if kind == "file":
        return dist.FileStore(str(folder / "store"), 4)
    if kind == "tcp":
        return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return dist.PrefixStore("outer", dist.PrefixStore("inner", dist.HashStore()))


@pytest.mark.parametrize("kind", ["file", "tcp", "prefixed hash"])
def test_stores(kind: str, tmp_path: Path) -> None:
    store = make_store(kind, tmp_path)
    members = [Member(store.clone(), rank, 4) for rank in range(4)]
    clean = Report(parameters_checked=1)
    found = replace(clean, divergences=(Divergence(Kind.BROKEN_TIE, "head.weight", "mfsdp_v2", "seen", "do", rank=2),))

    def act(rank: int) -> list[Report]:
        reports = [clean, found if rank == 2 else clean, clean]
        shared = [members[rank].share(report, collective=True) for report in reports]
        members[rank].announce()
        members[rank].settle(reports=rank == 0)
        return shared

    with ThreadPoolExecutor(4) as pool:
        for shared in pool.map(act, range(4)):
            assert shared == [clean, found, clean]


def share_while_rank_0_writes(monkeypatch: pytest.MonkeyPatch, write: Callable[[], None]) -> Report:
    """Let ranks 0 and 2 fail at once, rank 0 calling ``write`` after it is counted; return what rank 1 hears."""
    members = [Member(store, rank, 3) for store in [dist.HashStore()] for rank in range(3)]
    divergence = Divergence(Kind.BROKEN_TIE, "head.weight", "mfsdp_v2", "seen", "do")
    counted, encode = Event(), verdict._encode

    def encode_late(report: Report, *rest: Any) -> str:
        if report.rank == 0:
            counted.set()
            write()
        return encode(report, *rest)

    def fail(rank: int) -> Report:
        report = Report((replace(divergence, rank=rank),), rank=rank)
        return members[rank].share(report, collective=True)

    monkeypatch.setattr(verdict, "_encode", encode_late)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(fail, 0)
        assert counted.wait(SECONDS)
        pool.submit(fail, 2).result()
        heard = members[1].share(Report(parameters_checked=1, rank=1), collective=True)
        assert first.exception() is None or isinstance(first.exception(), SystemExit)
    return heard


def test_a_failure_that_is_still_being_written_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = share_while_rank_0_writes(monkeypatch, lambda: time.sleep(0.5))
    assert heard.failed_ranks == (0, 2)


def test_a_rank_that_died_while_writing_does_not_hide_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict, "_ON_ITS_WAY_S", 0.5)
    heard = share_while_rank_0_writes(monkeypatch, sys.exit)
    assert heard.failed_ranks == (2,)


def test_many_divergences_on_many_ranks_stay_bounded() -> None:
    store = dist.HashStore()
    members = [Member(store, rank, 40) for rank in range(40)]

    def found(rank: int) -> Report:
        return Report(
            tuple(Divergence(Kind.BROKEN_TIE, f"{rank}.{i}", "mfsdp_v2", "seen", "do", rank) for i in range(100))
        )

    for rank in range(1, 40):
        members[rank].share(found(rank), collective=False)
    heard = members[0].share(Report(parameters_checked=1), collective=False)
    assert heard.failed_ranks == tuple(range(1, 9))
    assert len(heard.divergences) == 8 * 64
    assert heard.omitted == 8 * 36
    assert str(heard).startswith("fsdp_guard: 800 holder divergences on ranks 1, 2, 3, 4, 5, 6, 7, 8, said at event")
    assert members[0].hear() == [], "the others belong to the same failure"


def test_options_are_checked() -> None:
    for name in ("agree_timeout_s", "acknowledge_timeout_s"):
        for value in (0, -1.0, float("nan")):
            options: dict[str, Any] = {name: value}
            with pytest.raises(ValueError, match=f"{name} must be a positive number of seconds"):
                Guard(**options)


def test_a_guard_travels_to_another_process() -> None:
    copy = pickle.loads(pickle.dumps(Guard(reporters=[], agree_timeout_s=3.0)))
    assert copy.check(main_layout.fully_shard(nn.Linear(2, 2))).ok
