"""Start the two ranks, print what happened, and judge it."""

from __future__ import annotations

import importlib.metadata
import json
import tempfile
import textwrap
from dataclasses import asdict
from pathlib import Path

from torch.multiprocessing.spawn import spawn

from fsdp_guard.demo.case import CHECKPOINT_LOSS, INITIAL_LOSS, STEPS, WORLD_SIZE, Played, play
from fsdp_guard.demo.plot import save_plot

_TOLERANCE = 1e-6
_FIRST_FIXED_LOSSES = [CHECKPOINT_LOSS, 0.394821, 0.347011, 0.304990]


def run_demo(output: Path) -> int:
    """Play the case at two ranks and print it.

    Args:
        output: Folder for the plot and the offline W&B run; made if it does not exist.

    Returns:
        0 if all three acts went as said, else 1.
    """
    output.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=output, prefix="run-")).resolve()
    spawn(_play_rank, args=(str(folder),), nprocs=WORLD_SIZE)
    ranks = [Played(**json.loads(_result_path(folder, rank).read_text())) for rank in range(WORLD_SIZE)]
    plot = save_plot(folder / "losses.png", ranks[0])
    print(_describe(ranks[0], plot))
    differences = [f"rank {rank}: {text}" for rank, played in enumerate(ranks) for text in _judge(played)]
    if differences:
        print("\n".join(["", "This is not what the demo promises:", *(f"  {text}" for text in differences)]))
        return 1
    print("\nAll three acts went as said.")
    return 0


def _play_rank(rank: int, folder: str) -> None:
    played = play(rank, Path(folder))
    _result_path(Path(folder), rank).write_text(json.dumps(asdict(played)))


def _result_path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.json"


def _describe(played: Played, plot: Path) -> str:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("megatron-fsdp", "torch"))
    message = textwrap.indent(played.message or "nothing was raised", "     | ", lambda line: True)
    return f"""\
Megatron-LM issue 6087 on the real runtime: {versions}, {WORLD_SIZE} ranks, {played.where}.
The checkpoint's loss is {CHECKPOINT_LOSS}; the loss of the weights before the load is {INITIAL_LOSS}.

1. Unguarded: load_state_dict(checkpoint, assign=True) after fully_shard()
     The load says {played.load_result}, then {STEPS} steps of SGD give
     loss {_losses(played.unguarded)}

2. Guarded: guard.watch(model), then the same load; at event '{played.event}' it raises
{message}
     W&B (offline): {played.wandb_dir}

3. Fixed: the same with assign=False, still guarded
     loss {_losses(played.fixed)}

Plot: {plot}"""


def _losses(losses: list[float]) -> str:
    shown = [f"{loss:.6f}" for loss in losses]
    return " ".join(shown if len(shown) <= 6 else [*shown[:5], "...", shown[-1]])


def _judge(played: Played) -> list[str]:
    """Return what did not go as said, a sentence each."""
    differences = []
    if "All keys matched" not in played.load_result:
        differences.append(f"the unguarded load was to be clean, it said {played.load_result}")
    if played.unguarded != [INITIAL_LOSS] * STEPS:
        differences.append(f"the unguarded loss was to stay at {INITIAL_LOSS}, it was {played.unguarded}")
    if played.event != "load" or "replaced_parameter" not in played.message:
        differences.append(f"the guarded load was to raise replaced_parameter, it raised {played.message or 'nothing'}")
    close = all(abs(seen - said) < _TOLERANCE for seen, said in zip(played.fixed, _FIRST_FIXED_LOSSES, strict=False))
    if len(played.fixed) != STEPS or not close or sorted(set(played.fixed), reverse=True) != played.fixed:
        differences.append(f"the fixed loss was to fall from {_FIRST_FIXED_LOSSES}, it was {played.fixed}")
    return differences
