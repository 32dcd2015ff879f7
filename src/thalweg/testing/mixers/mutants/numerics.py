"""Lost precision, overflow, and what breaks compilers."""

import torch
from torch import Tensor

from thalweg.mixers.base import Mixer
from thalweg.testing.mixers.mutants.catalog import (
    always,
    change_logits,
    change_matrix,
    changes_output,
    has_logits,
    mutant,
)
from thalweg.testing.mutants.patches import narrow


@mutant("reference")
def logits_narrowed(mixer: Mixer) -> Mixer:
    """The logits are rounded to bfloat16."""
    return change_logits(mixer, lambda logits: narrow(logits).to(logits.dtype))


@mutant("reference")
def matrix_rounded(mixer: Mixer) -> Mixer:
    """The matrix is computed in bfloat16 and returned in the dtype of the logits."""
    return change_matrix(mixer, lambda mix: narrow(mix).to(mix.dtype))


@mutant("precision", applies=lambda subject, _: changes_output(subject, matrix_rounded))
def single_rounded(mixer: Mixer) -> Mixer:
    """The matrix is computed in bfloat16 and returned in float32; float64 is spared."""
    return change_matrix(mixer, lambda mix: narrow(mix).to(mix.dtype) if mix.dtype == torch.float32 else mix)


@mutant("precision", applies=always)
def matrix_narrow(mixer: Mixer) -> Mixer:
    """Narrow logits give a narrow matrix."""
    inner = mixer.forward

    def forward(logits: Tensor) -> Tensor:
        mix = inner(logits)
        return mix if logits.dtype in (torch.float32, torch.float64) else mix.to(logits.dtype)

    mixer.forward = forward
    return mixer


@mutant("precision", applies=always)
def narrow_under_autocast(mixer: Mixer) -> Mixer:
    """The matrix is bfloat16 under autocast."""
    return change_matrix(mixer, lambda mix: narrow(mix) if torch.is_autocast_enabled("cpu") else mix)


@mutant("precision", applies=always)
def product_under_autocast(mixer: Mixer) -> Mixer:
    """A matrix product is left to autocast."""
    return change_matrix(mixer, lambda mix: (mix @ (torch.eye(mix.shape[-1]) / 3).to(mix)).to(mix.dtype) * 3)


@mutant("extremes", applies=has_logits)
def overflow(mixer: Mixer) -> Mixer:
    """An exponential overflows."""
    return _beside(mixer, lambda logits: torch.exp(logits.float()))


@mutant("extremes", applies=has_logits)
def gradient_overflow(mixer: Mixer) -> Mixer:
    """An exponential that overflows is masked in the output, but not in the gradient."""
    return _beside(mixer, lambda logits: torch.where(logits > 20, 0.0, torch.exp(logits.float())))


@mutant("compiled", applies=lambda subject, _: has_logits(subject, _) and not subject.options)
def overflow_when_compiled(mixer: Mixer) -> Mixer:
    """An exponential overflows in the compiled form alone."""
    return _beside(mixer, lambda logits: torch.exp(logits.float()) if torch.compiler.is_compiling() else logits)


@mutant("dataless", "compiled", applies=always)
def branch_on_values(mixer: Mixer) -> Mixer:
    """Python looks at a value of the matrix: the graph breaks there."""
    return change_matrix(mixer, lambda mix: mix if float(mix.detach().sum()) > 0 else 1 * mix)


@mutant("transforms", applies=has_logits)
def batched_by_hand(mixer: Mixer) -> Mixer:
    """Python looks at the values: vmap does not run."""
    return change_matrix(mixer, lambda mix: mix if mix.detach().sum().item() > 0 else 1 * mix)


@mutant("compiled", applies=always)
def compiled_form_differs(mixer: Mixer) -> Mixer:
    """The compiled form is another function."""
    return change_matrix(mixer, lambda mix: 1.01 * mix if torch.compiler.is_compiling() else mix)


def _beside(mixer: Mixer, term) -> Mixer:
    inner = mixer.forward
    mixer.forward = lambda logits: inner(logits) + 0 * term(logits).sum(-1)[..., None, None]
    return mixer
