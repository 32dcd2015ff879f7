"""What the documentation says is true: its code runs, its commands parse, its links lead somewhere, its tables are those of the code."""

import importlib
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from thalweg.capture import read_map
from thalweg.cli import COMMANDS, module_of
from thalweg.cli.console import Parser
from thalweg.errors import ThalwegError
from thalweg.studies.plan import parse as parse_plan
from thalweg.training.config import from_table

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
EXAMPLES = {  # script -> arguments that make it quick
    "wrap_your_own_branch.py": ["mgt"],
    "third_party_connection.py": [],
    "train_and_report.py": ["2", "out"],
}


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language, those in lists too."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return ["\n".join(line.removeprefix(indent) for line in text.splitlines()) for indent, text in found]


def run_python(code: list[str], where: Path) -> str:
    environment = {**os.environ, "THALWEG_CACHE": str(where / "cache"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, *code], cwd=where, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_python_page_runs_from_top_to_bottom(tmp_path):
    (tmp_path / "blocks.py").write_text("\n".join(blocks(ROOT / "docs" / "python.md", "python")), encoding="utf-8")
    assert run_python(["blocks.py"], tmp_path)


@pytest.mark.parametrize(
    ("connection", "least", "most"), [("none", 0.0, 0.1), ("additive", 0.5, 1.0), ("mgt", 0.5, 1.0)]
)
def test_the_six_lines_of_the_readme_show_what_it_says(connection, least, most, capsys):
    block = blocks(ROOT / "README.md", "python")[0]
    assert len(block.splitlines()) == 6
    with torch.random.fork_rng():
        torch.manual_seed(0)
        exec(block.replace('connection="none"', f'connection="{connection}"'), {})
    ranks = json.loads(capsys.readouterr().out)
    assert len(ranks) == 24
    assert least <= ranks[-1] <= most


def test_the_readme_measures_a_model_of_hugging_face(capsys):
    exec(compile(blocks(ROOT / "README.md", "python")[1], "README", "exec"), {})
    out = capsys.readouterr().out
    assert (
        out.startswith("Measurements(4 rows of 1 measures)") and "parallel_coefficient.raw layers.3.attention: " in out
    )


def test_every_example_is_listed():
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(EXAMPLES)


@pytest.mark.parametrize("script", EXAMPLES)
def test_examples_run(script, tmp_path):
    assert run_python([str(ROOT / "examples" / script), *EXAMPLES[script]], tmp_path)


# generated parts


@pytest.mark.parametrize(
    "script", ["capture_table", "connection_table", "measure_table", "mixer_table", "parity_table"]
)
def test_generated_parts_are_what_the_code_makes(script, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    generated, tool = importlib.import_module("generated"), importlib.import_module(script)
    parts = tool.parts()
    assert not generated.stale(parts), f"run: python tools/{script}.py"
    path, name, text = parts[0]
    assert generated.stale([(path, name, text + "\nmore")]) == [f"{path.relative_to(ROOT)}: {name}"]


def test_the_markers_of_a_part_must_stand_there_once(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    generated = importlib.import_module("generated")
    with pytest.raises(ValueError, match="once each"):
        generated.put("a page without markers", "connections", "text")


def test_the_verdicts_have_their_place():
    assert re.search(
        r"<!-- verdicts -->\n.+<!-- end of verdicts -->", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )


# commands


def commands_of(page: Path) -> list[str]:
    """Every command line that begins with ``thalweg``, in shell blocks and in inline code."""
    text = page.read_text(encoding="utf-8")
    lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    matches = (
        re.match(r"(?:\S*/)?thalweg (.+)|.* -m thalweg (.+)", line.strip().replace("\\|", "|"))
        for line in [*lines, *inline]
    )
    return [match[1] or match[2] for match in matches if match]


def spellings(command: str) -> list[list[str]]:
    """The argument lists that a line with alternatives ``a|b`` and optional ``[parts]`` stands for, the optional ones given."""
    tokens = shlex.split(command.replace("[", "").replace("]", "").replace("...", ""), comments=True)
    return [list(choice) for choice in itertools.product(*(token.split("|") for token in tokens))]


def check_command(argv: list[str]) -> None:
    """Raises: ThalwegError for a command, choice or flag that does not exist, or a value that a training run refuses."""
    if argv[0].startswith("-"):
        assert argv == ["--version"]
        return
    assert argv[0] in COMMANDS, argv
    command = importlib.import_module(module_of(argv[0]))
    parser = Parser(prog=argv[0])
    command.configure(parser)
    parser.add_common(parser)
    if argv[1:] == ["--help"]:
        return
    args = parser.parse_args(argv[1:])
    if argv[0] == "train" and not any(text.isupper() for text in argv) and not args.config and not args.resume:
        command.requested(args)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_parse(page):
    for command in commands_of(page):
        for argv in spellings(command):
            try:
                if len(argv) > 1 or argv[0] in ("demo", "doctor"):
                    check_command(argv)
                else:
                    assert argv[0] in (*COMMANDS, "--version")  # the name of a command in running text
            except ThalwegError as error:
                raise AssertionError(f"{page.name}: thalweg {' '.join(argv)}: {error}") from error


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_of_commands_can_be_pasted(page):
    """No alternative is a pipe, and no two runs of one block go to one folder."""
    for block in blocks(page, "sh"):
        calls = [line.split(" #")[0].strip() for line in block.splitlines()]
        assert not [line for line in calls if re.match(r"thalweg .*\S\|\S", line)]
        runs = [
            shlex.split(line)[2:] for line in calls if line.startswith("thalweg train --") and "--resume" not in line
        ]
        places = [default_of(argv) for argv in runs if "--dry-run" not in argv and "--print-config" not in argv]
        assert len(set(places)) == len(places), f"two runs go to one folder: {places}"


def default_of(argv: list[str]) -> str:
    """The folder of a run, as :func:`thalweg.cli.train_command.run` names it."""
    given = dict(zip(argv[::2], argv[1::2], strict=False))
    name = f"{given.get('--connection', 'additive')}-d{given.get('--depth')}-s{given.get('--seed', 0)}"
    return given.get("-o", given.get("--output", name))


def test_commands_are_found_and_wrong_ones_rejected(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "Say `thalweg list a\\|plans` or\n```sh\nx/thalweg train --wdith 3  # no\ntorchrun -m thalweg train --depth 2\n```\n"
    )
    assert commands_of(page) == ["train --wdith 3  # no", "train --depth 2", "list a|plans"]
    assert spellings("list a|plans") == [["list", "a"], ["list", "plans"]]
    for wrong in (["train", "--wdith", "3"], ["list", "a"], ["train", "--depth", "0"], ["show", "connection"]):
        with pytest.raises(ThalwegError):
            check_command(wrong)


def test_the_command_line_page_names_every_command_and_exit_code():
    from thalweg.errors import ExitCode

    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert all(f"`thalweg {name}" in text for name in COMMANDS)
    assert [int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)] == sorted(ExitCode)


# files, links, names


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_toml_blocks_are_configurations_plans_or_maps(page):
    for block in blocks(page, "toml"):
        table = tomllib.loads(block)
        read = parse_plan if "hypotheses" in table else read_map if "blocks" in table else from_table
        read(table)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings], (
                f"{page.name}: {target}"
            )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_exist(page):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(re.findall(r"(?:`|^)make ([\w-]+)", page.read_text(encoding="utf-8"), re.MULTILINE)) <= set(targets)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_dotted_names_exist(page):
    for name in re.findall(r"`(thalweg(?:\.\w+)+)", page.read_text(encoding="utf-8")):
        if name in ("thalweg.measures", "thalweg.tasks", "thalweg.trackers"):  # groups of entry points
            continue
        found = importlib.import_module("thalweg")
        for part in name.split(".")[1:]:
            try:
                found = getattr(found, part)
            except AttributeError:
                found = importlib.import_module(f"{found.__name__}.{part}")
