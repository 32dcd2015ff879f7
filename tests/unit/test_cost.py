"""Cost is measured: against counts by hand, and against itself when a deep network is extrapolated."""

import pytest
import torch
from torch import nn

from thalweg import connections
from thalweg.connections import Site
from thalweg.connections.additive import Additive, AdditiveSite
from thalweg.connections.cost import measure, measure_cost
from thalweg.errors import InputError, UnknownNameError


def test_additive_by_hand():
    """A norm of width d: square, mean, two products (4d), eps and rsqrt (2); adding the update, d.

    It keeps x, the normalised x (4d bytes each) and 1/rms (4).
    """
    d, sites = 24, 6
    cost = measure_cost("additive", width=d, sites=Site.decoder(3), length=10)
    assert cost.parameters == (sites + 1) * d
    assert cost.flops_per_token == (sites + 1) * (4 * d + 2) + sites * d
    assert cost.activation_bytes_per_token == (sites + 1) * (2 * 4 * d + 4)
    assert (cost.extra_parameters, cost.extra_flops_per_token, cost.extra_activation_bytes_per_token) == (0, 0, 0)
    assert (cost.width, cost.sites, cost.length, cost.dtype) == (d, sites, 10, "float32")
    assert not cost.extrapolated
    assert not cost.uncounted


def test_what_an_option_adds():
    d, sites = 24, 4
    cost = measure_cost("additive", width=d, sites=Site.decoder(2), length=10, options={"update_norm": True})
    assert cost.extra_parameters == sites * d
    assert cost.extra_flops_per_token == sites * (4 * d + 2)
    plain = measure_cost("additive", width=d, sites=Site.decoder(2), length=10, options={"norm": "layernorm"})
    assert plain.extra_flops_per_token == 0  # compared with the same norm


def test_matrix_products_count_two_a_multiply_add():
    d, sites = 16, 4
    cost = measure_cost("highway", width=d, sites=Site.decoder(2), length=8)
    assert cost.extra_parameters == sites * (d * d + d)
    assert 0 <= cost.extra_flops_per_token - sites * 2 * d * d < sites * 8 * d


def test_bytes_follow_the_dtype():
    class Product(AdditiveSite):
        def write(self, state, update, context):
            return state * update

    class Products(Additive):
        SiteModule = Product

    bare = {"input_norm": False, "final_norm": False}
    bytes_of = {
        dtype: measure_cost(
            Products, width=8, sites=Site.decoder(1), options=bare, length=4, dtype=dtype
        ).activation_bytes_per_token
        for dtype in (torch.float32, torch.bfloat16)
    }
    assert bytes_of[torch.float32] == 4 * 8 * 4  # the embedding, the state between, and both updates
    assert bytes_of[torch.bfloat16] == bytes_of[torch.float32] / 2


@pytest.mark.parametrize("name", ["additive", "mgt", "rezero"])
def test_a_deep_network_is_extrapolated_exactly(name):
    cls, sites = connections.registry[name], Site.decoder(7)
    options = connections.make_options(name, {})
    cost = measure_cost(name, width=8, sites=sites, length=6)
    assert cost.extrapolated
    layers = cls(8, sites, options)
    assert cost.parameters == sum(parameter.numel() for parameter in layers.parameters())
    # The same 14 sites counted as four layers are run in full.
    whole = [Site(site.index, min(site.layer, 3), site.kind, site.depth, 2) for site in sites]
    full = measure(lambda some: cls(8, sites[: len(some)], options), whole, width=8, length=6)
    assert (cost.parameters, cost.flops_per_token, cost.activation_bytes_per_token) == (
        full.parameters,
        full.flops_per_token,
        full.bytes_per_token,
    )


def test_a_history_that_grows_with_depth_is_extrapolated_exactly():
    class History(AdditiveSite):
        def write(self, state, update, context):
            return (*state, sum(state) + update)

        def read(self, state, tokens=None):
            return self.input_norm(state[-1]), None

    class Histories(Additive):
        SiteModule = History

        def enter(self, embedding, tokens=None):
            return (embedding,)

        def leave(self, state, tokens=None):
            return self.final_norm(state[-1])

    d, depth = 4, 9
    cost = measure_cost(Histories, width=d, sites=Site.stack(depth, ("attention",)), length=3)
    # sum() starts from 0, so site i adds i + 1 states and the update: i + 2 additions of width d.
    added = sum(i + 2 for i in range(depth)) * d
    assert cost.flops_per_token == (depth + 1) * (4 * d + 2) + added


def test_a_real_width_allocates_nothing():
    cost = measure_cost("highway", width=65536, sites=Site.decoder(100), length=1 << 20)
    assert cost.parameters > 200 * 65536**2  # 3.4 TB if it were real


def test_arithmetic_without_a_rule_is_named():
    class Solving(AdditiveSite):
        def write(self, state, update, context):
            return state + torch.linalg.qr(update).Q

    class Solver(Additive):
        SiteModule = Solving

    assert measure_cost(Solver, width=4, sites=Site.decoder(1), length=4).uncounted == ("aten::linalg_qr",)


def test_branching_on_values_is_refused():
    class Deciding(AdditiveSite):
        def write(self, state, update, context):
            return state + update if float(state.detach().sum()) > 0 else state

    class Decider(Additive):
        SiteModule = Deciding

    with pytest.raises(InputError, match="must not branch on values"):
        measure_cost(Decider, width=4, sites=Site.decoder(1))


def test_unknown_names_are_refused():
    with pytest.raises(UnknownNameError, match="additive"):
        measure_cost("aditive", width=4, sites=Site.decoder(1))
    with pytest.raises(UnknownNameError, match="update_norm"):
        measure_cost("additive", width=4, sites=Site.decoder(1), options={"update_nrm": True})


def test_parameters_are_not_activations():
    class Scaling(AdditiveSite):
        def __init__(self, width, site, options):
            super().__init__(width, site, options)
            self.scale = nn.Parameter(torch.ones(width))

        def write(self, state, update, context):
            return state + update * self.scale

    class Scaled(Additive):
        SiteModule = Scaling

    cost = measure_cost(Scaled, width=8, sites=Site.decoder(1), length=4)
    assert cost.extra_activation_bytes_per_token == 2 * 8 * 4  # the two updates, not the scales
