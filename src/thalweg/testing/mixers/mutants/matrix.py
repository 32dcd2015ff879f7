"""Bugs in the matrix, in its derivative, and in what is computed for which token."""

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
from thalweg.testing.mixers.subjects import MixerSubject
from thalweg.testing.mutants.catalog import Mutate


def breaks(field: str):
    """The condition of a mutant that makes an exact marginal (``rows`` or ``columns``) inexact."""

    def applies(subject: MixerSubject, mutate: Mutate) -> bool:
        return getattr(subject.start().claims, field) == "exact" and changes_output(subject, mutate)

    return applies


@mutant("reference")
def transposed(mixer: Mixer) -> Mixer:
    """The matrix is [from, to]."""
    return change_matrix(mixer, lambda mix: mix.mT)


@mutant("reference")
def entry_scaled(mixer: Mixer) -> Mixer:
    """One entry is one hundredth too large."""
    return change_matrix(mixer, _scale_one)


@mutant("marginals", applies=breaks("rows"))
def row_inexact(mixer: Mixer) -> Mixer:
    """One entry is one hundredth too large, and its row sums to more than one."""
    return change_matrix(mixer, _scale_one)


@mutant("marginals", applies=breaks("columns"))
def column_inexact(mixer: Mixer) -> Mixer:
    """One entry is one hundredth too large, and its column sums to more than one."""
    return change_matrix(mixer, _scale_one)


@mutant("reference")
def columns_normalised_last(mixer: Mixer) -> Mixer:
    """The last normalisation runs over the columns."""
    return change_matrix(mixer, lambda mix: mix / mix.sum(-2, keepdim=True))


@mutant("reference")
def rows_normalised_last(mixer: Mixer) -> Mixer:
    """The last normalisation runs over the rows."""
    return change_matrix(mixer, lambda mix: mix / mix.sum(-1, keepdim=True))


@mutant("marginals", applies=breaks("rows"))
def row_sums_lost(mixer: Mixer) -> Mixer:
    """The columns are normalised last, where the rows are claimed to be exact."""
    return change_matrix(mixer, lambda mix: mix / mix.sum(-2, keepdim=True))


@mutant("marginals", applies=breaks("columns"))
def column_sums_lost(mixer: Mixer) -> Mixer:
    """The rows are normalised last, where the columns are claimed to be exact."""
    return change_matrix(mixer, lambda mix: mix / mix.sum(-1, keepdim=True))


@mutant("reference")
def logits_doubled(mixer: Mixer) -> Mixer:
    """The logits are scaled by two."""
    return change_logits(mixer, lambda logits: 2 * logits)


@mutant("reference")
def logits_reversed(mixer: Mixer) -> Mixer:
    """The logits are taken in another order."""
    return change_logits(mixer, lambda logits: logits.flip(-1))


@mutant("reference", "moves", applies=has_logits)
def detached(mixer: Mixer) -> Mixer:
    """No gradient flows through the matrix."""
    return change_matrix(mixer, Tensor.detach)


@mutant("reference", "gradient", applies=changes_output)
def gradient_scaled(mixer: Mixer) -> Mixer:
    """A hand-written backward pass is one hundredth too large."""
    return change_matrix(mixer, lambda mix: 1.01 * mix - (0.01 * mix).detach())


@mutant("reference", "gradient")
def gradient_absolute(mixer: Mixer) -> Mixer:
    """A hand-written backward pass loses the sign."""
    return change_matrix(mixer, lambda mix: _Absolute.apply(mix))


@mutant("transforms", applies=has_logits)
def forward_derivative_scaled(mixer: Mixer) -> Mixer:
    """A hand-written forward-mode derivative is one hundredth too large."""
    return change_matrix(mixer, lambda mix: _Pushed.apply(mix))


@mutant("reference", "purity")
def first_entry_for_all(mixer: Mixer) -> Mixer:
    """Every batch entry gets the matrices of the first."""
    return change_matrix(mixer, lambda mix: mix[:1].expand_as(mix) if mix.dim() > 2 and len(mix) else mix)


@mutant("purity", applies=has_logits)
def overwritten(mixer: Mixer) -> Mixer:
    """The logits are overwritten."""

    def change(logits: Tensor) -> Tensor:
        given = logits.clone()
        with torch.no_grad():
            logits.detach().add_(1)
        return given

    return change_logits(mixer, change)


@mutant("purity", applies=always)
def remembered(mixer: Mixer) -> Mixer:
    """What was computed before is mixed in."""
    last: list[Tensor] = []

    def change(mix: Tensor) -> Tensor:
        before = last[-1] if last and last[-1].shape == mix.shape else mix
        last.append(mix.detach())
        return mix + 0.1 * (before.detach() - mix) + 0.001 * len(last)

    return change_matrix(mixer, change)


def _scale_one(mix: Tensor) -> Tensor:
    factor = torch.ones(mix.shape[-2:], dtype=mix.dtype)
    factor[0, 0] = 1.01
    return mix * factor


class _Absolute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *gradients):
        return gradients[0].abs()


class _Pushed(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *gradients):
        return gradients[0]

    @staticmethod
    def jvp(ctx, *directions):
        return 1.01 * directions[0]
