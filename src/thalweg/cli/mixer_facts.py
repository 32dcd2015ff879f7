"""What ``thalweg show mixer`` prints: what a mixer says of itself, and what is measured of it at a number of streams."""

from typing import Any

from thalweg import config
from thalweg.cli.facts import explained, verified


def mixer(name: str, streams: int, options: dict[str, Any]) -> dict[str, Any]:
    """Facts, claims, options, and measured: the matrix and its derivatives at the start, marginal errors at random logits."""
    from thalweg import mixers

    entry = mixers.registry.entry(name)
    module = mixers.create(name, streams=streams, **options).double()
    facts, claims = module.facts, module.claims
    return {
        "name": entry.name,
        "aliases": list(entry.aliases),
        "summary": entry.summary,
        "source": facts.source,
        "equation": facts.equation,
        "words": facts.words,
        "coverage": facts.coverage,
        "cost": facts.cost,
        "start": facts.start,
        "claims, which the battery tests": said(claims),
        "chosen by us": list(facts.chosen),
        "deviations": list(facts.deviations),
        "verified": verified(facts, "check_mixer"),
        "options": config.to_plain(module.options),
        "options explained": explained(type(module.options), options),
        f"measured at {streams} streams": _measured(module),
        "bibtex": facts.bibtex,
    }


SUMS = {"exact": "one, to rounding", "converging": "one, to an error that depends on the logits", "none": "not claimed"}
REACHES = {
    "birkhoff": "every doubly stochastic matrix",
    "row_stochastic": "every matrix whose rows sum to one",
    "column_stochastic": "every matrix whose columns sum to one",
    "positive": "every matrix with entries in (0, 2)",
    "orthogonal": "orthogonal matrices, see coverage",
    "any": "every matrix",
    "own": "a family of its own, see coverage",
}


def said(claims) -> dict[str, Any]:
    """Claims under words that say what they mean."""
    return {
        "sums of rows": SUMS[claims.rows],
        "sums of columns": SUMS[claims.columns],
        "no entry below zero": claims.nonnegative,
        "no singular value above one": claims.spectral,
        "orthogonal": claims.orthogonal,
        "streams can be renamed by renaming logits": claims.equivariant,
        "begins near the identity": claims.identity,
        "every logit has a derivative at the start": claims.moves,
        "its logits come close to": REACHES[claims.reaches],
    }


def _measured(module) -> dict[str, Any]:
    import torch

    from thalweg.geometry.constraint import constraint_error

    count = module.generators
    found: dict[str, Any] = {
        "logits of one matrix": count,
        "groups with a scale of their own": list(module.scaled),
        "parameters of its own": sum(p.numel() for p in module.parameters()),
    }
    start = module.start().double()
    for row, values in enumerate(module(start).detach()):
        found[f"start, to stream {row}"] = " ".join(f"{value:+.4f}" for value in values)
    if count:
        jacobian = torch.autograd.functional.jacobian(module, start)
        found["largest derivative at the start"] = f"{jacobian.abs().max():.2g}"
        found["smallest of the largest derivatives by a logit"] = f"{jacobian.abs().amax((0, 1)).min():.2g}"
    generator = torch.Generator().manual_seed(0)
    for spread in (1, 3):
        drawn = module(spread * torch.randn(2000, count, generator=generator, dtype=torch.float64)).detach()
        error = constraint_error(drawn)
        found[f"logits of sd {spread}: largest |row sum - 1|, |column sum - 1|, smallest entry"] = (
            f"{error.rows.max():.1e}, {error.columns.max():.1e}, {drawn.min():+.3f}"
        )
    rounded = constraint_error(module.float()(torch.randn(2000, count, generator=generator)).detach())
    module.double()
    found["in float32, logits of sd 1: largest |row sum - 1|, |column sum - 1|"] = (
        f"{rounded.rows.max():.1e}, {rounded.columns.max():.1e}"
    )
    return found
