"""``thalweg edit``: one edit of a model, evaluated beside its matched no-op, or used to go on from a prompt."""

from typing import Any

from thalweg.cli import edit_flags
from thalweg.cli.console import emit, say, table
from thalweg.cli.edit_spec import DOING
from thalweg.errors import ExitCode, InputError

ADDED = 40  # tokens that are added to a prompt
AUDITED = 512  # tokens, at most, that an audit reads

EXAMPLES = """examples:
  thalweg edit smollm2 --site value --parallel 0.5 --limit 8
  thalweg edit smollm2 --site block --layers last --parallel 0 --perpendicular 0     # what the last layer is worth
  thalweg edit smollm2 --site value --parallel 0 --generate "The river"

The update of a site is split along its reference (values: the token's own value; attention, mlp, block: the stream before the addition)
and the two parts are scaled: 1 keeps, 0 removes. The baseline is the same edit at scales of 1 through the same hooks. Before any number
the capture is proved by replay. Controls: diagonal (attention without its diagonal), random and random_normal (a parallel scale drawn for
every layer), random_direction (a change of the same size in a random direction). --coefficient puts the mean of the layer, or another
token's, in the place of every token's own coefficient, measured on the shipped training text.

Exit codes: 0 done; 2 cannot be opened, edited or scored; 5 a proof failed, or the no-op is none"""


def configure(parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder, GGUF file, name on a hub, model at hand, or a run")
    parser.add_argument("--site", default="value", help="value, attention, mlp or block (value)")
    parser.add_argument("--parallel", type=float, metavar="S", help="scale of the part along (1)")
    parser.add_argument("--perpendicular", type=float, metavar="S", help="scale of the part across (1)")
    parser.add_argument("--control", help="diagonal, random, random_normal or random_direction, in place of the edit")
    parser.add_argument("--coefficient", help="layer_mean or other_token, in place of each token's own")
    edit_flags.add_edit(parser)
    edit_flags.add_subject(parser)
    what = parser.add_argument_group("what is done with it")
    what.add_argument("--audit", action="store_true", help="how strong the edit is in every layer, on one window")
    what.add_argument("--generate", metavar="PROMPT", help="go on from a prompt, edited and not, in place of scoring")
    what.add_argument("--tokens", type=int, metavar="N", help=f"tokens to add to a prompt ({ADDED})")


def run(args) -> ExitCode:
    check_what(args)
    options = options_of(args)  # a slip is told before a model is loaded
    documents = edit_flags.documents_for(args) if args.generate is None else None
    opened = edit_flags.opened_of(args)
    edit_flags.placed(opened, options)
    calibration = _calibration(opened, options)
    if documents is None:
        found = generated(args, opened, options, calibration)
        emit(found) if args.json else _print_texts(found)
        return ExitCode.OK
    found = evaluated(args, opened, options, calibration, documents)
    if not args.json:
        _print(found)
    try:
        if args.audit:
            found["audit"] = audited(args, opened, options, calibration, documents[0].text)
            if not args.json:
                _print_audit(found["audit"])
    finally:  # what was evaluated is told whatever becomes of the audit
        if args.json:
            emit(found)
    if overflow := edit_flags.overflow_line(found["differences"]):
        raise InputError(overflow)
    return ExitCode.OK


def check_what(args) -> None:
    """Raises: InputError for flags that do not go together: a prompt is gone on from, a text is scored."""
    if args.tokens is not None and args.tokens < 1:
        raise InputError(f"tokens must be at least 1, got {args.tokens}")
    if args.generate is None:
        if args.tokens is not None:
            raise InputError("--tokens is how many are added to a prompt; leave it out, or give --generate PROMPT")
        return
    flags = (("--text", args.text), ("--limit", args.limit), ("--window", args.window), ("--audit", args.audit or None))
    given = [flag for flag, value in flags if value is not None]
    if given:
        raise InputError(f"--generate goes on from a prompt and scores no text; leave out {', '.join(given)}")


def options_of(args):
    """The edit that the flags say. Raises: InputError, UnknownNameError."""
    from thalweg.editing import EditOptions

    values = edit_flags.common_options(args)
    for name in ("control", "coefficient"):
        if getattr(args, name) is not None:
            values[name] = getattr(args, name)
    site = edit_flags.sites_of(args.site)
    if len(site) != 1:
        raise InputError(f"an edit has one site, got {args.site!r}; give one, or use thalweg sweep for several")
    for name in ("parallel", "perpendicular"):
        if getattr(args, name) is not None:
            values[name] = getattr(args, name)
    made = EditOptions(site=site[0], seed=args.seed, **values)
    if values.keys().isdisjoint(DOING):
        raise InputError(
            f"nothing says what is done to {made.site}; give --parallel, --perpendicular, --control or --coefficient"
        )
    return made


def evaluated(args, opened, options, calibration, documents) -> dict[str, Any]:
    """Score the model unedited, at the no-op and edited."""
    from thalweg.cli.eval_words import Steps, cost_line
    from thalweg.editing import Point, edit, sweep
    from thalweg.evaluation.jobs import cost_of

    job = edit_flags.job_of(args, opened, documents)
    proof = edit_flags.proved(opened, documents[0].text)

    def tell(text: str) -> None:
        say(text, quiet=args.quiet)

    tell(edit_flags.proof_line(proof))
    tell(job.plan)
    edits = int(not options.is_identity)
    tell(cost_line(cost_of(opened.model, [job], 2 + edits), 1, edits))
    steps = Steps(tell)

    def evaluate(role):
        return next(iter(job.run(role, lambda row: None, steps.of(role)).values()))

    with edit(opened.model, options, calibration=calibration) as facts:
        for line in facts.lines():
            tell(line)
    done = sweep(opened.model, evaluate, [Point("edit", 0.0, options)], calibration=calibration, seed=args.seed)
    result = done.results[0]
    return {
        "model": opened.name,
        "notes": list(opened.notes),
        "proof": proof,
        **facts.plain(),
        "text": job.plan,
        "rule": result.scores.rule,
        "n": len(result.scores.items),
        "drift": result.drift,
        "unedited": done.unedited.values(),
        "differences": [one.plain() for one in result.differences],
        "facts": result.scores.facts,
        "items": job.name,
    }


def audited(args, opened, options, calibration, text: str) -> list[dict[str, Any]]:
    """How strong the edit is in every layer, on the beginning of a text: at most a window of it."""
    from thalweg.editing import audit

    batch = edit_flags.first_batch(opened, text, min(AUDITED, args.window or AUDITED))
    rows = audit(opened.model, batch, options, calibration=calibration)
    return [{k: v for k, v in row.to_row().items() if v not in (None, "")} for row in rows]


def generated(args, opened, options, calibration) -> dict[str, Any]:
    """Go on from a prompt, greedily, without and with the edit."""
    from thalweg.capture.limits import check_room
    from thalweg.editing import edit

    if opened.kind != "decoder":
        raise InputError(f"{opened.name} is an encoder, and does not go on from a prompt; leave --generate out")
    batch = edit_flags.first_batch(opened, args.generate, None, least=1, what="the prompt")
    tokens = args.tokens or ADDED
    check_room(opened.model, batch["input_ids"].shape[1], tokens)
    texts = {"unedited": _continued(opened, batch, tokens)}
    with edit(opened.model, options, calibration=calibration) as facts:
        texts["edited"] = _continued(opened, batch, tokens)
    for line in facts.lines():
        say(line, quiet=args.quiet)
    return {"model": opened.name, **facts.plain(), "prompt": args.generate, **texts}


def _continued(opened, batch: dict[str, Any], tokens: int) -> str:
    """Greedy, with a cache, until so many tokens or the end of the text."""
    import torch

    from thalweg.models import Decoder, DecoderCache

    ids = batch["input_ids"]
    if not isinstance(opened.model, Decoder):
        end = getattr(opened.tokenizer, "eos_token_id", None)
        with torch.no_grad():
            done = opened.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=_greedy(opened.model, tokens, end),
            )
        return opened.tokenizer.decode(done[0, ids.shape[1] :])
    cache, given, added = DecoderCache(), ids, []
    with torch.no_grad():
        for _ in range(tokens):
            choice = opened.model(given, cache=cache, logits_to_keep=1).logits[0, -1].argmax()
            added.append(int(choice))
            given = choice.reshape(1, 1)
    return opened.tokenizer.decode(added)


