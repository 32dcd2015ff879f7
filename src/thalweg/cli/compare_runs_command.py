"""``thalweg compare-runs``: what differs between two runs, and from which step."""

from thalweg import config
from thalweg.cli.console import emit, table
from thalweg.errors import ExitCode

EXAMPLES = """examples:
  thalweg compare-runs runs/additive-d4-s0 runs/mgt-d4-s0
  thalweg compare-runs runs/a runs/b --assert-equal

--assert-equal: exit code 1 unless every training loss is bitwise the same."""


def configure(parser) -> None:
    parser.add_argument("first", help="folder of a run")
    parser.add_argument("second", help="folder of another run")
    parser.add_argument(
        "--assert-equal", action="store_true", help="exit code 1 unless the training losses are bitwise equal"
    )


def run(args) -> ExitCode:
    from thalweg.records.compare import compare
    from thalweg.training.config import settled

    found = compare(args.first, args.second, settle=settled)
    if args.json:
        emit(config.to_plain(found))
    else:
        columns = {"name": "configuration", "first": "first", "second": "second"}
        table([{"name": k, "first": a, "second": b} for k, (a, b) in found.config.items()], columns)
        table(
            [
                {
                    "name": f"{k} [{found.units[k]}]" if k in found.units else k,
                    "first": f"{a:.6g}",
                    "second": f"{b:.6g}",
                    "d": f"{b - a:+.6g}",
                }
                for k, (a, b) in found.final.items()
            ],
            {"name": "last value", "first": "first", "second": "second", "d": "second - first"},
        )
        where = "bitwise equal" if found.first_difference is None else f"differ from step {found.first_difference}"
        print(f"training losses {where} over {found.common_steps} common steps")
    equal = found.first_difference is None and found.common_steps > 0
    return ExitCode.REFUTED if args.assert_equal and not equal else ExitCode.OK
