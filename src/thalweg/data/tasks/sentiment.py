"""Is a snippet of a film review positive? Human ratings, shipped with the package; and SST-2, from the hub or from files."""

import hashlib
import lzma
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path

from thalweg import config
from thalweg.data.classification import ClassificationTask, Labelled, check_texts
from thalweg.data.tasks import Request, register
from thalweg.data.text.bpe import train_bpe
from thalweg.data.text.hub import DatasetSource
from thalweg.data.text.source import TextSource
from thalweg.data.text.task import choose_tokenizer
from thalweg.errors import InputError

CLASSES = ("negative", "positive")
FILE, TSV_SHA256 = "film-snippets.tsv.xz", "c8293b0d942e90e223ea2c0955d969040d1a1be514a978b9af0698940bd13350"
BLOCK = 100  # snippets with neighbouring numbers stay together: what little films and reviews repeat, they repeat there
HELD_OUT = {8: "valid", 9: "test"}  # last digit of the number of a block -> its split
OVERLAP = 0.5  # held-out snippets that share so many of their words with one of an earlier split are left out
CLEAN = 1.0  # size of a mean rating that people agree on
VOCAB_SIZE = 2048  # half of the entries of such a BPE occur over 50 times in the train split
_WORD = re.compile(r"[a-z0-9]+")
# Numbers of those that OVERLAP leaves out; a test finds them anew.
NEAR_DUPLICATES = frozenset({939, 999, 1878, 2990, 3862, 3888, 3965, 4842, 4881, 5819, 7945, 8941, 9922})


@dataclass(frozen=True)
class Snippet:
    """number: in the source; rating: mean of the human ratings, -4 (very negative) to 4."""

    number: int
    rating: float
    text: str


@dataclass(frozen=True)
class SentimentOptions:
    """clean: only snippets whose mean rating is 1 or more in size."""

    clean: bool = False


@cache
def snippets() -> tuple[Snippet, ...]:
    """All 10,605 of them. Raises: InputError where the installed file is damaged."""
    try:
        raw = lzma.decompress((resources.files("thalweg.data") / "corpus" / FILE).read_bytes())
    except (OSError, lzma.LZMAError) as error:
        raise InputError(f"the shipped film snippets cannot be read ({error}); install thalweg anew") from error
    if hashlib.sha256(raw).hexdigest() != TSV_SHA256:
        raise InputError("the shipped film snippets were changed; install thalweg anew")
    rows = (line.split("\t") for line in raw.decode().splitlines())
    return tuple(Snippet(int(number), float(rating), text) for number, rating, text in rows)


