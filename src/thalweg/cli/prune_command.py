"""``thalweg prune``: heads of a model taken away for good, named by a person or chosen by a measured score."""

from thalweg.cli.console import deliver, say, table
from thalweg.cli.convert_command import add_data, classified, compared, opened
from thalweg.errors import ExitCode, InputError

EXAMPLES = """examples:
  thalweg prune SmolLM2 --heads "0:3,1;4:2" -o smaller
  thalweg prune runs/mgt-d4-s0 --by output --count 4 -o smaller --text novel.txt
  thalweg prune runs/grown/model --by loss --count 4 -o smaller --data sentiment

--heads names layers and their query heads, from 0. Scores: output (what a head writes), weight (what it could write), energy (its directional
energy, as growth prunes by), loss (what the model loses without it; one pass a head). The lowest go, one of a layer stays, and heads that
share keys and values go together. The function changes, unless the heads wrote nothing: loss and KL before and after are on text that
follows the scored one. The folder that is written holds pruning.json and loads by the Auto class of the model once thalweg is imported.

MODEL is what thalweg convert takes; a model of ours keeps its connection, others become additive ones of ours. Of an encoder of masked tokens
15 % of the text is hidden; a classifier needs classified texts for a loss, and for the score of that name: those of its run, or --data NAME.
A run on a synthetic task is scored and compared on sequences of that task, by their answers.

Exit codes: 0 done; 2 cannot be pruned, loaded or written"""

TEXTS = 256  # of a classification, or sequences of a synthetic task, that the two are compared on; as many before them are scored


def configure(parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder of a model, its name on a hub, or a run")
    parser.add_argument(
        "--heads", metavar="WHICH", help='the heads that go, "0:3,1;4:2" for 3 and 1 of layer 0 and 2 of layer 4'
    )
    parser.add_argument("--by", metavar="SCORE", help="output, weight, energy or loss: take the lowest, with --count")
    parser.add_argument("--count", type=int, metavar="N", help="how many query heads go, of all layers together")
    parser.add_argument("-o", "--output", required=True, metavar="FOLDER", help="new folder for the result")
    parser.add_argument(
        "--text",
        metavar="FILE",
        help="what heads are scored and models compared on (the held-out shipped novel; of a run on a synthetic task, that task)",
    )
    add_data(parser)
    parser.add_argument("--length", type=int, metavar="N", help="tokens of a row (256, or what the model takes)")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32", help="of the result (float32)")
    parser.add_argument("--which", choices=("best", "last"), help="checkpoint, of a run (best)")


def run(args) -> ExitCode:
    from thalweg.surgery import prune, save_pruned
    from thalweg.surgery.folder import check_new

    if not args.model:
        raise InputError("the model needs a name, got an empty one")
    heads = None if args.heads is None else parse_heads(args.heads)
    check_choice(args, heads)
    folder = check_new(args.output)
    source, own = opened(args)
    rows = rows_of(args, source, own, TEXTS if args.by is None else 2 * TEXTS)
    say(f"{source.name}: {source.family}, {args.dtype}", quiet=args.quiet)

    def progress(done: int, total: int) -> None:
        if done and (done == total or done % max(total // 8, 1) == 0):
            say(f"  scored {done} of {total} passes", quiet=args.quiet)

    made = prune(
        source,
        heads,
        by=args.by,
        count=args.count,
        dtype=args.dtype,
        text=args.text,
        tokens=rows,
        length=None if rows is not None else args.length,
        progress=progress,
    )
    deliver(
        folder,
        lambda: save_pruned(made, folder, tokenizer=source.tokenizer),
        lambda: show(made.record),
        made.record.plain(),
        args.json,
    )
    return ExitCode.OK


def rows_of(args, source, own, rows: int):
    """What heads are scored and models compared on: sequences of the synthetic task that a run learned, the texts of a classification;
    None for a text. Raises: InputError.
    """
    from thalweg.data.synthetic import SyntheticTask
    from thalweg.surgery.text import recalled

    task = compared(args, own)
    if task is not own or not isinstance(task, SyntheticTask):
        return classified(args, source, task, rows)
    if args.length is not None:
        raise InputError(
            f"{source.name} learned {task.name}, whose sequences have their own length; leave --length out"
        )
    return recalled(task, rows=rows)


def show(record) -> None:
    """The scores, the lowest first, and what pruning did."""
    if record.scores:
        gone = {(layer, head) for layer, heads in record.heads.items() for head in heads}
        rows = [
            {
                "layer": score.layer,
                "heads": ",".join(map(str, score.heads)),
                "score": f"{score.score:.4g}",
                "gone": "gone" if (str(score.layer), score.heads[0]) in gone else "",
            }
            for score in sorted(record.scores, key=lambda score: score.score)
        ]
        table(rows, {"layer": "layer", "heads": "heads", "score": record.by or "", "gone": ""})
    print(*record.lines(), sep="\n", flush=True)


def check_choice(args, heads: dict[int, list[int]] | None) -> None:
    """Raises: InputError, UnknownNameError unless the heads are named, or a score and how many."""
    from thalweg.errors import UnknownNameError
    from thalweg.surgery.scoring import SCORES

    if heads is not None and args.by is not None:
        raise InputError("--heads names the heads and --by chooses them; give one of them")
    if heads is None and args.by is None:
        raise InputError("say which heads go: --heads WHICH, or --by SCORE with --count N")
    if (args.by is None) != (args.count is None):
        raise InputError("--by and --count go together: the N heads of the lowest score")
    if args.by is not None and args.by not in SCORES:
        raise UnknownNameError("score", args.by, SCORES)


def parse_heads(text: str) -> dict[int, list[int]]:
    """``0:3,1;4:2`` -> {0: [3, 1], 4: [2]}. Raises: InputError."""
    found: dict[int, list[int]] = {}
    for part in text.split(";"):
        layer, _, given = part.strip().partition(":")
        entries = [entry.strip() for entry in given.split(",")]
        if not layer.strip().isdecimal() or not all(entry.isdecimal() for entry in entries):
            raise InputError(f'heads are written LAYER:HEAD,HEAD;LAYER:HEAD, as in "0:3,1;4:2", got {text!r}')
        if int(layer) in found:
            raise InputError(f"{text!r} names layer {int(layer)} twice")
        found[int(layer)] = numbers = [int(entry) for entry in entries]
        twice = next((head for head in numbers if numbers.count(head) > 1), None)
        if twice is not None:
            raise InputError(f"{text!r} names head {twice} of layer {int(layer)} twice")
    return found
