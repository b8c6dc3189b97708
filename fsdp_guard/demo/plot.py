"""Draw the loss curves of the three acts."""

from __future__ import annotations

from pathlib import Path

from fsdp_guard.demo.case import CHECKPOINT_LOSS, INITIAL_LOSS, Played


def save_plot(path: Path, played: Played) -> Path:
    """Write a PNG with the unguarded and the fixed run's losses, and where the guard stopped the second run.

    Args:
        path: Where to write it.
        played: What happened on one rank.

    Returns:
        ``path``.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.plot(played.unguarded, "o-", color="#c0392b", label="unguarded: trains on weights nobody loaded")
    axes.plot(played.fixed, "o-", color="#1e7d4f", label="fixed: assign=False, the checkpoint trains")
    if played.message:
        axes.plot([0], [INITIAL_LOSS], "X", color="#1f4e9c", markersize=12, label="guarded: stopped at the load")
    axes.axhline(CHECKPOINT_LOSS, color="#777777", linewidth=0.8, linestyle=":")
    end = len(played.fixed) - 1
    axes.annotate("loss of the checkpoint", (end, CHECKPOINT_LOSS), ha="right", va="bottom", fontsize=8)
    axes.set_title("load_state_dict(checkpoint, assign=True) after fully_shard()")
    axes.set_xlabel("SGD step")
    axes.set_ylabel("loss (MSE)")
    axes.set_ylim(bottom=0)
    axes.set_xticks(range(0, len(played.fixed), 5))
    axes.legend(loc="center right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    return path