def split_of(number: int) -> str:
    """The split of a snippet, by its number alone."""
    return HELD_OUT.get((number - 1) // BLOCK % 10, "train")


def find_near_duplicates(all_of: Sequence[Snippet]) -> set[int]:
    """Numbers of held-out snippets with a twin in an earlier split: words in common over words in either, at least ``OVERLAP``."""
    words = {s.number: frozenset(_WORD.findall(s.text.lower())) for s in all_of}
    often = Counter(word for own in words.values() for word in own)
    # Two sets with that much in common share a word among the rarest half of each (prefix filter: Chaudhuri et al. 2006).
    rare = {n: sorted(own, key=lambda w: (often[w], w))[: len(own) // 2 + 1] for n, own in words.items()}
    holding: dict[str, list[int]] = {}
    found: set[int] = set()
    for split in ("train", *HELD_OUT.values()):
        mine = [s.number for s in all_of if split_of(s.number) == split]
        for number in mine if split != "train" else ():
            near = {other for word in rare[number] for other in holding.get(word, ())}
            if any(len(words[number] & words[o]) >= OVERLAP * len(words[number] | words[o]) for o in near):
                found.add(number)
        for number in mine:
            for word in rare[number]:
                holding.setdefault(word, []).append(number)
    return found


def _labelled(chosen: Sequence[Snippet]) -> Labelled:
    return Labelled([s.text for s in chosen], [int(s.rating > 0) for s in chosen])


@register(
    "sentiment",
    summary="is a snippet of a film review positive? 10,605 with human ratings, shipped; a classification",
    source="Hutto and Gilbert 2014 (ICWSM), vaderSentiment, MIT; option clean=true: ratings of 1 and more in size",
)
def sentiment(rest: str, request: Request) -> ClassificationTask:
    """Positive is a mean rating above 0, negative one below; ratings of exactly 0 (37) are neither and left out."""
    values = config.parse_assignments(
        [part for part in rest.split(",") if part.strip()], where="an option of sentiment"
    )
    options = config.build(SentimentOptions, values, where="sentiment")
    _refuse_limits(request)
    # Nothing about a task changes, so one that hangs on the shipped texts alone is made once; files of tokenizers may change.
    return (_task if request.tokenizer in (None, "bpe", "byte") else _task.__wrapped__)(options, request)


@lru_cache(maxsize=2)
def _task(options: SentimentOptions, request: Request) -> ClassificationTask:
    rated = [s for s in snippets() if s.rating != 0 and (not options.clean or abs(s.rating) >= CLEAN)]
    kept = [s for s in rated if s.number not in NEAR_DUPLICATES]
    splits = {
        split: _labelled([s for s in kept if split_of(s.number) == split]) for split in ("train", *HELD_OUT.values())
    }
    notes = [
        f"{len(snippets()) - len(rated)} of {len(snippets())} snippets are left out for a mean rating of "
        + (f"less than {CLEAN:g} in size" if options.clean else "0"),
        f"{len(rated) - len(kept)} held-out snippets are left out for a twin in an earlier split",
    ]
    rule = (
        f"by blocks of {BLOCK} snippets in the order of the source: of ten blocks eight to train, one valid, one test"
    )
    return labelled_task(request, splits, CLASSES, rule, notes)


@dataclass(frozen=True)
class Sst2Options:
    """revision: branch, tag or commit."""

    revision: str | None = None


@register(
    "sst2",
    summary="SST-2 of GLUE: phrases of film reviews with a class each, from the hub, or from files of that form",
    source="Socher et al. 2013; sst2, or sst2:FOLDER with train and dev files, columns sentence and label",
)
def sst2(rest: str, request: Request) -> ClassificationTask:
    """Trained on the phrases of the train split, validated on the 872 sentences of the dev split; the test split has no labels."""
    path, _, more = rest.partition(",")
    if "=" in path:
        path, more = "", rest
    values = config.parse_assignments([part for part in more.split(",") if part.strip()], where="an option of sst2")
    options = config.build(Sst2Options, values, where="sst2")
    _refuse_limits(request)
    where: str | Path = config.checked_path(path.strip(), expand=True) if path.strip() else "stanfordnlp/sst2"
    source = DatasetSource(
        request.spec, where, revision=options.revision, instead="'sentiment', or sst2:FOLDER with its files"
    )
    splits: dict[str, Labelled] = {}
    for split, rows in source.held_out_rows(("sentence", "label")).items():
        splits[split] = Labelled([row["sentence"] for row in rows], [row["label"] for row in rows])
    return labelled_task(request, splits, CLASSES, "the dataset's own train and validation splits", source.notes)


def labelled_task(
    request: Request, splits: dict[str, Labelled], class_names: Sequence[str], rule: str, notes: Sequence[str]
) -> ClassificationTask:
    """The task of labelled texts, with the tokenizer that ``request`` asks for; a BPE is trained on the train split only."""
    check_texts(request.spec, splits, class_names)  # before a tokenizer reads them
    if request.tokenizer in (None, "bpe"):
        tokenizer = train_bpe(splits["train"].texts, request.vocab_size or VOCAB_SIZE)
    else:
        source = TextSource(request.spec, request.spec, rule, {"train": list(splits["train"].texts)})
        tokenizer = choose_tokenizer(request).make(source)
    return ClassificationTask(request.spec, splits, class_names, tokenizer, rule, notes)


def _refuse_limits(request: Request) -> None:
    for name in ("max_bytes", "max_tokens"):
        if getattr(request, name) is not None:
            raise InputError(f"{request.spec} is always read whole and takes no {name}; leave it out")
