"""The flags of a connection over the options of a file: what wins, what goes with what, and what is said."""

import tomllib

import pytest

from thalweg.cli import main

FILE = 'connection = "mhc"\nconnection_options = { streams = 3, mixer_options = { iterations = 5, eps = 1e-6 } }\n'
GONE = "mixer {} takes the place of sinkhorn, whose options go with it: iterations=5, eps=1e-06\n"


@pytest.fixture
def printed(tmp_path, monkeypatch, capsys):
    """(connection options, stderr) of ``train --print-config`` with a file and flags."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(FILE)

    def of(*flags):
        assert main(["train", "run.toml", *flags, "--print-config"]) == 0
        out, err = capsys.readouterr()
        return tomllib.loads(out).get("connection_options"), err

    return of


@pytest.mark.parametrize("mixer", ["birkhoff_projection", "newton"])
def test_another_mixer_takes_the_options_of_the_one_before_with_it(printed, mixer):
    assert printed("--mixer", mixer) == ({"streams": 3, "mixer": mixer}, GONE.format(mixer))
    with_own = printed("--mixer", mixer, "--mixer-option", "steps=30")
    assert with_own == ({"streams": 3, "mixer": mixer, "mixer_options": {"steps": 30}}, GONE.format(mixer))
    assert printed("--option", f"mixer={mixer}", "--quiet") == ({"streams": 3, "mixer": mixer}, "")


def test_the_same_mixer_keeps_them_and_takes_more(printed):
    kept = {"iterations": 5, "eps": 1e-6}
    assert printed() == ({"streams": 3, "mixer_options": kept}, "")
    assert printed("--mixer", "sinkhorn") == ({"streams": 3, "mixer": "sinkhorn", "mixer_options": kept}, "")
    more = printed("--mixer-option", "iterations=7", "--streams", "2")
    assert more == ({"streams": 2, "mixer_options": {**kept, "iterations": 7}}, "")


def test_what_is_no_connection_is_told_as_such(printed, capsys):
    assert main(["train", "run.toml", "--connection", "mch", "--streams", "3", "--data", "copy", "-o", "x"]) == 2
    assert "Did you mean 'mhc'" in capsys.readouterr().err
