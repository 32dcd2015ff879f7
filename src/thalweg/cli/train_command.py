"""``thalweg train``: one model, from a file and flags, or a run that goes on."""

import dataclasses
from pathlib import Path

from thalweg import config
from thalweg.cli import connection_flags
from thalweg.cli.console import emit, say
from thalweg.errors import ExitCode, InputError

EXAMPLES = """examples:
  thalweg train --connection mgt --depth 12 --data text:novel.txt --seed 0
  thalweg train --connection mhc --mixer sinkhorn --streams 4
  thalweg train --resume runs/mgt-d12-s0

A TOML file holds the same names (connection = "mgt"); flags win over the file. Under torchrun the same flags train on all ranks:
  torchrun --nproc-per-node 2 -m thalweg train --depth 12"""

TABLES = ("connection_options", "model", "growth")  # given by flags of their own

# Far above what any machine trains: beyond it a size is a slip of the hand, and only its plan would take hours.
MOST = {
    "depth": 2**16,
    "width": 2**20,
    "heads": 2**20,
    "kv_heads": 2**20,
    "ffn_width": 2**24,
    "vocab_size": 2**31,
    "sequence_length": 2**31,
    "batch_size": 2**31,
    "steps": 2**53,
    "tokens": 2**63,
    "threads": 2**16,
    "seed": 2**63 - 1,
}


def configure(parser) -> None:
    add_run(
        parser,
        config="file with any of the values below, or preset:NAME",
        output="folder of the run (runs/CONNECTION-dDEPTH-sSEED)",
        dry_run="print the plan (parameters, FLOPs, memory, time) and stop",
    )
    add_configuration(parser)


def add_run(parser, *, config: str, output: str, dry_run: str) -> None:
    """The flags of a command that makes a run, with the help of those that each command says in its own words."""
    parser.add_argument("config", nargs="?", metavar="CONFIG.toml", help=config)
    parser.add_argument("-o", "--output", metavar="RUN", help=output)
    parser.add_argument(
        "--resume",
        metavar="RUN",
        help="go on with this run; other flags may only change what cannot change its numbers",
    )
    connection_flags.add(parser)
    parser.add_argument("--dry-run", action="store_true", help=dry_run)
    parser.add_argument("--print-config", action="store_true", help="print the configuration as TOML and stop")
    parser.add_argument(
        "--track", action="append", default=[], metavar="TRACKER", help="tensorboard, trackio or wandb; may be repeated"
    )


def add_configuration(parser) -> None:
    """A flag for every field of a training configuration."""
    from thalweg.training.config import TrainConfig

    group = parser.add_argument_group("configuration", "values are TOML: numbers, true, strings, [lists]")
    for field in config.describe(TrainConfig):
        if field.name not in TABLES:
            group.add_argument(f"--{field.name.replace('_', '-')}", metavar="VALUE", help=explained(field))
    group.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="further field of the decoder; may be repeated",
    )


def run(args) -> ExitCode:
    if resumes(args):
        return _resume(args)
    wanted = requested(args)
    if args.print_config:
        print(config.to_toml(wanted), end="")
        return ExitCode.OK
    folder = Path(args.output or f"runs/{wanted.connection}-d{wanted.depth}-s{wanted.seed}")
    if not args.dry_run:
        refuse_used(folder)
    return _train(args, wanted, folder, resume=False)


def resumes(args) -> bool:
    """Whether a run goes on. Raises: InputError for flags that do not go together."""
    for flag, given in (("--resume", args.resume), ("--output", args.output)):
        if given == "":
            raise InputError(f"{flag} needs the folder of a run, got an empty name")
    if args.resume is not None and (args.config is not None or args.output is not None):
        raise InputError("--resume takes the configuration and the folder from the run; drop CONFIG.toml and --output")
    return args.resume is not None


def refuse_used(folder: Path) -> None:
    """Before the plan, which takes a while to time. Raises: InputError for a folder that a run cannot start in."""
    from thalweg.records.run import RunFolder
    from thalweg.training.parallel import is_main

    if not is_main():  # the first rank may have begun already
        return
    if RunFolder.is_run(folder):
        raise InputError(
            f"{folder} holds a run already; go on with it by --resume {folder}, or choose another folder by -o"
        )
    RunFolder.check_new(folder)
    config.check_writable(folder)


def requested(args, base: dict | None = None):
    """The configuration that a file and flags ask for; flags win."""
    from thalweg.training import presets
    from thalweg.training.config import TrainConfig, from_table

    if base is None:
        base = {} if args.config is None else config.read_toml(presets.find(args.config))
    table = dict(base)
    given = {
        field.name: getattr(args, field.name)
        for field in dataclasses.fields(TrainConfig)
        if field.name not in TABLES and getattr(args, field.name) is not None
    }
    table = config.merge(table, config.parse_assignments([f"{name}={text}" for name, text in given.items()]))
    if (model := table.get("init_from")) is not None:
        from thalweg.training.initial import table_of

        table = config.merge(table_of(model), table)
    connection = table.get("connection", TrainConfig.connection)
    if options := connection_flags.options(args, connection):
        base = table.get("connection_options", {})
        table["connection_options"] = connection_flags.merged(base, options, connection, quiet=args.quiet)
    if args.model:
        table = config.merge(table, {"model": config.parse_assignments(args.model, "--model")})
    for name, most in MOST.items():
        value = table.get(name)
        if isinstance(value, int) and value > most:
            raise InputError(f"{name} must be at most {most:,}, got a number of {value.bit_length()} bits")
    return from_table(table)


def _resume(args) -> ExitCode:
    from thalweg.records.run import RunFolder

    folder = RunFolder.open(args.resume)
    return _train(args, requested(args, base=folder.config), folder.path, resume=True)


def _train(args, wanted, folder: Path, *, resume: bool) -> ExitCode:
    from thalweg.cli.progress import listening
    from thalweg.training import train
    from thalweg.training.parallel import is_main
    from thalweg.training.plan import plan_of

    main = is_main()
    if args.dry_run or (main and not resume and not args.quiet):
        planned = plan_of(wanted)
        if args.dry_run:
            emit(config.to_plain(planned)) if args.json else print(planned)
            return ExitCode.OK
        say(str(planned))
    with listening(
        quiet=args.quiet or not main, trackers=args.track, run=folder, config=config.to_plain(wanted)
    ) as listener:
        result = train(wanted, folder, resume=resume, on_event=listener)
    if main and args.json:
        emit(config.to_plain(result))
    elif main:
        say(f"{result.status}: {folder}", quiet=args.quiet)
    return ExitCode.OK


def explained(field: config.Described) -> str:
    """Help of one flag: what it means, the values where there are few, the default."""
    values = f": {field.allowed}" if field.one_of else ""
    default = "" if field.default == "none" else f" ({field.default})"
    return f"{field.meaning}{values}{default}".replace("%", "%%")
