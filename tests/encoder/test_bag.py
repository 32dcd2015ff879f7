"""A bag of embeddings is the mean of embeddings and one map, and reads no order."""

import pytest
import torch

from thalweg.errors import InputError
from thalweg.models import BagOfEmbeddings
from thalweg.training import bag_of_embeddings, majority


def bag():
    return BagOfEmbeddings(11, 6, 3, generator=torch.Generator().manual_seed(0)).double()


def test_it_is_what_the_loops_say():
    model = bag()
    with torch.no_grad():
        model.head.bias.add_(torch.randn(3, dtype=torch.float64))
    ids, mask = torch.tensor([[1, 2, 3, 9], [4, 4, 0, 0]]), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    logits = []
    for row, real in zip(ids.tolist(), mask.tolist(), strict=True):
        kept = [model.embedding.weight[i] for i, seen in zip(row, real, strict=True) if seen]
        logits.append(model.head.weight @ (sum(kept) / len(kept)) + model.head.bias)
    logits = torch.stack(logits)
    labels = torch.tensor([2, 0])
    loss = -(logits.log_softmax(-1)[0, 2] + logits.log_softmax(-1)[1, 0]) / 2
    out = model(ids, attention_mask=mask, labels=labels)
    random = torch.randn(2, 3, dtype=torch.float64)
    pairs = [(out.logits, logits), (out.loss, loss)]
    for a, b in zip(
        torch.autograd.grad((out.logits * random).sum() + out.loss, list(model.parameters())),
        torch.autograd.grad((logits * random).sum() + loss, list(model.parameters())),
        strict=True,
    ):
        pairs.append((a, b))
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


def test_it_reads_no_order_and_starts_from_its_generator():
    model, ids = bag(), torch.randint(11, (4, 7))
    torch.testing.assert_close(model(ids).logits, model(ids[:, torch.randperm(7)]).logits)
    assert torch.equal(bag().embedding.weight, model.embedding.weight)


def test_what_cannot_be_is_one_line():
    for call, said in (
        (lambda: BagOfEmbeddings(5, 4, 1), "classes must be at least 2, got 1"),
        (lambda: BagOfEmbeddings(5, 0, 2), "width must be at least 1, got 0"),
        (lambda: bag()(torch.tensor([[11]])), "token ids must lie in 0..10"),
        (lambda: majority("sentiment"), "baselines are of classifications"),
        (lambda: bag_of_embeddings(None, None), "baselines are of classifications"),
    ):
        with pytest.raises(InputError) as error:
            call()
        assert said in str(error.value) and "\n" not in str(error.value)
