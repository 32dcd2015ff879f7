"""Makes the table of connections in README.md and the pages of them in docs/connections.md, from facts and measured cost."""

import dataclasses
import functools
import json
import re
from typing import Any, get_type_hints

from generated import ROOT, Part, main, table

from thalweg import connections
from thalweg.config import allowed, default_of, meanings, to_plain
from thalweg.connections import ConnectionOptions, Equivalence, Facts, Requirements, Site
from thalweg.connections.cost import Cost, measure_cost
from thalweg.models import DecoderConfig
from thalweg.models.size import flops, parameters
from thalweg.registry import Entry

WIDTH, DEPTH, LENGTH = 512, 12, 512
FORMS: dict[str, list[dict[str, Any]]] = {  # beside the defaults, where the cost differs much
    "mgt": [{"form": "soft_gate"}, {"form": "delta"}, {"form": "rank1"}],
    "delta": [{"value_channels": 4}],
}
FACTS = {f.name: f.default for f in dataclasses.fields(Facts)}
SHORT = ("loop-written reference in float64, outputs and all gradients", "reference")


def parts() -> list[Part]:
    """Everything that this script makes."""
    return [
        (ROOT / "README.md", "connections", readme_table()),
        (ROOT / "docs" / "connections.md", "connections", "\n\n".join(map(chapter, own_entries()))),
    ]


def own_entries() -> list[Entry]:
    """The connections of this package, the baseline first; those of other distributions are documented there."""
    own = [entry for entry in connections.entries() if entry.value.__module__.startswith("thalweg.connections.")]
    return sorted(own, key=lambda entry: (entry.name != "additive", entry.name))


def readme_table() -> str:
    """One row for each connection, and for the forms whose cost differs."""
    rows = []
    for entry in own_entries():
        for options in ({}, *FORMS.get(entry.name, [])):
            name = (
                f"[`{entry.name}`](docs/connections.md#{entry.name})"
                if not options
                else f"`{entry.name}`, {assigned(options)}"
            )
            source = linked(entry.source) if not options else ""
            checked = "" if options else "; ".join(entry.value.facts.verified).replace(*SHORT)
            rows.append([name, source, *cost_cells(entry.name, options), checked])
    return table(["connection", "source", "extra parameters", "extra FLOPs/token", "checked against"], rows)


def cost_cells(name: str, options: dict[str, Any]) -> tuple[str, str]:
    """Extra parameters and forward FLOPs per token over ``additive``, and as shares of its decoder without embeddings."""
    plain, own = decoder("additive", {}), decoder(name, options)
    base, base_flops = sum(parameters(plain).values()), sum(flops(plain, LENGTH).values())
    extra = (
        sum(parameters(own).values()) - base
    )  # of the whole model: norms that a connection asks for inside sublayers count too
    cost = measured(name, json.dumps(options))
    more_flops = amount(cost.extra_flops_per_token, base_flops)
    return amount(extra, base), f"at least {more_flops}" if cost.uncounted else more_flops


@functools.cache
def measured(name: str, options: str) -> Cost:
    """The cost of a connection with options given as JSON."""
    return measure_cost(name, width=WIDTH, sites=Site.decoder(DEPTH), options=json.loads(options), length=LENGTH)


def decoder(name: str, options: dict[str, Any]) -> DecoderConfig:
    """The decoder that shares refer to; a vocabulary of one leaves the embeddings out."""
    return DecoderConfig(vocab_size=1, width=WIDTH, depth=DEPTH, heads=8, connection=name, connection_options=options)


def amount(value: float, base: float) -> str:
    """``12,619,800 (33.4 %)``; shares below 0.1 % are left out."""
    share = value / base
    return f"{value:,.0f}" + (f" ({share:.1%})".replace("%", " %") if abs(share) >= 0.001 else "")


