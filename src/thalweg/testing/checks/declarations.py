"""Is what it says of itself true: shapes, hints, facts, cost?"""

from fnmatch import fnmatchcase

from thalweg.connections.base import Site, tensors_of
from thalweg.connections.cost import measure
from thalweg.errors import InputError
from thalweg.testing.compare import BrokenError, finite, require
from thalweg.testing.subjects import BATCH, DEPTH, LENGTH, WIDTH, Subject, embedding_for, sublayers_for, walk


def shapes(subject: Subject) -> None:
    """``read`` and ``leave`` give [b t d], ``observe`` [b t n d], gates [b t ...]; the state keeps its structure through every site.

    Without tokens, or without batch entries, the stream gives as few, and its gradients are there.
    """
    stream = subject.random()
    embedding, sublayers = embedding_for(stream), sublayers_for(stream)
    visits = walk(stream, embedding, sublayers)
    entered = [leaf.shape for leaf in tensors_of(visits[0].state)]
    require(bool(entered), "the state holds no tensor")
    for index, (site, visit) in enumerate(zip(stream.sites, visits, strict=True)):
        require(
            visit.x.shape == embedding.shape,
            f"read at site {index} gives {list(visit.x.shape)}, not {list(embedding.shape)}",
        )
        kept = [leaf.shape for leaf in tensors_of(visit.after)]
        require(
            kept == entered,
            f"write at site {index} turns a state of {[list(s) for s in entered]} into {[list(s) for s in kept]}",
        )
        for name, gate in site.gates(visit.state, visit.context).items():
            require(
                gate.shape[:2] == (BATCH, LENGTH),
                f"gate {name!r} at site {index} has shape {list(gate.shape)}, not [b t ...]",
            )
            require(finite(gate), f"gate {name!r} at site {index} is not finite")
    for state in (visits[0].state, visits[-1].after):
        seen = stream.observe(state).shape
        fits = len(seen) == 4 and seen[:2] == (BATCH, LENGTH) and seen[3] == WIDTH
        require(fits, f"observe gives {list(seen)}, not [b t n d] = [{BATCH} {LENGTH} n {WIDTH}]")
        require(
            stream.leave(state).shape == embedding.shape, f"leave gives {list(stream.leave(state).shape)}, not [b t d]"
        )
    for none in (embedding[:, :0], embedding[:0]):
        leaf = none.clone().requires_grad_()
        output = stream(leaf, sublayers)
        require(output.shape == none.shape, f"an embedding of {list(none.shape)} comes out as {list(output.shape)}")
        output.sum().backward()


def hints(subject: Subject) -> None:
    """Every pattern of ``group_hints`` matches a parameter."""
    stream = subject.start()
    names = [name for name, _ in stream.named_parameters(remove_duplicate=False)]
    for pattern in stream.group_hints():
        require(
            any(fnmatchcase(name, pattern) for name in names),
            f"group_hints names {pattern!r}, which matches no parameter",
        )


def facts(subject: Subject) -> None:
    """Source, equation and plain words are there."""
    given = getattr(subject.start(), "facts", None)
    require(given is not None, "the class has no facts")
    for field in ("source", "equation", "words"):
        require(bool(str(getattr(given, field, "")).strip()), f"facts.{field} is empty")


def cost(subject: Subject) -> None:
    """Parameters, FLOPs and bytes kept for the backward pass can be measured without running on real numbers."""
    layout = Site.decoder(DEPTH)
    try:
        reading = measure(lambda sites: subject.build(WIDTH, sites), layout, width=WIDTH, length=LENGTH)
    except InputError as error:
        raise BrokenError(str(error)) from error
    held = sum(parameter.numel() for parameter in subject.start().parameters())
    require(
        reading.parameters == held,
        f"measured {reading.parameters} parameters, the stream of {DEPTH} layers holds {held}",
    )
    require(reading.flops_per_token >= 0 and reading.bytes_per_token >= 0, f"a cost is negative: {reading}")
