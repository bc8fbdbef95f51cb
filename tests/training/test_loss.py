"""The loss in chunks equals the plain loss, and never has all logits in memory."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from onward import Batch, Decoder, LoRA, Loss, UserError, use_adapter
from onward.data import IGNORE_INDEX
from onward.kernels.cross_entropy import cross_entropy
from onward.training import CrossEntropy
from onward.training.step.loss import as_loss

from support.adapters import stirred
from support.allocations import Allocations
from support.decoders import DECODERS, LENGTH, assert_close, config, decoder, token_ids
from support.devices import on_device

HEADS = {"plain": "llama", "tied, cap": "gemma2", "scale": "granite", "bias": "gpt", "projected, tied": "opt-350m"}
OBJECTIVES = {
    "cross-entropy": {},
    "z-loss": {"z_loss": 0.3},
    "smoothing": {"label_smoothing": 0.2},
    "all": {"z_loss": 1e-4, "label_smoothing": 0.1},
}


def batch(model: Decoder, packed: bool = False) -> Batch:
    tokens = token_ids(model.config)
    targets = tokens.roll(-1, 1)
    targets[0, :5] = targets[1, -1] = IGNORE_INDEX
    return Batch(tokens, targets, torch.arange(LENGTH).remainder(7).expand_as(tokens) if packed else None)


def written_out(model: Decoder, batch: Batch, loss: CrossEntropy) -> tuple[Tensor, Tensor]:
    """The minimized loss and the cross-entropy, computed from all logits at once."""
    logits = model(batch.tokens, batch.positions).flatten(0, 1)
    rest: dict[str, Any] = {"target": batch.targets.flatten(), "ignore_index": IGNORE_INDEX, "reduction": "sum"}
    log_z = logits.exp().sum(-1).log()[rest["target"] != IGNORE_INDEX]
    smoothed = F.cross_entropy(logits, **rest, label_smoothing=loss.label_smoothing)
    return smoothed + loss.z_loss * (log_z**2).sum(), F.cross_entropy(logits, **rest)


def results(model: Decoder, losses: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Both losses, and the gradients of a third of the first loss for every parameter."""
    return [*losses, *torch.autograd.grad(losses[0] / 3, list(model.parameters()))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("chunk", [0, 1, 5, 23, 24])
@pytest.mark.parametrize("options", OBJECTIVES.values(), ids=OBJECTIVES)
@pytest.mark.parametrize("head", HEADS)
def test_the_loss_and_all_gradients_are_those_written_out(
    head: str, options: dict[str, float], chunk: int, dtype: torch.dtype
) -> None:
    model = decoder(DECODERS[HEADS[head]], dtype)
    loss, b = CrossEntropy(**options, chunk=chunk), batch(model, packed=chunk == 5)
    wanted = results(model, written_out(model, b, loss))
    for got, want in zip(results(model, loss(model, b)), wanted):
        assert_close(got, want, 1e-5 if dtype == torch.float32 else 1e-13)


@pytest.mark.parametrize("options", OBJECTIVES.values(), ids=OBJECTIVES)
def test_under_autocast_chunks_differ_by_rounding_only(options: dict[str, float]) -> None:
    model = decoder(DECODERS["gemma2"])
    with torch.autocast("cpu", torch.bfloat16):
        whole, chunked = (results(model, CrossEntropy(**options, chunk=chunk)(model, batch(model))) for chunk in (0, 5))
    assert chunked[0].dtype == torch.float32
    assert_close(chunked[1], whole[1], 1e-6)
    for got, want in zip(chunked, whole):
        assert_close(got, want, 0.02)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("options", OBJECTIVES.values(), ids=OBJECTIVES)
def test_all_logits_are_never_in_memory_at_once(options: dict[str, float], precision: str) -> None:
    model = decoder(config(vocab_size=20_000, tied=True))
    tokens = token_ids(model.config, rows=16)
    b, largest = Batch(tokens, tokens), {}
    for chunk in 0, 16:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"), Allocations() as made:
            CrossEntropy(**options, chunk=chunk)(model, b)[0].backward()
        largest[chunk] = made.largest
    assert largest[0] == tokens.numel() * 20_000 * 4
    assert largest[16] == 16 * 20_000 * 4  # as large as the head's gradient


def test_logits_of_a_large_vocabulary_take_128_mib_by_default() -> None:
    model = on_device(Decoder(config(vocab_size=100_000, d_model=2, n_heads=1, n_layers=1)))
    tokens = token_ids(model.config, rows=40)
    with torch.inference_mode(), Allocations() as made:
        CrossEntropy()(model, Batch(tokens, tokens))
    assert 64 << 20 < made.largest <= 128 << 20


@pytest.mark.parametrize("chunk", [0, 5])
@pytest.mark.parametrize("trained", ["", "head", "blocks", "embed_out", "head.bias"])
def test_only_trainable_parameters_get_gradients(trained: str, chunk: int) -> None:
    model = decoder(config(head_bias=True, d_embed=6))
    wanted = results(model, CrossEntropy()(model, batch(model)))[2:]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(bool(trained) and name.startswith(trained))
    loss, _ = CrossEntropy(chunk=chunk)(model, batch(model))
    assert loss.requires_grad == bool(trained)
    if trained:
        (loss / 3).backward()
    for parameter, want in zip(model.parameters(), wanted):
        if parameter.requires_grad:
            assert_close(parameter.grad, want)
        else:
            assert parameter.grad is None


@pytest.mark.parametrize("used", ["", "one", ["two", "one"], ["", "two"]], ids=str)
def test_loss_in_chunks_has_the_gradients_of_the_adapters_in_use(used: str | list[str]) -> None:
    model = stirred(decoder(DECODERS["llama"], torch.float64), "one", "two", lora=LoRA(rank=2, targets=("head",)))
    trained = {name: p.requires_grad_() for name, p in model.named_parameters() if "_lora." in name}

    def gradients(chunk: int) -> dict[str, Tensor | None]:
        model.zero_grad()
        with use_adapter(model, used):
            loss, _ = CrossEntropy(chunk=chunk)(model, batch(model))
        if loss.requires_grad:
            loss.backward()
        return {name: p.grad for name, p in trained.items()}

    plain = gradients(0)
    for name, gradient in gradients(5).items():
        assert (gradient is None) == (plain[name] is None)
        if gradient is not None:
            assert_close(gradient, plain[name])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_loss_is_computed_without_gradients(mode: type) -> None:
    model = decoder(DECODERS["gpt2"])
    wanted = CrossEntropy()(model, batch(model))
    with mode():
        for got, want in zip(CrossEntropy(chunk=5)(model, batch(model)), wanted):
            assert not got.requires_grad
            assert_close(got, want.detach())


def test_batch_without_targets_has_zero_loss() -> None:
    model = decoder(DECODERS["llama"])
    b = batch(model)
    b.targets.fill_(IGNORE_INDEX)
    for got in results(model, CrossEntropy(z_loss=1.0, label_smoothing=0.1, chunk=5)(model, b)):
        assert torch.equal(got, torch.zeros_like(got))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-7)])
