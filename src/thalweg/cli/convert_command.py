"""``thalweg convert``: a trained model to another connection, proved equal or called a warm start."""

from pathlib import Path

from thalweg.cli import connection_flags
from thalweg.cli.console import deliver, say
from thalweg.errors import ExitCode, InputError

EXAMPLES = """examples:
  thalweg convert SmolLM2 --connection mhc --mixer row_stochastic -o smollm2-mhc
  thalweg convert runs/additive-d4-s0 --connection closed_delta -o closed --text novel.txt
  thalweg convert SmolLM2 --grow-depth 2 --grow-ffn 2048 -o larger
  thalweg convert runs/sentiment --grow-heads 1 --grow-depth 1 -o larger-encoder

Without --connection a model of ours keeps its own and another becomes additive. What grows begins where it changes no number: new layers, heads
and units write zero, new coordinates of the stream are zero (with LayerNorm the mean of the others).

MODEL is the folder of a transformers model, a name on a hub, a folder of ours, or a run. Families: llama, mistral, qwen2, qwen3,
gemma3_text, gpt2, all of them decoders; encoders are ours alone. The folder that is written holds proof.json and loads by AutoModelForCausalLM
(AutoModelForMaskedLM, AutoModelForSequenceClassification) once thalweg is imported. A classifier is compared on the validation texts of its
run, or of --data NAME, which give a loss; on any other text the classes are unknown and the logits alone are compared.

Exit codes: 0 the result is equal, or a warm start whose drift is printed; 2 cannot be converted, loaded or written; 5 the proof failed"""

TEXTS = 32  # of a classification that both models are compared on


def configure(parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder of a model, its name on a hub, or a run")
    parser.add_argument(
        "--connection",
        metavar="NAME",
        help="what its layers shall write by, or closed_delta (as it is, with --grow-...)",
    )
    connection_flags.add(parser)
    grow = parser.add_argument_group("what grows")
    grow.add_argument("--grow-heads", type=int, default=0, metavar="N", help="N more query heads in every layer")
    grow.add_argument("--grow-width", type=int, metavar="D", help="width of the stream, from now on")
    grow.add_argument("--grow-ffn", type=int, metavar="W", help="units of every feed-forward sublayer, from now on")
    grow.add_argument("--grow-depth", type=int, default=0, metavar="N", help="N more layers, on top")
    grow.add_argument("--grow-seed", type=int, default=0, metavar="K", help="of the new weights that are drawn (0)")
    parser.add_argument("-o", "--output", required=True, metavar="FOLDER", help="new folder for the result")
    parser.add_argument("--text", metavar="FILE", help="what both models are compared on (the held-out shipped novel)")
    add_data(parser)
    parser.add_argument(
        "--length",
        type=int,
        metavar="N",
        help="tokens of a compared row (256, or more than a window of up to 1024, or what the model takes)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "float64"),
        default="float32",
        help="of result and proof: equal to 1e-4 or 1e-9 (float32)",
    )
    parser.add_argument("--which", choices=("best", "last"), help="checkpoint, of a run (best)")
    parser.add_argument("--allow-drift", action="store_true", help="write the result of a proof that failed, too")


def run(args) -> ExitCode:
    from thalweg.surgery import convert, save
    from thalweg.surgery.folder import check_new
    from thalweg.surgery.target import wanted

    if not args.model:
        raise InputError("the model needs a name, got an empty one")
    growth = growth_of(args)
    if args.connection is None and growth is None:
        raise InputError(
            "say what shall change: --connection NAME, or one of --grow-heads, --grow-width, --grow-ffn, --grow-depth"
        )
    options = connection_flags.options(args, args.connection or "additive")
    folder = check_new(args.output)
    if args.connection is not None:
        wanted(args.connection, options)  # a slip is told before a model is loaded
    source, own = opened(args)
    rows = classified(args, source, compared(args, own), TEXTS)
    count = sum(p.numel() for p in source.model.parameters())
    say(f"{source.name}: {source.family}, {count:,} parameters, {args.dtype}", quiet=args.quiet)
    made = convert(
        source,
        args.connection,
        options=options,
        growth=growth,
        dtype=args.dtype,
        text=args.text,
        tokens=rows,
        length=None if rows is not None else args.length,
        allow_drift=args.allow_drift,
    )
    new = sum(p.numel() for p in made.model.parameters()) - count
    lines = [*made.proof.lines(), f"{made.proof.connection}: {new:+,} parameters"]
    deliver(
        folder,
        lambda: save(made, folder, tokenizer=source.tokenizer),
        lambda: print(*lines, sep="\n", flush=True),
        {**made.proof.plain(), "new_parameters": new},
        args.json,
    )
    return ExitCode.OK


def growth_of(args):
    """What the arguments make larger; None for nothing. Raises: InputError."""
    from thalweg.surgery import Growth

    if not (args.grow_heads or args.grow_depth) and args.grow_width is None and args.grow_ffn is None:
        return None
    return Growth(args.grow_heads, args.grow_width, args.grow_ffn, args.grow_depth, args.grow_seed)


def add_data(parser) -> None:
    """What a classifier is compared on."""
    parser.add_argument(
        "--data",
        metavar="NAME",
        help="classified texts that a classifier is compared on (those of its run, if it is one)",
    )


def opened(args):
    """The source that the arguments name, with the tokenizer of a run; and the task that a run learned, or None.

    Raises: InputError, CheckpointError.
    """
    import torch

    from thalweg.cli.opening import check_which, hush_bars, open_run_and_task
    from thalweg.records.run import RunFolder
    from thalweg.surgery import Source, open_source
    from thalweg.surgery.source import FAMILY

    hush_bars(args.quiet)
    check_which(args.model, args.which)
    if args.data is not None and args.text is not None:
        raise InputError("--data and --text both say what is compared on; give one of them")
    if not RunFolder.is_run(args.model):
        return open_source(args.model, dtype=getattr(torch, args.dtype)), None
    found, own = open_run_and_task(args.model, args.which or "best")
    return Source(found.model, found.name, FAMILY, own.saved_tokenizer(), own.portable_settings()), own


def compared(args, own):
    """The data that two models are compared on: those of --data, or what the run learned; None for a text. Raises: InputError."""
    from thalweg.records.run import RunFolder

    if args.text is not None:
        return None
    if args.data is None or (own is not None and args.data == RunFolder.open(args.model).config.get("data")):
        return own
    return data_of(args)


def classified(args, source, task, rows: int):
    """Up to ``rows`` texts of the classification ``task``; None where there is none and nobody asked for one. Raises: InputError."""
    from thalweg.surgery.text import labelled

    if task is None or (task.objective != "classification" and args.data is None):
        return None
    if source.ours is None:
        raise InputError(f"--data is for classifiers of ours, and {source.name} is none; leave it out")
    return labelled(source.ours.config, task, length=args.length, rows=rows)


def data_of(args):
    """The data of ``--data``, cut by the tokenizer beside the model, or that of the run. Raises: InputError."""
    from thalweg import data
    from thalweg.records.run import RunFolder

    beside = Path(args.model) / "tokenizer.json"
    tokenizer = str(beside) if beside.exists() else None
    if RunFolder.is_run(args.model):
        tokenizer = RunFolder.open(args.model).config.get("tokenizer")
    return data.load(args.data, tokenizer=tokenizer)