def chapter(entry: Entry) -> str:
    """All that a connection says of itself."""
    facts: Facts = entry.value.facts
    stream = connections.create(entry.name, width=8, sites=Site.decoder(2))
    lines = [f"## {entry.name}", f"{sentence(entry.summary)}", f"```text\n{facts.equation}\n```", facts.words]
    if entry.aliases:
        lines[1] += f" Also called {', '.join(f'`{alias}`' for alias in entry.aliases)}."
    notes = [
        ("Source", linked(facts.source)),
        ("Constraint", facts.constraint if facts.constraint != FACTS["constraint"] else "none"),
    ]
    if facts.precision != FACTS["precision"]:
        notes.append(("Precision", facts.precision))
    notes.append(("At the start", start(stream.equals_at_start())))
    if wanted := required(entry.name):
        notes.append(("Asks of the sublayers", wanted))
    if stream.looks_along_tokens:
        notes.append(("Along tokens", "a read depends on earlier tokens"))
    notes += [
        ("Chosen by us", "; ".join(facts.chosen)),
        ("Deviations", "; ".join(facts.deviations) or "none known"),
        ("Checked against", "; ".join(facts.verified)),
        ("Cost", costs(entry.name)),
    ]
    lines.append("\n".join(f"- **{what}:** {text}." for what, text in notes if text))
    lines.append(options_of(entry))
    return "\n\n".join(line for line in lines if line)


def start(claim: Equivalence | None) -> str:
    """What the untrained stream equals, with the options that are not that connection's defaults."""
    if claim is None:
        return "no equality with another connection is declared for the default options"
    defaults = connections.option_defaults(claim.name)
    special = {key: value for key, value in claim.options.items() if defaults.get(key) != value}
    return f"equals `{claim.name}`{f' with {assigned(special)}' if special else ''} within {claim.tolerance:g} (float64, relative)"


def required(name: str) -> str:
    """What a connection asks of the sublayers of a network of ``DEPTH`` layers, where it is not the default."""
    stream = connections.create(name, width=8, sites=Site.decoder(DEPTH))
    asked = {
        key: value
        for key, value in vars(stream.requirements(stream.layout[0])).items()
        if value != getattr(Requirements(), key)
    }
    shown = ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}".replace(" True", "")
        for key, value in asked.items()
    )
    return f"{shown.replace('_', ' ')} (at {DEPTH} layers)" if shown else ""


def costs(name: str) -> str:
    """Parameters, FLOPs and kept bytes beyond ``additive``."""
    cost, (extra, more_flops) = measured(name, "{}"), cost_cells(name, {})
    return (
        f"{extra} parameters, {more_flops} FLOPs and {cost.extra_activation_bytes_per_token:,.0f} bytes kept for the backward pass per token "
        f"beyond `additive`"
    )


def options_of(entry: Entry) -> str:
    """The options that are this connection's own, or whose default is."""
    cls = entry.value.Options
    hints, common = get_type_hints(cls), {f.name: f.default for f in dataclasses.fields(ConnectionOptions)}
    own = [f for f in dataclasses.fields(cls) if f.name not in common or common[f.name] != f.default]
    if not own:
        return "No options but the common ones."
    meaning = meanings(cls)
    rows = [
        [f"`{f.name}`", allowed(hints[f.name], "`"), f"`{default_of(f)}`", marked(meaning.get(f.name, ""))] for f in own
    ]
    return table(["option", "values", "default", "meaning"], rows)


def marked(text: str) -> str:
    """The marks of a docstring as those of Markdown."""
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text).replace("``", "`")


def shown(value: Any) -> str:
    return (
        {True: "true", False: "false"}[value]
        if isinstance(value, bool)
        else "None"
        if value is None
        else str(to_plain(value))
    )


def assigned(options: dict[str, Any]) -> str:
    return ", ".join(f"`{key}={shown(value)}`" for key, value in options.items())


def sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def linked(text: str) -> str:
    """arXiv numbers as links."""
    return re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", text)


if __name__ == "__main__":
    main(parts())
