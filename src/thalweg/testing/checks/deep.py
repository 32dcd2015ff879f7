"""Does it stand 200 layers?"""

import torch

from thalweg.testing.compare import finite, gradients, parameters_of, require, rows
from thalweg.testing.subjects import Subject, embedding_for, sublayers_for, walk

DEEP = 200


def depth(subject: Subject) -> None:
    """From the declared start, 200 layers (400 sites) in float32 keep activations and gradients finite.

    With options other than the defaults it is 50 layers.
    """
    layers = DEEP // 4 if subject.options else DEEP
    stream = subject.start(depth=layers, dtype=torch.float32)
    sublayers = sublayers_for(stream, asked=True).float()
    embedding = embedding_for(stream, batch=1, length=3, dtype=torch.float32).requires_grad_()
    visits = walk(stream, embedding, sublayers)
    output = stream.leave(visits[-1].after)
    for index, visit in enumerate(visits):
        require(finite(visit.x), f"the input of sublayer {index} of {len(visits)} is not finite")
    require(finite(output), "the output is not finite")
    found = gradients(output, embedding, parameters_of(stream, sublayers))
    broken = [name for name, value in found.items() if not finite(value)]
    require(not broken, f"gradients are not finite after {layers} layers: {rows(broken)}")
