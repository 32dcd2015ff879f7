"""What ``thalweg edit`` and ``thalweg sweep`` share: flags of an edit, the text that is scored, the proof before the first number."""

import math
from pathlib import Path
from typing import Any

from thalweg.errors import InputError

PROOF_TOKENS = 64


def add_edit(parser) -> None:
    """Which layers, heads and passes an edit holds for, and how values are read."""
    group = parser.add_argument_group("where")
    group.add_argument("--layers", metavar="WHICH", help="0,3 or 1: or last or 5:11 (= 5-10, layers 5 to 10) (all)")
    group.add_argument("--skip-first", type=int, default=0, metavar="N", help="leave out the first N layers (0)")
    group.add_argument("--phase", default="all", help="all, prefill or decode (all)")
    values = parser.add_argument_group("of values")
    both = values.add_mutually_exclusive_group()
    both.add_argument("--exclude-self", action="store_true", help="leave alone what a token reads of itself (default)")
    both.add_argument("--full", action="store_true", help="edit all that a token reads, itself included")
    values.add_argument("--group", default="head", help="heads projected together: head, kv, kv:N or all (head)")
    values.add_argument("--heads", metavar="LIST", help="query heads, 0,2 (all)")
    parser.add_argument("--reference", default="stream", help="of attention and mlp: stream or block_input (stream)")


def add_subject(parser) -> None:
    """What is scored and how the model is opened."""
    text = parser.add_argument_group("text and model")
    text.add_argument(
        "--text", metavar="FILE", help="documents: .jsonl with a field text, or a text (the shipped novel)"
    )
    text.add_argument("--limit", type=int, metavar="N", help="only the first N documents")
    text.add_argument(
        "--window",
        "--length",
        dest="window",
        type=int,
        metavar="N",
        help="tokens of a window (what the model takes, at most 2048)",
    )
    text.add_argument("--batch-size", type=int, default=1, metavar="N", help="rows of a pass (1)")
    text.add_argument("--dtype", default="float32", help="of the weights: float32, bfloat16, float64, auto (float32)")
    text.add_argument("--backend", help="of attention: eager or sdpa")
    text.add_argument("--which", choices=("best", "last"), help="checkpoint, of a run (best)")
    text.add_argument("--seed", type=int, default=0, help="of controls, masks and resamples (0)")


def common_options(args) -> dict[str, Any]:
    """The flags of :func:`add_edit` that are not at their default, as fields of an edit. Raises: InputError."""
    found: dict[str, Any] = {}
    for name, default in (
        ("layers", None),
        ("skip_first", 0),
        ("phase", "all"),
        ("group", "head"),
        ("reference", "stream"),
    ):
        if getattr(args, name) != default:
            found[name] = getattr(args, name)
    if args.heads is not None:
        try:
            found["heads"] = tuple(int(head) for head in args.heads.split(","))
        except ValueError:
            raise InputError(f"--heads are whole numbers joined by commas, got {args.heads!r}") from None
    if args.full or args.exclude_self:
        found["exclude_self"] = args.exclude_self
    return found


def sites_of(text: str) -> list[str]:
    """``value,attn,mlp`` -> names of sites. Raises: UnknownNameError."""
    from thalweg.editing.options import site_of

    return [site_of(part) for part in text.split(",") if part.strip()]


def documents_for(args):
    """The documents that are scored, with what no model could take refused before one is opened. Raises: InputError."""
    never_acts(
        getattr(args, "phase", "all"), "an edit of phase decode", "use --generate"
    )  # thalweg eval has edits of its own
    from thalweg.evaluation import documents_of
    from thalweg.evaluation.scoring import check_batch

    check_batch(args.batch_size, "right")
    if args.window is not None and args.window < 2:
        raise InputError(f"a window has at least 2 tokens, one to read and one to predict, got {args.window}")
    return documents_of(args.text).first(args.limit)


def never_acts(phase: str, edit: str, instead: str) -> None:
    """Raises: InputError for an edit of decoding where nothing is decoded: its difference of 0 would look like a harmless edit."""
    if phase == "decode":
        raise InputError(
            f"a text is scored in passes over whole windows, which are prefills, so {edit} would never act; {instead}"
        )


def opened_of(args):
    """The model, with its facts said. Raises: ThalwegError."""
    from thalweg.cli.console import say
    from thalweg.cli.opening import open_any

    if not args.model:
        raise InputError("the model needs a name, got an empty one")
    opened = open_any(args.model, which=args.which, quiet=args.quiet, dtype=args.dtype, backend=args.backend)
    for line in (opened.name, *opened.notes):
        say(line, quiet=args.quiet)
    return opened


