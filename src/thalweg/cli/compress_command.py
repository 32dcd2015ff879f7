"""``thalweg compress``: a smaller twin of a model, as a folder of transformers with the record of what was done."""

import time
from typing import Any

from thalweg import config
from thalweg.cli.console import deliver, say
from thalweg.cli.flags import with_short
from thalweg.errors import ExitCode, InputError

EXAMPLES = """examples:
  thalweg compress smollm2 --method round_to_nearest --bits 4 --group 64 -o smollm2-w4
  thalweg compress smollm2 --method wanda --sparsity 2:4 -o smollm2-24
  thalweg compress smollm2 --method layer_drop --option count=4 --text novel.txt --skip 0,29 -o smollm2-26
  thalweg compress FOLDER --method llmcompressor:awq --environment venv/bin/python --text novel.txt -o awq

`thalweg list compressors` names the methods, `thalweg show compressor NAME` their options. All linear maps inside the layers are compressed;
embeddings and unembedding are not. Layers are taken in order, and each is calibrated on what the compressed ones before it give. The weights
that are written are dense floats with the values of the compressed model; the record says how large it would be.

Exit codes: 0 done; 2 cannot be opened, compressed or written"""

SHORT = ("bits", "group", "sparsity")  # options of methods that have flags of their own
SAMPLES = 128


def configure(parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder, GGUF file, name on a hub, model at hand, or a run")
    parser.add_argument(
        "--method", required=True, metavar="NAME", help="compressor, or LIBRARY:NAME of another library"
    )
    parser.add_argument("-o", "--output", required=True, metavar="FOLDER", help="new folder for the result")
    options = parser.add_argument_group("options of the method")
    options.add_argument("--bits", metavar="N", help="of a weight, for methods that round")
    options.add_argument("--group", metavar="N", help="inputs that share a scale: a number, row or tensor")
    options.add_argument(
        "--sparsity", metavar="S", help="share that goes (0.5), or N of every M (2:4), for methods that prune"
    )
    options.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="any option; may be repeated"
    )
    where = parser.add_argument_group("where")
    where.add_argument("--layers", metavar="WHICH", help="0,3 or 1: or 5-10 (all)")
    where.add_argument("--skip", metavar="WHICH", help="layers that are left as they are, 0,29 (none)")
    where.add_argument("--sites", metavar="WHICH", help="attention, mlp or both (both)")
    text = parser.add_argument_group("calibration and model")
    text.add_argument(
        "--text", metavar="FILE", help="calibration: .jsonl with a field text, or a text (the shipped novels)"
    )
    text.add_argument("--samples", type=int, default=SAMPLES, metavar="N", help=f"windows of the text ({SAMPLES})")
    text.add_argument("--length", type=int, metavar="N", help="tokens of a window (512, or what the model takes)")
    text.add_argument("--batch-size", type=int, default=1, metavar="N", help="windows of a pass (1)")
    text.add_argument("--dtype", default="float32", help="of the weights: float32, bfloat16, float64, auto (float32)")
    text.add_argument("--which", choices=("best", "last"), help="checkpoint, of a run (best)")
    text.add_argument(
        "--environment", metavar="PYTHON", help="of LIBRARY:NAME: the Python of the library's environment"
    )


def run(args) -> ExitCode:
    from thalweg.cli.calibrating import calibration_from
    from thalweg.config import check_new

    options = with_short(args, SHORT)
    needed = check_method(args, options)  # a slip is told before a model is loaded
    folder = check_new(args.output)
    opened = _opened(args)
    calibration = None
    if needed or args.text is not None:
        read = {"samples": args.samples, "length": args.length, "quiet": args.quiet}
        calibration = calibration_from(args.text, opened.tokenizer, opened.model, **read)

    def tell(line: str) -> None:
        say(line, quiet=args.quiet)

    made = _compressed(args, opened, calibration, options, tell)
    record = made.record
    deliver(
        folder,
        lambda: made.save(folder, tokenizer=opened.tokenizer),
        lambda: print(*record.lines(), record.weights, sep="\n", flush=True),
        record.plain(),
        args.json,
    )
    return ExitCode.OK


def check_method(args, options: dict[str, Any]) -> bool:
    """Whether the method needs to see text.

    Raises: UnknownNameError for a method or option that is not there; InputError for values and flags that cannot be.
    """
    from thalweg.compression import compressors
    from thalweg.compression.adapters.libraries import external, is_external
    from thalweg.compression.adapters.running import check_environment

    if is_external(args.method):
        library, _, method = external(args.method)
        kind, needed = method.options, method.calibrated
        _check_short(args, kind)
        config.build(kind, options, where=args.method)
        check_environment(library, args.environment)
    else:
        if args.environment is not None:
            raise InputError(
                f"--environment is for methods of other libraries (LIBRARY:NAME), got {args.method}; leave it out"
            )
        _check_short(args, compressors.registry[args.method].Options)
        needed = compressors.create(args.method, **options).needs_calibration
    return needed


def _check_short(args, kind: type) -> None:
    from dataclasses import fields

    names = [f.name for f in fields(kind)]  # type: ignore[arg-type]  # options are dataclasses
    for name in SHORT:
        if getattr(args, name) is not None and name not in names:
            allowed = ", ".join(f"--{n}" if n in SHORT else f"--option {n}=..." for n in names) or "none"
            raise InputError(f"{args.method} has no option {name}; it takes {allowed}")


def _opened(args):
    from thalweg.cli.opening import open_any

    if not args.model:
        raise InputError("the model needs a name, got an empty one")
    opened = open_any(args.model, which=args.which, quiet=args.quiet, dtype=args.dtype)
    for line in (opened.name, *opened.notes):
        say(line, quiet=args.quiet)
    return opened


def _compressed(args, opened, calibration, options: dict[str, Any], tell):
    from thalweg.compression import compress
    from thalweg.compression.adapters import compress_outside, is_external

    where: dict[str, Any] = {"layers": args.layers, "skip": args.skip, "sites": args.sites, "source": opened.name}
    if is_external(args.method):
        return compress_outside(
            opened.model,
            args.method,
            environment=args.environment,
            calibration=calibration,
            tell=tell,
            **where,
            **options,
        )

    began = 0.0

    def progress(done: int, plan) -> None:
        nonlocal began
        if not done:
            for line in plan.lines:
                tell(line)
            began = time.perf_counter()
        elif plan.tokens and done == 1 < plan.layers:
            tell(f"about {(time.perf_counter() - began) * plan.layers:.0f} s, from one layer")
        elif done == plan.layers or (plan.tokens and done % max(plan.layers // 8, 1) == 0):
            tell(f"  {done} of {plan.layers} layers")

    more = {"batch_size": args.batch_size, "progress": progress}
    return compress(opened.model, args.method, calibration=calibration, **more, **where, **options)
