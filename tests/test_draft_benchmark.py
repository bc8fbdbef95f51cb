"""The benchmark of draft heads widens a small model: it computes the same logits at the cost of a large one."""

import torch

import onward
from benchmarks.widened import widened
from onward.model.draft_head import DraftHead, embedded


@torch.no_grad()
def test_a_widened_model_and_its_draft_head_compute_the_same() -> None:
    torch.manual_seed(0)
    config = onward.DecoderConfig(vocab_size=257, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, context_length=16)
    model, head = onward.Decoder(config).eval(), DraftHead(32, 24)
    for parameter in (*model.parameters(), *head.parameters()):
        parameter.copy_(torch.randn_like(parameter) / 4)
    lm = onward.LanguageModel(model, onward.train_tokenizer("byte", []), draft_head=head)
    wide = widened(lm, 3)
    tokens = torch.randint(257, (2, 16))
    assert wide.config.d_model == 96
    assert torch.allclose(wide.model(tokens), model(tokens), atol=1e-4)
    assert wide.draft_head is not None
    guess, other = (
        one(m.hidden(tokens), embedded(m, tokens)) for one, m in ((head, model), (wide.draft_head, wide.model))
    )
    assert torch.allclose(other[..., :32], guess, atol=1e-2)
    assert not other[..., 32:].any()
