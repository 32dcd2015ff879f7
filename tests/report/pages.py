"""Synthetic records, and what the tests of reports look for in a page."""

import math
import tomllib
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from importlib import resources

from thalweg.records.measurements import Measurement, Measurements
from thalweg.studies.plan import parse
from thalweg.studies.store import RunRecord

NULLS = {"unigram_entropy": 6.0, "uniform": 7.6, "xz_bits_per_byte": 2.4, "xz_nats_per_token": 5.7}
COST = {
    "parameters": 90_800,
    "connection_parameters": 260,
    "flops_per_token": 6.1e5,
    "tokens": 20_480,
    "tokens_per_second": 7439.4,
    "peak_memory": 441e6,
}
INLINE = {"b", "code", "span"}
VOID = {"meta", "link", "br", "hr", "img", "input"}


def template(**scales):
    """The plan that ``thalweg study new`` writes, with other kinds of scales if given."""
    text = (resources.files("thalweg.studies") / "template.toml").read_text(encoding="utf-8")
    table = tomllib.loads(text)
    for name, fields in scales.items():
        table["scale"][name] |= fields
    return parse(table)


def rows(measures, layers, *, value=0.5, steps=(0, 100), null=0.9):
    """Rows by depth of each of ``measures``, as a run leaves them."""
    return [
        Measurement(
            name,
            value + 0.01 * layer + 0.1 * place + 0.05 * (step == steps[-1]),
            layer=layer,
            step=step,
            n=16,
            site=f"layers.{layer}.attention",
            branch="attention",
            split="valid",
            interval="mean +- sd over sequences of 64 tokens",
            null=null,
            null_kind="" if null is None else "Gaussian [64 x 32]",
        )
        for place, name in enumerate(measures)
        for layer in range(layers)
        for step in steps
    ]


def record(loss=4.0, *, seed=0, status="done", measures=(), notes=(), metrics=None, result=None, config=None, points=3):
    """One finished run."""
    curve = [
        (100 * i // (points - 1), loss + 3 * math.exp(-5 * i / (points - 1)) - 3 * math.exp(-5)) for i in range(points)
    ]
    series = {"val/loss": curve, "val/bits_per_byte": [(100, loss / 2)], "train/loss": curve, "gradient/norm": curve}
    return RunRecord(
        f"{seed:x}" * 64,
        {"depth": 2, "width": 32, "data": "austen", "sequence_length": 64, "lr": 4e-3, **(config or {})},
        seed,
        status,
        {
            "nulls": NULLS,
            "cost": COST,
            "step": 100,
            "data": {"name": "austen", "fingerprint": "ab" * 32},
            **(result or {}),
        },
        {**series, **(metrics or {})},
        Measurements(measures),
        {"val/loss": "nats/token", "train/loss": "nats/token"},
        {
            "platform": "Linux",
            "cpu": "a processor",
            "threads": 1,
            "device": "cpu",
            "git": None,
            "versions": {"torch": "2"},
        },
        {"torch": "2"},
        tuple(notes),
    )


class Page(HTMLParser):
    """A page as a browser reads it: elements in order, text, and whether every tag is closed in its place."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.text, self.elements, self.headings, self.words = text, [], [], []
        self.open: list[str] = []
        self.ids: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.words.append("" if tag in INLINE else " ")
        self.elements.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        self.words.append("" if tag in INLINE else " ")
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        self.words.append(data)
        if self.open and self.open[-1] in ("h1", "h2"):
            self.headings.append(data)

    @property
    def tags(self):
        return {tag for tag, _ in self.elements}

    @property
    def said(self):
        return " ".join("".join(self.words).split())

    def pictures(self):
        """Every SVG, as XML."""
        found = [part.partition("</svg>")[0] for part in self.text.split("<svg")[1:]]
        return [ElementTree.fromstring(f"<svg{part}</svg>") for part in found]

    def figures(self):
        """(title, number of SVGs, number of tables) of each figure."""
        parts = [part.partition("</figure>")[0] for part in self.text.split("<figure>")[1:]]
        return [(p.split("<h3>")[1].split("</h3>")[0], p.count('role="img"'), p.count("<table")) for p in parts]


def read(path):
    """The page at ``path``, with everything that holds for every page checked."""
    page = Page(path.read_text(encoding="utf-8"))
    assert page.tags.isdisjoint(
        {"script", "img", "iframe", "object", "embed", "link", "form", "a", "image", "use", "foreignobject"}
    )
    assert len(page.ids) == len(set(page.ids))
    for tag, attrs in page.elements:
        assert not any(
            name.startswith("on") or name in ("href", "src", "srcset", "action", "xlink:href", "style")
            for name in attrs
        ), tag
    styles = [part.partition("</style>")[0] for part in page.text.split("<style>")[1:]]
    assert len(styles) == 1
    assert "url(" not in styles[0]
    assert "@import" not in styles[0]
    assert "default-src 'none'" in next(a["content"] for t, a in page.elements if t == "meta" and "http-equiv" in a)
    assert all(pictures == 1 and tables == 1 for _, pictures, tables in page.figures())
    page.pictures()
    return page


def figure_of(page, title):
    """The markup of the figure called ``title``."""
    return next(p.partition("</figure>")[0] for p in page.text.split("<figure>")[1:] if f"<h3>{title}</h3>" in p)
