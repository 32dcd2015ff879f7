"""What the critical temperature does not say: prototypes that begin far apart can stay apart above it, and do better."""

import pytest
import torch

from thalweg.growth import prototype_loss
from thalweg.ops.prototypes import critical_temperature


def cloud_and_outlier():
    generator = torch.Generator().manual_seed(0)
    cloud = 0.3 * torch.randn(99, 2, generator=generator, dtype=torch.float64)
    return torch.cat([cloud, torch.tensor([[10.0, 0.0]], dtype=torch.float64)])


def descended(x, start, temperature, gradient):
    points = start.clone().requires_grad_()
    for _ in range(600):
        parts = prototype_loss(x, points, temperature, gradient=gradient)
        (step,) = torch.autograd.grad(parts.loss, points)
        points = (points - 0.5 * step).detach().requires_grad_()
    return points.detach(), prototype_loss(x, points, temperature).loss.item()


@pytest.mark.parametrize("gradient", ["through", "detached"])
def test_they_stay_apart_above_the_critical_temperature(gradient):
    x = cloud_and_outlier()
    temperature = 1.5 * float(critical_temperature(x, gradient=gradient))
    apart, loss = descended(x, torch.tensor([[0.0, 0.0], [10.0, 0.0]], dtype=torch.float64), temperature, gradient)
    near = x.mean(0) + torch.tensor([[0.1, 0.0], [-0.1, 0.0]], dtype=torch.float64)
    together, other = descended(x, near, temperature, gradient)
    assert (apart[0] - apart[1]).norm() > 9.5
    assert (together[0] - together[1]).norm() < 1e-3
    assert loss < 0.3 * other
