"""Real ranks that stay up for the whole test session and run what a test sends them."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fsdp_guard.demo.cpu import install_cuda_stand_ins

WORLD_SIZE = 2
BACKEND = "cpu:gloo,cuda:nccl" if torch.cuda.device_count() >= WORLD_SIZE else "gloo"
TIMEOUT_S = 120


class Ranks:
    """A process group: NCCL on two GPUs, gloo on one (NCCL refuses two ranks on one card) and on the CPU.

    Call it with a function of a test module; it runs on all ranks and the results come back in rank order. A test that
    fails on a rank fails here with that rank's traceback. A rank that does not answer ends the group, and the next
    call starts a new one.

    Args:
        size: Number of ranks.
        over: What the group's store is: ``"file"``, or ``"tcp"`` with rank 0 as its host.
    """

    def __init__(self, size: int = WORLD_SIZE, over: str = "file") -> None:
        self.size = size
        self._over = over
        self._workers: list[Any] = []
        self._pipes: list[Any] = []

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        answers = self.answers(function, *args)
        if any(outcome != "ok" for outcome, _ in answers):
            self.stop()
            raise AssertionError(
                "\n".join(f"rank {rank} {outcome}: {answer}" for rank, (outcome, answer) in enumerate(answers))
            )
        return [answer for _, answer in answers]

    def answers(self, function: Callable[..., Any], *args: Any) -> list[tuple[str, Any]]:
        """Return how each rank ended (``"ok"``, ``"failed"``, ``"hung"``, ``"died"``), and what it returned."""
        if not self._workers:
            self._start()
        for pipe in self._pipes:
            pipe.send((function.__module__, function.__qualname__, args))
        answers: list[tuple[str, Any]] = []
        for rank, pipe in enumerate(self._pipes):
            try:
                answered = pipe.poll(TIMEOUT_S)
                answers.append(pipe.recv() if answered else ("hung", f"no answer in {TIMEOUT_S} s"))
            except EOFError:
                answers.append(("died", f"exit code {self._workers[rank].exitcode}"))
        return answers

    def stop(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.kill()
            worker.join()
        self._workers, self._pipes = [], []

    def _start(self) -> None:
        # Forked from a process that has imported everything: a second instead of ten. CUDA does not survive a fork.
        context: Any = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
        multiprocessing.set_forkserver_preload(["tests.mfsdp", __name__, "fsdp_guard.guard"])
        store = f"file://{tempfile.mkdtemp()}/store" if self._over == "file" else f"tcp://127.0.0.1:{free_port()}"
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            worker = context.Process(target=_serve, args=(rank, self.size, store, theirs), daemon=True)
            worker.start()
            theirs.close()
            self._workers.append(worker)
            self._pipes.append(ours)


def torchrun(size: int, *program: str) -> subprocess.CompletedProcess[str]:
    """Run a script, or ``-m`` and a module, on ``size`` ranks under torchrun."""
    options = ["--nproc-per-node", str(size), "--master-port", str(free_port())]
    command = [sys.executable, "-m", "torch.distributed.run", *options, *program]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def free_port() -> int:
    """Return a TCP port that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _serve(rank: int, size: int, store: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    card = rank % max(1, torch.cuda.device_count())
    # As torchrun would set them, for Lightning to join these processes instead of starting its own: two ranks of one
    # node, or of two nodes where both must use the first card of theirs.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(card), GROUP_RANK=str(rank - card), WORLD_SIZE=str(size))
    os.environ["TORCHELASTIC_RUN_ID"] = "tests"
    if torch.cuda.is_available():
        torch.cuda.set_device(card)
    else:
        install_cuda_stand_ins()
    dist.init_process_group(BACKEND, init_method=store, rank=rank, world_size=size)
    while True:
        try:
            module, name, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = ("ok", getattr(importlib.import_module(module), name)(*args))
        except BaseException:
            answer = ("failed", traceback.format_exc())
        pipe.send(answer)
