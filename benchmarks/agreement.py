"""How agreement between ranks grows with their number, over one real TCPStore.

Every simulated rank is a thread with a client connection of its own; the store's server has a process to itself, whose
CPU time is what a real job's ranks would queue for. All threads of all ranks share this machine's cores, so the wall
time printed here is far above that of a job whose ranks have their own.

    python -m benchmarks.agreement --ranks 2 8 64 1024
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from torch.distributed import TCPStore

from fsdp_guard.report import Divergence, DivergenceKind, Report
from fsdp_guard.verdict import Verdicts

_CONNECT = timedelta(seconds=120)
_THREADS = 128
"""Ranks that one process simulates."""

_SOUND = Report(parameters_checked=1)
_FAILED = Report((Divergence(DivergenceKind.REPLACED_PARAMETER, "weight", "mfsdp_v2", "detail", "remedy"),), 1)


class Measured(NamedTuple):
    """One number of ranks. Times are in seconds; requests are those of one round."""

    ranks: int
    requests: dict[str, list[int]]
    wall: float
    server: float


class _Counting:
    """A store that counts the requests made to it."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.requests = 0

    def __getattr__(self, name: str) -> Any:
        self.requests += 1
        return getattr(self._store, name)


class _SimulatedRank(Verdicts):
    def __init__(self, store: TCPStore, rank: int, size: int) -> None:
        super().__init__(0, agree_timeout_s=120, acknowledge_timeout_s=120)
        self.join(store, rank, size)
        self._store = _Counting(self._store)

    def _connect(self) -> bool:
        return self._store is not None

    def requests_of(self, report: Report, *, fails: bool = False) -> int:
        """Agree once, and return the number of requests that it took; ``fails``: some rank has diverged."""
        before = self._store.requests
        if bool(self.share(report, collective=True).divergences) is not fails:
            raise RuntimeError(f"all ranks should have {'failed' if fails else 'passed'} together")
        return int(self._store.requests - before)


def _serve(ports: Any, asked: Any, cpu: Any) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ports.put(server.port)
    while asked.get():
        cpu.put(time.process_time())


def _simulate(port: int, ranks: Sequence[int], size: int, rounds: int, start: Any, done: Any) -> None:
    """Let each rank agree ``rounds`` times, then once more with the last rank failing."""
    counts: list[tuple[list[int], int]] = []
    ready = threading.Barrier(len(ranks) + 1)
    connecting = threading.Lock()

    def run(rank: int) -> None:
        with connecting:  # one at a time, or this machine's queue of connections overflows
            client = TCPStore("127.0.0.1", port, is_master=False, timeout=_CONNECT)
        member = _SimulatedRank(client, rank, size)
        ready.wait()
        ready.wait()
        sound = [member.requests_of(_SOUND) for _ in range(rounds)]
        ready.wait()
        ready.wait()
        counts.append((sound, member.requests_of(_FAILED if rank == size - 1 else _SOUND, fails=True)))

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for _ in range(2):
        ready.wait()
        done.put(None)
        start.acquire()
        ready.wait()
    for thread in threads:
        thread.join()
    done.put(counts)


def measure(size: int, rounds: int) -> Measured:
    """Measure one number of ranks."""
    context = multiprocessing.get_context("spawn")
    ports, asked, cpu, done = (context.Queue() for _ in range(4))
    start = context.Semaphore(0)
    server = context.Process(target=_serve, args=(ports, asked, cpu), daemon=True)
    server.start()
    port = ports.get()
    shares = [range(first, min(first + _THREADS, size)) for first in range(0, size, _THREADS)]
    workers = [
        context.Process(target=_simulate, args=(port, share, size, rounds, start, done), daemon=True)
        for share in shares
    ]
    for worker in workers:
        worker.start()

    def everybody() -> list[Any]:
        return [done.get(timeout=300) for _ in workers]

    def server_seconds() -> float:
        asked.put(True)
        return float(cpu.get())

    def release() -> None:
        for _ in workers:
            start.release()

    everybody()
    before, began = server_seconds(), time.perf_counter()
    release()
    everybody()
    wall, used = time.perf_counter() - began, server_seconds() - before
    release()
    counts = [count for worker_counts in everybody() for count in worker_counts]
    asked.put(False)
    for process in (*workers, server):
        process.join()
    requests = {"sound": [n for sound, _ in counts for n in sound], "failed": [failed for _, failed in counts]}
    return Measured(size, requests, wall / rounds, used / rounds)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a Markdown table. Requests: the median and the most of a rank. Times: medians, of one round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64, 128, 256, 512, 1024])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parsed = parser.parse_args(arguments)
    print("| ranks | requests a rank | the same, one rank failing | server ms | server µs a rank | wall ms |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    for size in parsed.ranks:
        runs = [measure(size, parsed.rounds) for _ in range(parsed.repeats)]
        server = statistics.median(run.server for run in runs)
        wall = statistics.median(run.wall for run in runs)
        sound, failed = (
            f"{statistics.median(n):g}, {max(n)}" for n in (runs[0].requests["sound"], runs[0].requests["failed"])
        )
        print(
            f"| {size} | {sound} | {failed} | {server * 1e3:.2f} | {server / size * 1e6:.1f} | {wall * 1e3:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
