"""Does it start as declared, and does everything learn from there?"""

import torch

from thalweg.testing.compare import DoesNotApplyError, require, rows
from thalweg.testing.mixers.subjects import MixerSubject, differentiate, logits_for, require_logits, start_of
from thalweg.testing.subjects import scramble, seeded

IDENTITY = 0.05
DEAD = 1e-8  # a derivative below this moves nothing in float32


def start(subject: MixerSubject) -> str:
    """``start`` gives the same finite logits each time; their matrix is the identity to within 0.05 exactly where that is claimed."""
    mixer = subject.start()
    logits = mixer.start()
    require(
        tuple(logits.shape) == (mixer.generators,),
        f"start gives shape {list(logits.shape)}, not [generators] = [{mixer.generators}]",
    )
    require(logits.is_floating_point() and bool(logits.isfinite().all()), "the logits of start are not finite numbers")
    require(not logits.requires_grad, "the logits of start require a gradient; they are values to copy")
    kept = logits.clone()
    logits.add_(1.0)
    mixer(logits_for(mixer, dtype=torch.float32))
    require(
        torch.equal(mixer.start(), kept), "start gives other logits at the second call, or hands out its own tensor"
    )
    for dtype in (torch.float64, torch.bfloat16):
        require(torch.equal(mixer.to(dtype).start().to(kept), kept), f"start gives other logits in a module of {dtype}")
    mixer = subject.start(torch.float64)
    mix, eye = mixer(start_of(mixer)).detach(), torch.eye(subject.streams, dtype=torch.float64)
    require(bool(mix.isfinite().all()), "the matrix at the start is not finite")
    error = float((mix - eye).abs().max())
    if mixer.claims.identity:
        require(error <= IDENTITY, f"claims to start at the identity, but an entry is off by {error:.2g}")
    elif subject.streams > 1:
        require(
            error > IDENTITY, f"claims.identity is False, but the matrix at the start is the identity to {error:.1e}"
        )
    return f"identity to {error:.1e}"


def moves(subject: MixerSubject) -> str:
    """At the start no logit has a zero derivative; where ``claims.moves`` is False, some really has."""
    mixer = subject.start(torch.float64)
    require_logits(mixer)
    entries = subject.streams**2
    logits = start_of(mixer).repeat(entries, 1).requires_grad_()  # one token for every entry that is differentiated
    mix = mixer(logits)
    require(mix.requires_grad, "the matrix does not depend on the logits")
    each = torch.eye(entries, dtype=mix.dtype).view_as(mix)
    (jacobian,) = torch.autograd.grad(mix, logits, each)  # [n*n generators]
    require(bool(jacobian.isfinite().all()), "a derivative at the start is not finite")
    sizes = jacobian.norm(dim=0)
    pulled = differentiate(mixer, mixer, start_of(mixer)).gradients["logits"]
    dead = [f"{index} ({float(sizes[index]):.0e})" for index in range(len(sizes)) if sizes[index] <= DEAD]
    if mixer.claims.moves:
        require(not dead, f"at the start the matrix does not move with logit {rows(dead)}")
        require(
            pulled is not None and float(pulled.abs().min()) > 0,
            "at the start a logit has no gradient under a random cotangent",
        )
    else:
        require(
            bool(dead),
            f"claims.moves is False, but every logit has a derivative, the smallest {float(sizes.min()):.0e}",
        )
    return f"derivatives {float(sizes.min()):.1e} to {float(sizes.max()):.1e}"


def parameters(subject: MixerSubject) -> None:
    """Parameters of the mixer's own have gradients that are not zero, and ``reset_parameters`` restores their start."""
    mixer = subject.random()
    names = [name for name, _ in mixer.named_parameters()]
    if not names:
        raise DoesNotApplyError("no parameters of its own")
    for place, module in (("the declared start", subject.start(torch.float64)), ("random values", mixer)):
        found = differentiate(module, module, logits_for(module)).gradients
        missing = [name for name in names if found[name] is None]
        require(not missing, f"no gradient at {place}: {rows(missing)}; a parameter that nothing uses must not exist")
        zero = [name for name in names if (value := found[name]) is not None and float(value.abs().max()) <= 1e-12]
        require(not zero, f"the gradient is zero at {place}: {rows(zero)}")
    with seeded(0):
        mixer.reset_parameters()
    want = {name: parameter.detach().clone() for name, parameter in mixer.named_parameters()}
    scramble(mixer, seed=4)
    with seeded(0):
        mixer.reset_parameters()
    for name, parameter in mixer.named_parameters():
        require(torch.equal(parameter.detach(), want[name]), f"reset_parameters does not restore {name}")