def placed(opened, options):
    """What an edit would act on, refused where the model cannot have it, before anything is proved. Raises: ThalwegError."""
    from thalweg.editing import edit

    with edit(opened.model, options.as_noop(), forced=True) as facts:
        return facts


def job_of(args, opened, documents):
    """How the model is scored: perplexity of a decoder, masked loss of an encoder with a head, embeddings of one without."""
    from thalweg.evaluation import jobs

    model, tokenizer = opened.model, opened.require_tokenizer()
    if opened.kind == "decoder":
        return jobs.text_job(model, tokenizer, documents, window=args.window, batch_size=args.batch_size)
    if opened.kind == "masked-lm":
        more = {"window": args.window, "seed": args.seed, "batch_size": args.batch_size}
        return jobs.masked_job(model, tokenizer, documents, **more)
    if args.window is not None:
        raise InputError(
            "an encoder without a head is compared by the embeddings of whole paragraphs; leave --window out"
        )
    return jobs.embedding_job(model, tokenizer, documents, batch_size=args.batch_size, seed=args.seed)


def first_batch(
    opened, text: str, tokens: int | None = PROOF_TOKENS, least: int = 2, what: str = "the text"
) -> dict[str, Any]:
    """The beginning of a text as the arguments of the model: so many tokens at most, nor more than it takes; None: all of the text.

    Raises: InputError for fewer than ``least`` tokens, or tokens that the model does not have.
    """
    import torch

    from thalweg._words import counted
    from thalweg.capture.limits import longest_of, vocabulary_of
    from thalweg.evaluation.subjects import ids_of

    if tokens is not None:
        tokens = min(tokens, longest_of(opened.model) or tokens)
        text = text[: 16 * tokens]
    ids = ids_of(opened.require_tokenizer(), text, vocabulary_of(opened.model), what)[:tokens]
    if len(ids) < least:
        raise InputError(f"{what} has {counted(len(ids), 'token')}, and at least {least} must be there; give more text")
    device = next(opened.model.parameters()).device
    return {"input_ids": torch.tensor([ids], device=device)}


def proved(opened, text: str) -> dict[str, Any]:
    """Replay the stream on the beginning of the text. Raises: ProofError (exit code 5)."""
    from thalweg.capture import locate, prove

    proof = prove(locate(opened.model), first_batch(opened, text))
    return {
        "family": proof.family,
        "found_by": proof.found_by,
        "worst": proof.worst,
        "at": proof.at,
        "tolerance": proof.tolerance,
        "dtype": proof.dtype,
    }


def proof_line(proof: dict[str, Any]) -> str:
    """For people."""
    return (
        f"proof: the stream of {proof['family']} (by {proof['found_by']}) replayed at every site and at the end, worst error "
        f"{proof['worst']:.1e} at {proof['at']} (allowed {proof['tolerance']:.0e})"
    )


def few_line(n: int, noun: str = "document") -> str:
    """What so few paired items cannot say, of p and of their interval, for people; empty for enough."""
    from thalweg.evaluation.scores import few_words

    if n == 1:
        return f"one {noun}: no interval; give more {noun}s"
    least = f"p can be no smaller than {2.0 ** (1 - n):g}"
    if n < 3:
        return f"{n} {noun}s: no interval (it needs 3), and {least}; give more {noun}s"
    return f"{n} {noun}s: {least}; {few_words(n)}" if n < 6 else ""


def overflow_line(differences: list[dict[str, Any]]) -> str:
    """That an edited model gives no numbers where its no-op does, of ``Difference.plain``; empty where it does."""
    lost = [one["metric"] for one in differences if math.isfinite(one["baseline"]) and not math.isfinite(one["edited"])]
    if not lost:
        return ""
    return (
        f"the edited model gives values that are not finite ({', '.join(lost)}), which are no result; "
        "give scales nearer to 1, or another --dtype"
    )


def p_value(p: float, n: int) -> str:
    """For people; a dash for one item, whose sign says nothing."""
    from thalweg.reports.text import NONE, number

    return NONE if n == 1 else number(p)


def order_line(facts: dict[str, Any]) -> str:
    """What became of the order of pairs of texts, where that was evaluated; for people."""
    from thalweg.reports.symlog import between
    from thalweg.reports.text import number

    found = facts.get("pair_similarity_spearman")
    if found is None:
        return ""
    note = found.get("note") or f"95 % interval {between(found['low'], found['high'])}"
    return f"pair_similarity_spearman: {number(found['value'])} ({note})"


def name_of(model: str) -> str:
    """Of a model in a file name."""
    return Path(model).name or "model"