@pytest.mark.parametrize("shape", [(300, 1000), (261, 1027)])
def test_kernel_of_the_cross_entropy_equals_pytorch_in_fp64(shape: tuple[int, int], dtype: torch.dtype, bound: float):
    torch.manual_seed(0)
    logits = (4 * torch.randn(shape)).to(dtype).requires_grad_()
    targets = torch.randint(0, shape[1], shape[:1])
    targets[::7] = IGNORE_INDEX
    exact = logits.detach().double().requires_grad_()
    wanted = F.cross_entropy(exact, targets, ignore_index=IGNORE_INDEX, reduction="sum")
    loss = cross_entropy(logits, targets, IGNORE_INDEX)
    assert "Kernel" in type(loss.grad_fn).__name__
    for each in loss, wanted:
        (each / 100).backward()
    assert logits.grad is not None
    assert exact.grad is not None
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    assert (logits.grad.double() - exact.grad).abs().max() <= bound * exact.grad.abs().max()
    assert not logits.grad[::7].any()


@pytest.mark.parametrize("target", [1000, -1])
def test_target_outside_the_vocabulary_is_an_error_and_not_read(target: int):
    with pytest.raises(IndexError, match="out of bounds"):
        cross_entropy(torch.randn(300, 1000, requires_grad=True), torch.full((300,), target), IGNORE_INDEX)


def test_kernel_of_the_cross_entropy_shows_nan():
    logits = torch.randn(300, 1000)
    logits[5, 3] = torch.nan
    assert cross_entropy(logits.requires_grad_(), torch.zeros(300, dtype=torch.int64), IGNORE_INDEX).isnan()


class Own:
    """A loss that does not derive from Loss but has one of its methods."""

    def __call__(self, model: Any, batch: Any) -> Any:
        return CrossEntropy()(model, batch)

    def prepare(self, model: Any, batches: Any) -> Any:
        return batches


@pytest.mark.parametrize(
    ("result", "returned"),
    [(torch.ones(()), "a Tensor"), ((torch.ones(2), torch.ones(2)), "a tuple of 2"), (None, "a NoneType")],
)
def test_a_loss_that_does_not_return_two_sums_is_refused_in_a_sentence(result: Any, returned: str) -> None:
    def mine(model: Any, batch: Any) -> Any:
        return result

    with pytest.raises(UserError, match=f"The loss mine returned {returned} instead of two sums"):
        as_loss(mine)(None, None)


def test_methods_of_a_loss_are_called_or_refused() -> None:
    with pytest.raises(
        UserError, match="Cannot call prepare of the loss Own, because it is not a Loss: make it a subclass"
    ):
        as_loss(Own())

    class Prepared(Own, Loss):
        pass

    loss = Prepared()
    assert as_loss(loss) is loss
    assert as_loss(CrossEntropy().__call__).summarize({"figure": 1.0}) == {"figure": 1.0}
