"""Edits attached to transformers' Llama and those of our decoder: same weights, same losses over steps of training, in float64."""

import pytest
import torch
import torch.nn.functional as F
from test_llama_parity import BASE, DEPTH, EPS, FFN, VOCAB, WIDTH, llama, pairs

from thalweg import editing
from thalweg.models import Decoder, DecoderConfig
from thalweg.models.retained import count_updates, edits_of

EDITS = {
    "value, full": [("value", "value:full:0")],
    "value, exclude-self": [("value", "value:exclude-self:0.3,perpendicular=1.2,group=kv")],
    "value, learned by head": [("value", "value:exclude-self:learned,per=head")],
    "attention": [("attention", "residual:0")],
    "both, one scheduled, some layers": [("attention", "residual:1..0@3,layers=1:"), ("mlp", "residual:learned")],
    "value and mlp": [("value", "value:full:0.5"), ("mlp", "residual:0,control=random-direction")],
    "detached": [("value", "value:full:0,detach"), ("mlp", "residual:0,detach")],
}


def both(edits):
    theirs = llama(kv_heads=2, tied=False)
    fields = {"mlp_edit" if site == "mlp" else "attention_edit": text for site, text in edits}
    ours = Decoder(
        DecoderConfig(
            vocab_size=VOCAB,
            width=WIDTH,
            depth=DEPTH,
            heads=4,
            kv_heads=2,
            ffn_width=FFN,
            norm_eps=EPS,
            rope_base=BASE,
            tie_embeddings=False,
            **fields,
        )
    ).double()
    with torch.no_grad():
        for mine, other in pairs(ours, theirs):
            mine.copy_(other)
    attached = [editing.attach(theirs, text, site=site) for site, text in edits]
    return ours, theirs, attached


def losses(model, logits, count, steps=5):
    """AdamW on the same batches; the loss in float64, taken from the logits."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    found = []
    for step in range(steps):
        x = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(step))
        loss = F.cross_entropy(logits(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten())
        found.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        count(step + 1)
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("edit", EDITS)
def test_training_gives_the_same_losses(edit):
    ours, theirs, attached = both(EDITS[edit])
    mine = losses(ours, lambda x: ours(x).logits, lambda step: count_updates(ours, step))
    other = losses(theirs, lambda x: theirs(input_ids=x).logits, lambda step: [a.count_updates(step) for a in attached])
    torch.testing.assert_close(mine, other, rtol=1e-9, atol=0)
    learned = [p for e in edits_of(ours).values() for p in e.parameters()]
    assert len(learned) == sum(len(list(a.parameters())) for a in attached)
    plain, _, _ = both([])
    unedited = losses(plain, lambda x: plain(x).logits, lambda step: None)
    assert (mine - unedited).abs().max() > 1e-6  # and the edit is seen


def test_a_detached_reference_is_another_method():
    (ours, _, _), (detached, _, _) = both(EDITS["value, full"]), both([("value", "value:full:0,detach")])
    one, other = (losses(model, lambda x, m=model: m(x).logits, lambda step: None) for model in (ours, detached))
    assert one[0] == other[0] and (one[1:] - other[1:]).abs().min() > 1e-6
