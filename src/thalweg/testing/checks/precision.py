"""Do the float32 islands hold under mixed precision, and is bfloat16 close enough?"""

import warnings

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from thalweg.connections.base import State, tensors_of
from thalweg.testing.compare import differentiate, finite, require, require_close
from thalweg.testing.subjects import Subject, embedding_for, sublayers_for

BFLOAT16_ERROR = 0.05  # relative, Frobenius, over two layers; one rounding is 0.4 %


def bfloat16(subject: Subject) -> None:
    """Parameters and stream in bfloat16: finite outputs and gradients, outputs within 5 % of float64 at the same values."""
    low, high = subject.random(dtype=torch.bfloat16), subject.random()
    with torch.no_grad():
        for rounded, tensor in zip(low.state_dict().values(), high.state_dict().values(), strict=True):
            tensor.copy_(rounded)
    sublayers = sublayers_for(high)
    embedding = embedding_for(high, dtype=torch.bfloat16)
    got = differentiate(low, low, sublayers, embedding)
    want = differentiate(high, high, sublayers, embedding.double())
    require(got.output.dtype == torch.bfloat16, f"a bfloat16 stream leaves in {got.output.dtype}")
    require(finite(got.output), "the output in bfloat16 is not finite")
    broken = [name for name, value in got.gradients.items() if not finite(value)]
    require(not broken, f"gradients in bfloat16 are not finite: {', '.join(broken)}")
    error = float((got.output.double() - want.output).norm() / want.output.norm())
    require(error <= BFLOAT16_ERROR, f"the output in bfloat16 is off by {error:.1%} (allowed {BFLOAT16_ERROR:.0%})")


def autocast(subject: Subject) -> None:
    """Under bfloat16 autocast coefficients stay float32 and as exact as without it, the stream keeps its dtype, and nothing warns."""
    for dtype in (torch.float32, torch.bfloat16):
        stream = subject.random(dtype=torch.float32)
        embedding = embedding_for(stream, dtype=dtype).requires_grad_()
        sublayers = sublayers_for(stream)
        with warnings.catch_warnings(), torch.autocast("cpu", dtype=torch.bfloat16):
            warnings.simplefilter("error")
            state = stream.enter(embedding)
            for index, (site, sublayer) in enumerate(zip(stream.sites, sublayers, strict=True)):
                x, context = site.read(state)
                update = sublayer(x)
                after = site.write(state, update.bfloat16(), context)  # what a linear map returns under autocast
                exact = site.write(state, update, context)
                require(x.dtype == dtype, f"the sublayer input at site {index} is {x.dtype} in a stream of {dtype}")
                _require_wide(f"context at site {index}", context)
                for old, new in zip(tensors_of(state), tensors_of(after), strict=True):
                    require(
                        new.dtype == old.dtype,
                        f"write at site {index} turns the stream from {old.dtype} to {new.dtype}",
                    )
                with torch.autocast("cpu", enabled=False):
                    plain_x, plain_context = site.read(state)
                    plain_after = site.write(state, update, context)
                where = f"at site {index} under autocast against without"
                require_close(f"sublayer input {where}", x, plain_x, 1e-6)
                _require_same(f"context {where}", context, plain_context)
                _require_same(f"written state {where}", exact, plain_after)
                state = after
            output = stream.leave(state)
            require(output.dtype == dtype, f"a stream of {dtype} leaves in {output.dtype} under autocast")
        for name, value in zip(
            ("embedding", *dict(stream.named_parameters())),
            torch.autograd.grad(output.float().square().sum(), [embedding, *stream.parameters()], allow_unused=True),
            strict=True,
        ):
            require(finite(value), f"the gradient of {name} under autocast is not finite")


def _require_wide(what: str, tree: State) -> None:
    for leaf in tensors_of(tree):
        narrow = leaf.is_floating_point() and leaf.dtype not in (torch.float32, torch.float64)
        require(not narrow, f"a tensor of the {what} is {leaf.dtype} under autocast; coefficients stay float32")


def _require_same(what: str, got: State, want: State) -> None:
    tree_map(lambda a, b: require_close(what, a, b, 1e-6) if isinstance(b, Tensor) else None, got, want)
