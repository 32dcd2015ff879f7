"""With many streams: does a mixing matrix send each stream where it says, and not the other way round?"""

import torch

from thalweg.testing.compare import DoesNotApplyError, require, require_close
from thalweg.testing.subjects import Subject, embedding_for, random_state


def routing(subject: Subject) -> None:
    """A directed cycle as ``mix[to, from]`` carries stream ``from`` to stream ``to``, when the sublayer writes nothing.

    For connections of more than one stream whose sites say ``mixes``: ``force_mix(mix [to from])`` uses this matrix at every token, None
    the learned one again; ``mixing`` shows the matrix in use.
    """
    stream = subject.random()
    embedding = embedding_for(stream)
    entered = stream.enter(embedding)
    streams = stream.observe(entered).shape[2]
    sites = [(index, site) for index, site in enumerate(stream.sites) if site.mixes]
    if streams < 2 or not sites:
        raise DoesNotApplyError("one stream" if streams < 2 else "no site mixes")
    cycle = torch.eye(streams, dtype=embedding.dtype).roll(1, 0)  # to = from + 1; not its own transpose for n > 2
    state = random_state(entered)
    with torch.no_grad():
        for index, site in sites:
            site.force_mix(cycle)
            try:
                x, context = site.read(state)
                after = site.write(state, torch.zeros_like(x), context)
                seen = site.mixing(state, context)
            finally:
                site.force_mix(None)
            require(seen is not None, f"site {index} says that it mixes, but mixing() gives nothing")
            require_close(f"the mix that site {index} shows", seen.mix, cycle.expand_as(seen.mix))
            want = stream.observe(state).roll(1, 2)
            require_close(f"streams after a forced cycle at site {index}", stream.observe(after), want)
