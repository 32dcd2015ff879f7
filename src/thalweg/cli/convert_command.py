"""``thalweg convert``: a trained model to another connection, proved equal or called a warm start."""

from thalweg.cli import connection_flags
from thalweg.cli.console import emit, say
from thalweg.errors import ExitCode, InputError

EXAMPLES = """examples:
  thalweg convert SmolLM2 --connection mhc --mixer row_stochastic -o smollm2-mhc
  thalweg convert runs/additive-d4-s0 --connection closed_delta -o closed --text novel.txt

MODEL is the folder of a transformers model, a name on a hub, a folder of ours, or a run. Families: llama, mistral, qwen2, qwen3,
gemma3_text, gpt2. The folder that is written holds proof.json and loads by AutoModelForCausalLM once thalweg is imported.

Exit codes: 0 the result is equal, or a warm start whose drift is printed; 2 cannot be converted, loaded or written; 5 the proof failed"""


def configure(parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder of a model, its name on a hub, or a run")
    parser.add_argument(
        "--connection", required=True, metavar="NAME", help="what its layers shall write by, or closed_delta"
    )
    connection_flags.add(parser)
    parser.add_argument("-o", "--output", required=True, metavar="FOLDER", help="new folder for the result")
    parser.add_argument("--text", metavar="FILE", help="what both models are compared on (the held-out shipped novel)")
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
    options = connection_flags.options(args, args.connection)
    folder = check_new(args.output)
    wanted(args.connection, options)  # a slip is told before a model is loaded
    source = opened(args)
    count = sum(p.numel() for p in source.model.parameters())
    say(f"{source.name}: {source.family}, {count:,} parameters, {args.dtype}", quiet=args.quiet)
    made = convert(
        source,
        args.connection,
        options=options,
        dtype=args.dtype,
        text=args.text,
        length=args.length,
        allow_drift=args.allow_drift,
    )
    save(made, folder, tokenizer=source.tokenizer)
    new = sum(p.numel() for p in made.model.parameters()) - count
    if args.json:
        emit({**made.proof.plain(), "output": str(folder), "new_parameters": new})
        return ExitCode.OK
    for line in made.proof.lines():
        print(line)
    print(f"{made.proof.connection}: {new:+,} parameters, in {folder}")
    return ExitCode.OK


def opened(args):
    """The source that the arguments name, with the tokenizer of a run."""
    import torch

    from thalweg.cli.opening import check_which, hush_bars, open_run
    from thalweg.records.run import RunFolder
    from thalweg.surgery import Source, open_source

    hush_bars(args.quiet)
    check_which(args.model, args.which)
    if not RunFolder.is_run(args.model):
        return open_source(args.model, dtype=getattr(torch, args.dtype))
    found = open_run(args.model, args.which or "best")
    return Source(found.model, found.name, "thalweg", found.tokenizer)
