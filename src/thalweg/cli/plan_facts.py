"""What ``thalweg show plan`` prints: hypotheses, rule, arms and scales of a plan of any kind."""

from dataclasses import fields, is_dataclass
from typing import Any

from thalweg import config

TABLES = {"subject": "subjects", "arms": "arms", "experiments": "experiments"}


def plan(name: str) -> tuple[dict, dict]:
    """A plan with its hash: all of it as plain values, and as it is read."""
    from thalweg.studies import library
    from thalweg.studies.plan import load

    path = library.find(name)
    found = load(path)
    head = {"path": str(path), "hash": found.hash()}
    return {**head, **config.to_plain(found)}, _text(found, head)


def _text(plan: Any, head: dict[str, str]) -> dict[str, Any]:
    from thalweg.reports.study import correction_of
    from thalweg.reports.text import words
    from thalweg.studies.plan import Plan

    about = _trained(plan) if isinstance(plan, Plan) else _given(plan)
    return {
        "plan": f"{plan.name}: {plan.title}",
        "question": plan.question,
        "source": plan.source,
        "hypotheses": [_hypothesis(h) for h in plan.hypotheses],
        "rule": f"{correction_of(plan, sum(h.primary for h in plan.hypotheses))}.\n"
        "Supported: the whole interval of the contrast lies beyond the minimum effect, at a confirmatory scale; "
        "refuted: all of it lies short of it; else inconclusive.",
        **about,
        "scales": [
            {
                "scale": name,
                "kind": scale.kind,
                **({"seeds": words(scale.seeds)} if hasattr(scale, "seeds") else {}),
                **_own(scale),
                "values": words(_said(scale, "kind", "seeds", "about", "arms", "learning_rates")),
                "about": scale.about,
            }
            for name, scale in plan.scale.items()
        ],
        "our choices": list(plan.choices),
        "deviations": list(plan.deviations),
        **head,
    }


def _hypothesis(h: Any) -> dict[str, str]:
    from thalweg.reports.study import bound, contrast_of

    return {
        "id": h.id if h.primary else f"{h.id} (secondary)",
        "measure": f"{h.measure}{f' ({h.at})' if hasattr(h, 'at') else ''}{f' [{h.unit}]' if h.unit else ''}",
        "contrast": contrast_of(h.contrast),
        "minimum effect": bound(h.direction, h.margin),
        "expected, sd": f"{h.expected:g}, {h.sd:g}",
        "if diverged": str(h.diverged),
        "statement": h.statement,
    }


def _own(scale: Any) -> dict[str, str]:
    """What only scales with arms have."""
    from thalweg.reports.text import words

    found = {}
    if hasattr(scale, "arms"):
        found["arms"] = words(scale.arms) or "all"
    if hasattr(scale, "learning_rates"):
        found["learning rates"] = words(scale.learning_rates) or "as given"
    return found


def _trained(plan: Any) -> dict[str, Any]:
    from thalweg.reports.tables import arm_table
    from thalweg.reports.text import words

    arms = arm_table(plan)
    return {
        "arms": [dict(zip(arms.columns, row, strict=True)) for row in arms.rows],
        "notes on arms": [f"{name}: {arm.note}" for name, arm in plan.arms.items() if arm.note],
        "training values of all arms": words(plan.train),
    }


def _given(plan: Any) -> dict[str, Any]:
    """Arms of a plan that trains none: edits or compressions of subjects, or experiments."""
    from thalweg.reports.text import words

    tables = {head: getattr(plan, name) for name, head in TABLES.items() if hasattr(plan, name)}
    found: dict[str, Any] = {
        head: {name: words(_said(entry)) for name, entry in table.items()} for head, table in tables.items()
    }
    if hasattr(plan, "text"):
        found["text"] = {name: words(value) for name, value in _said(plan.text).items()}
    return found


def _said(thing: Any, *but: str) -> dict[str, Any]:
    """The fields that hold something."""
    if not is_dataclass(thing):
        return dict(thing)
    plain = {f.name: config.to_plain(getattr(thing, f.name)) for f in fields(thing) if f.name not in but}
    return {name: value for name, value in plain.items() if value not in ("", None, [], (), {})}
