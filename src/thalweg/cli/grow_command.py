"""``thalweg grow``: one model whose heads (and layers) are added while a directional residual remains, or such a run that goes on."""

import dataclasses
from pathlib import Path

from thalweg import config
from thalweg.cli import train_command
from thalweg.cli.console import emit, say
from thalweg.errors import ExitCode, InputError

EXAMPLES = """examples:
  thalweg grow --task sentiment --start-heads 1 -o runs/grown
  thalweg grow --task sentiment --threshold 0.2 --dry-run
  thalweg grow --resume runs/grown

Growth ends converged, capped (not converged), isotropic or unstable; training goes on to its last step. Then thalweg report RUN is the growth
record, and RUN/model is what Hugging Face loads (thalweg train --init-from RUN/model trains it further, too)."""

LEFT_OUT = ("head_width", "seed")  # given by flags of other names
DICTIONARY_WEIGHT = 0.1  # of the loss of prototypes, where a model that grows has some


def configure(parser) -> None:
    from thalweg.growth.options import GrowthOptions

    train_command.add_run(
        parser,
        config="file with any of the values below, its table growth included",
        output="folder of the run (runs/grown-DATA-sSEED)",
        dry_run="print the first spectrum, the heads that thresholds would give, warnings and cost, and stop",
    )
    growth = parser.add_argument_group("growth", "when heads and layers come and go (docs/growth.md)")
    growth.add_argument("--task", metavar="NAME", help="the same as --data")
    growth.add_argument("--start-heads", type=int, metavar="N", help="heads of each layer at the start (1)")
    growth.add_argument("--head-width", type=int, metavar="N", help="of every head (32 below a width of 256, else 64)")
    growth.add_argument("--growth-seed", metavar="VALUE", help="of the noise in new heads (42)")
    for field in config.describe(GrowthOptions):
        if field.name not in LEFT_OUT:
            growth.add_argument(
                f"--{field.name.replace('_', '-')}", metavar="VALUE", help=train_command.explained(field)
            )
    train_command.add_configuration(parser)


def run(args) -> ExitCode:
    if train_command.resumes(args):
        return _resume(args)
    wanted = requested(args)
    if args.print_config:
        print(config.to_toml(wanted), end="")
        return ExitCode.OK
    folder = Path(args.output or f"runs/grown-{''.join(c if c.isalnum() else '-' for c in wanted.data)}-s{wanted.seed}")
    if not args.dry_run:
        train_command.refuse_used(folder)
    return _grow(args, wanted, folder, resume=False)


def requested(args):
    """The configuration that a file and flags ask for: one head (or ``--start-heads``) in each layer, and the table of growth."""
    from thalweg.training import presets

    if args.task is not None:
        if args.data is not None:
            raise InputError("--task and --data are two names of one flag; give one of them")
        args.data = args.task
    if args.start_heads is not None and args.heads is not None:
        raise InputError("--start-heads and --heads both say how many heads each layer starts with; give one of them")
    base = {} if args.config is None else config.read_toml(presets.find(args.config))
    given = train_command.requested(args, base)
    if args.head_width is not None and args.head_width < 2:
        raise InputError(f"--head-width must be at least 2, got {args.head_width}")
    model = dict(given.model)
    if given.init_from is None:  # a model that is there has its heads
        usual = dataclasses.replace(given, heads=None)
        width = args.head_width or model.get("head_size") or usual.resolved_width // usual.resolved_heads
        if model.setdefault("head_size", width) != width:
            raise InputError(f"--head-width {width} and model.head_size {model['head_size']} differ; give one of them")
        start = args.start_heads if args.start_heads is not None else given.heads if given.heads is not None else 1
        given = dataclasses.replace(given, heads=start, model=model)
    elif args.head_width is not None or args.start_heads is not None:
        raise InputError("the model of --init-from has its heads; leave --head-width and --start-heads out")
    prototypes = "prototypes" in given.layers or model.get("head_prototypes", False)
    if prototypes and args.dictionary_weight is None and "dictionary_weight" not in base:
        given = dataclasses.replace(given, dictionary_weight=DICTIONARY_WEIGHT)
    return dataclasses.replace(given, growth=growth_table(args, given.growth or {}))


def growth_table(args, base: dict) -> dict:
    """What a file and flags ask of growth, checked. Raises: InputError, UnknownNameError."""
    from thalweg.growth.options import GrowthOptions, from_table

    flags = {f.name: getattr(args, f.name) for f in dataclasses.fields(GrowthOptions) if f.name not in LEFT_OUT}
    flags["seed"] = args.growth_seed
    found = config.parse_assignments([f"{name}={text}" for name, text in flags.items() if text is not None], "--growth")
    table = config.merge(base, found)
    from_table({"head_width": 2, **table})
    return table


def _resume(args) -> ExitCode:
    from thalweg.records.run import RunFolder

    folder = RunFolder.open(args.resume)
    if folder.config.get("growth") is None:
        raise InputError(
            f"{folder.path} is a run whose structure stays as it is; go on with: thalweg train --resume {folder.path}"
        )
    wanted = train_command.requested(args, folder.config)
    return _grow(
        args, dataclasses.replace(wanted, growth=growth_table(args, folder.config["growth"])), folder.path, resume=True
    )


def _grow(args, wanted, folder: Path, *, resume: bool) -> ExitCode:
    from thalweg.cli.progress import listening
    from thalweg.growth.planning import plan_growth
    from thalweg.growth.run import grow
    from thalweg.training.parallel import is_main

    main = is_main()
    if args.dry_run or (main and not resume and not args.quiet):
        planned = plan_growth(wanted)
        if args.dry_run and args.json:
            emit(planned.to_plain())
        elif args.dry_run:
            print("\n".join(planned.lines))
        else:
            say("\n".join(planned.lines))
        if args.dry_run:
            return ExitCode.OK
    with listening(
        quiet=args.quiet or not main, trackers=args.track, run=folder, config=config.to_plain(wanted)
    ) as listener:
        found = grow(wanted, folder, resume=resume, on_event=listener)
    if main and args.json:
        emit(found.to_plain())
    elif main:
        heads = ", ".join(map(str, found.growth.get("heads", [])))
        say(f"{found.result.status}: {folder}", quiet=args.quiet)
        say(
            f"growth {found.growth.get('status', 'unknown')}, heads by layer {heads}: {found.growth.get('reason', '')}",
            quiet=args.quiet,
        )
        if found.result.status == "done":
            say(
                f"{folder}/model holds the weights of the last step, {found.result.step}; thalweg eval reads the best checkpoint, of step "
                f"{found.result.best_step}, unless given --which last",
                quiet=args.quiet,
            )
        say(f"the growth record as a page: thalweg report {folder} -o grown.html", quiet=args.quiet)
    return ExitCode.OK