def _greedy(model, tokens: int, end: Any):
    from transformers import GenerationConfig

    pad = getattr(model.config, "pad_token_id", None)
    pad = pad if pad is not None else end if isinstance(end, int) else 0
    return GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=end, pad_token_id=pad)


def _calibration(opened, options) -> Any:
    from thalweg.cli.eval_command import calibration

    return calibration(opened) if options.coefficient else None


def _print(found: dict[str, Any]) -> None:
    from thalweg.cli.eval_words import ITEMS
    from thalweg.reports.symlog import between
    from thalweg.reports.text import number

    columns = ("metric", "no-op", "edited", "difference", "95 % interval", "sign-flip p", "n")
    rows: list[dict[str, Any]] = [
        dict(
            zip(
                columns,
                (
                    f"{one['metric']}{f' [{unit}]' if (unit := one['unit']) else ''}",
                    number(one["baseline"]),
                    number(one["edited"]),
                    number(one["difference"]),
                    between(one["low"], one["high"]),
                    edit_flags.p_value(one["sign_flip_p"], one["n"]),
                    one["n"],
                ),
                strict=True,
            )
        )
        for one in found["differences"]
    ]
    table(rows, {name: name for name in columns})
    few = edit_flags.few_line(found["n"], ITEMS.get(found["items"], "item"))
    drift = (
        ""
        if found["drift"] is None
        else f"no-op: {number(found['drift'])} of the log likelihood off the unedited model"
    )
    for line in filter(None, (edit_flags.order_line(found["facts"]), few, drift)):
        print(line, flush=True)


def _print_audit(rows: list[dict[str, Any]]) -> None:
    from thalweg.reports.text import number

    table(
        [{**row, "value": number(row["value"])} for row in rows if "head" not in row],
        {"site": "site", "measure": "measure", "value": "mean over tokens", "n": "n"},
    )


def _print_texts(found: dict[str, Any]) -> None:
    for name in ("unedited", "edited"):
        print(f"{name}: {found['prompt']}{found[name]}")
