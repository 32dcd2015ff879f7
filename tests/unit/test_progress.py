"""What a person sees while a run goes on."""

import io
import subprocess
import sys

from thalweg.training.events import Event
from thalweg.training.progress import Progress

STORY = [
    Event("start", 0, 3, text="1,000 parameters"),
    Event("note", 0, 3, text="resumed"),
    Event("evaluation", 0, 3, {"val/loss": 3.0}),
    *[Event("step", s, 3, {"train/loss": 3.0 - s, "train/tokens_per_second": 1234.0}) for s in (1, 2, 3)],
    Event("step", 3, 3, {"moved/connection": 1.0}),
    Event("end", 3, 3, text="done"),
]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def tell(stream):
    with Progress(stream) as progress:
        for event in STORY:
            progress(event)
    return stream.getvalue()


def test_plain_lines_without_a_terminal():
    text = tell(io.StringIO())
    assert text.splitlines() == [
        "1,000 parameters",
        "note: resumed",
        "step 0: val/loss 3.0000",
        "step 1/3: loss 2.0000  1,234 tokens/s",  # then at most one line in ten seconds
        "step 3: done",
    ]
    assert "\x1b" not in text


def test_a_bar_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    text = tell(Terminal())
    assert "\x1b" in text and "3/3" in text and "step 0: val/loss 3.0000" in text and "step 3: done" in text


def test_reading_a_configuration_loads_no_torch():
    code = "import sys; from thalweg.training import TrainConfig; TrainConfig(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
