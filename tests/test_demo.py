"""The demo plays its three acts, and notices when one of them goes otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_guard import cli
from fsdp_guard.demo.case import CHECKPOINT_LOSS, INITIAL_LOSS, STEPS, Played
from fsdp_guard.demo.stage import _judge
from tests.mfsdp import MAIN_LAYOUT
from tests.wandb_file import read_run


@pytest.mark.skipif(MAIN_LAYOUT, reason="the demo plays on released versions: main raises at the load")
def test_demo(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--output", str(tmp_path)]) == 0
    printed, _ = capfd.readouterr()
    assert "All three acts went as said." in printed
    assert "loss 0.390625 0.390625 0.390625 0.390625 0.390625 ... 0.390625" in printed
    assert "replaced_parameter (1 parameter)" in printed
    assert "loss 0.449219 0.394821 0.347011 0.304990" in printed
    assert len(printed.splitlines()) <= 40, "more than one screen"
    (plot,) = tmp_path.rglob("losses.png")
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert str(plot) in printed
    run = read_run(tmp_path)
    assert [alert.title for alert in run.alerts] == ["fsdp_guard: holder divergence"]
    assert run.exit_code == 1


def as_said() -> Played:
    return Played(
        load_result="<All keys matched successfully>",
        unguarded=[INITIAL_LOSS] * STEPS,
        message="replaced_parameter",
        event="load",
        fixed=[CHECKPOINT_LOSS, 0.394821, 0.347011, 0.304990, *(0.3 - 0.01 * i for i in range(STEPS - 4))],
    )


def test_judge_accepts_what_was_promised() -> None:
    assert _judge(as_said()) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"load_result": "<missing keys>"}, "unguarded load"),
        ({"unguarded": [INITIAL_LOSS] * (STEPS - 1) + [0.39]}, "unguarded loss"),
        ({"unguarded": []}, "unguarded loss"),
        ({"message": "", "event": ""}, "it raised nothing"),
        ({"event": "first_forward"}, "guarded load"),
        ({"fixed": [INITIAL_LOSS] * STEPS}, "fixed loss"),
        ({"fixed": [CHECKPOINT_LOSS, 0.394821, 0.347011, 0.304990, *[0.3] * (STEPS - 4)]}, "fixed loss"),
        ({"fixed": []}, "fixed loss"),
    ],
)
def test_judge_says_what_differs(change: dict[str, object], words: str) -> None:
    played = Played(**{**vars(as_said()), **change})
    differences = _judge(played)
    assert any(words in text for text in differences), differences


def test_demo_without_its_packages(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["demo"]) == 2
    assert "pip install 'fsdp-guard[demo]'" in capsys.readouterr().err


def test_wrong_call() -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["dmeo"])
    assert caught.value.code == 2
