"""Modules as functions of their weights."""

import pytest
import torch
from torch import nn

from smat_fn.models import FullLoss, parameters
from smat_fn.models.modules import cache_name, sent


def module():
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    net[1].bias.requires_grad_(False)
    return net


def squared(net, x):
    return net(x).square().sum(), None


def test_parameters_are_detached_copies_of_what_trains():
    net = module()
    params = parameters(net)
    assert list(params) == ["0.weight", "0.bias", "1.weight"]
    params["0.bias"].zero_()
    assert not params["0.bias"].requires_grad
    assert net[0].bias.abs().sum() > 0


def test_loss_is_that_of_the_given_weights():
    net, x = module(), torch.ones(4, 3)
    params = {name: torch.full_like(p, 0.5) for name, p in parameters(net).items()}
    value = 0.5 * 2 * (3 * 0.5 + 0.5) + net[1].bias.item()
    assert FullLoss(net, squared)(params, x)[0].item() == pytest.approx(4 * value**2)


@pytest.mark.parametrize(
    ("drop", "add", "message"),
    [
        (["0.bias", "1.weight"], [], r"params lack '0\.bias', '1\.weight'"),
        ([], ["0.baas", "2.weight"], r"'0\.baas'.*'2\.weight'"),
    ],
)
def test_missing_and_unknown_names_are_listed(drop, add, message):
    net = module()
    params = {n: p for n, p in parameters(net).items() if n not in drop} | {n: torch.zeros(1) for n in add}
    with pytest.raises(ValueError, match=message):
        FullLoss(net, squared)(params, torch.ones(1, 3))


def test_a_batch_on_its_way_keeps_its_values_and_its_transforms():
    batch = torch.arange(6).view(2, 3)
    assert sent(batch, batch.device) is batch
    assert torch.equal(torch.func.vmap(lambda own: sent(own, batch.device) + 1)(batch), batch + 1)


@pytest.mark.parametrize(
    ("forward", "name"),
    [
        (lambda input_ids, past_key_values=None, cache=None: None, "cache"),  # the old name warns
        (lambda input_ids, past_key_values=None: None, "past_key_values"),
        (lambda input_ids, cache_params=None: None, "cache_params"),
        (lambda input_ids, state=None, **options: None, ""),
    ],
    ids=["cache", "past_key_values", "cache_params", "none"],
)
def test_the_cache_has_the_name_that_the_forward_function_takes(forward, name):
    module = nn.Module()
    module.forward = forward
    assert cache_name(module) == name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_host_does_not_wait_for_a_batch():
    batch, device = torch.arange(2**22).view(2, -1), torch.device("cuda")
    sent(batch, device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        there = sent(batch, device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(there.cpu(), batch)
    assert torch.equal(torch.func.vmap(lambda own: sent(own, device) + 1)(batch).cpu(), batch + 1)
