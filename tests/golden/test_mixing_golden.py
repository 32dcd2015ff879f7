"""Numbers of mHC (arXiv 2512.24880) at its initial values, and of one fixed matrix, kept from an independent computation in float64."""

import pytest
import torch

from thalweg.geometry import composite, horizon, sigma_2
from thalweg.ops import sinkhorn

START = sinkhorn(6 * torch.eye(4, dtype=torch.float64) - 3)
Z = [[0.5, -1, 2, 0], [1.5, 0.3, -0.7, -2], [-0.2, 0.8, 0.1, 1.2], [2.2, -0.4, -1.1, 0.6]]


def test_the_start_and_its_memory():
    assert START[0, 0].item() == pytest.approx(0.992618633, abs=1e-9)
    assert START[0, 1].item() == pytest.approx(0.002460456, abs=1e-9)
    assert sigma_2(START).item() == pytest.approx(0.990158, abs=1e-6)
    assert horizon(sigma_2(START)).item() == pytest.approx(102, abs=0.5)


@pytest.mark.parametrize(
    ("sites", "diagonal", "off"), [(24, 0.8415, 0.0528), (60, 0.6643, 0.1119), (120, 0.4789, 0.1737)]
)
def test_composites_of_the_start(sites, diagonal, off):
    product = composite([START] * sites)
    assert torch.allclose(product.diagonal(), torch.full((4,), diagonal, dtype=torch.float64), rtol=0, atol=5e-5)
    assert torch.allclose(
        product[~torch.eye(4, dtype=torch.bool)], torch.tensor(off, dtype=torch.float64), rtol=0, atol=5e-5
    )


def test_singular_values_of_a_limit():
    limit = sinkhorn(torch.tensor(Z, dtype=torch.float64))
    expected = [1, 0.65687359, 0.41747063, 0.30439764]
    assert torch.linalg.svdvals(limit).tolist() == pytest.approx(expected, abs=1e-8)
    assert sigma_2(limit).item() == pytest.approx(expected[1], abs=1e-8)
