"""Two engines, one gradient: against ``loss.backward()``, against each other, and under gradient checkpointing."""

import copy
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from smat_fn import grad, tree

ENGINES = ["func", "autograd"]


def mlp(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3)).to(dtype)


def vit():
    import transformers as hf

    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}
    return hf.ViTForImageClassification(hf.ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=3))


def llama():
    import transformers as hf

    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": 2}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, **heads, pad_token_id=0, tie_word_embeddings=True))


def mlp_loss(module, x, y):
    out = module(x)
    return nn.functional.cross_entropy(out, y), out


def vit_loss(module, x, y):
    return mlp_loss(lambda pixels: module(pixel_values=pixels).logits, x, y)


def llama_loss(module, tokens):
    out = module(input_ids=tokens, labels=tokens)
    return out.loss, out.logits


def draws(seed):
    return torch.Generator().manual_seed(seed)


CASES = {
    "mlp": (mlp, mlp_loss, (torch.randn(6, 5, generator=draws(1)), torch.arange(6) % 3)),
    "vit": (vit, vit_loss, (torch.randn(2, 3, 8, 8, generator=draws(1)), torch.tensor([0, 2]))),
    "llama": (llama, llama_loss, (torch.randint(11, (2, 6), generator=draws(1)),)),
}
each_case = pytest.mark.parametrize("case", CASES)


def away(module, seed=5):
    """Weights different from the module's own."""
    g = draws(seed)
    return {n: p.detach() + 0.1 * torch.randn(p.shape, generator=g).to(p) for n, p in module.named_parameters()}


def by_backward(module, params, loss, args):
    """Loss, aux and gradients of a copy of the module that holds ``params``."""
    module = copy.deepcopy(module)
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(params[name])
    value, aux = loss(module, *args)
    value.backward()
    return value.detach(), aux, {n: p.grad for n, p in module.named_parameters()}


def bits(module):
    return {name: leaf.clone() for name, leaf in module.state_dict().items()}


@each_case
def test_autograd_engine_has_the_bits_of_backward(case):
    make, loss, args = CASES[case]
    module = make()
    params = away(module)
    (value, aux), grads = grad.value_and_grad(grad.ModuleLoss(module, loss), engine="autograd")(params, *args)
    want, want_aux, want_grads = by_backward(module, params, loss, args)
    assert torch.equal(value, want)
    assert torch.equal(aux, want_aux)
    assert list(grads) == list(params)
    for name, g in grads.items():
        assert torch.equal(g, want_grads[name]), name
        assert g.dtype == params[name].dtype


@each_case
def test_the_engines_agree_within_rounding(case):
    make, loss, args = CASES[case]
    module = make().double()
    if case != "llama":
        args = (args[0].double(), *args[1:])
    params = away(module)
    results = [grad.value_and_grad(grad.ModuleLoss(module, loss), engine=e)(params, *args) for e in ENGINES]
    torch.testing.assert_close(results[0], results[1], rtol=1e-11, atol=1e-13)
    assert any(g.abs().max() > 1e-3 for g in results[0][1].values())


@pytest.mark.parametrize("engine", ENGINES)
def test_bf16_gradients_keep_their_dtype(engine):
    module = mlp(torch.bfloat16)
    params, (x, y) = away(module), CASES["mlp"][2]
    (_, _), grads = grad.value_and_grad(grad.ModuleLoss(module, mlp_loss), engine=engine)(params, x.bfloat16(), y)
    assert {g.dtype for g in grads.values()} == {torch.bfloat16}
    if engine == "autograd":
        want = by_backward(module, params, mlp_loss, (x.bfloat16(), y))[2]
        assert all(torch.equal(g, want[n]) for n, g in grads.items())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", ["mlp", "llama"])
def test_the_module_and_the_weights_are_never_changed(engine, case):
    make, loss, args = CASES[case]
    module = make()
    params = away(module)
    before, given = bits(module), tree.clone(params)
    flags = [p.requires_grad for p in module.parameters()]
    identities = [id(p) for p in module.parameters()]
    grad.value_and_grad(grad.ModuleLoss(module, loss), engine=engine)(params, *args)
    assert all(torch.equal(leaf, before[name]) for name, leaf in module.state_dict().items())
    assert all(torch.equal(leaf, given[name]) for name, leaf in params.items())
    assert all(p.grad is None for p in module.parameters())
    assert not any(leaf.requires_grad for leaf in params.values())
    assert [p.requires_grad for p in module.parameters()] == flags
    assert [id(p) for p in module.parameters()] == identities


@pytest.mark.parametrize("engine", ENGINES)
def test_the_module_is_itself_again_after_an_error(engine):
    module = mlp()
    identities = [id(p) for p in module.parameters()]

    def fails(inner, x):
        inner(x)
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        grad.value_and_grad(grad.ModuleLoss(module, fails), engine=engine)(away(module), torch.ones(1, 5))
    assert [id(p) for p in module.parameters()] == identities


def quadratic(params, x):
    """A loss with the gradients 2 (a - x) and x."""
    a, b = params["block"]["a"], params["list"][0]
    return ((a - x) ** 2).sum() + (b * x).sum(), {"a": a * 1, "name": "aux", "none": None, "count": 3}


def nested():
    return OrderedDict(block={"a": torch.tensor([1.0, 2.0])}, list=[torch.tensor([3.0, -1.0]), torch.ones(2, 2)])


@pytest.mark.parametrize("engine", ENGINES)
def test_nested_trees_aux_and_unused_leaves(engine):
    params, x = nested(), torch.tensor([0.5, -2.0])
    (loss, aux), grads = grad.value_and_grad(quadratic, engine=engine)(params, x)
    assert type(grads) is OrderedDict
    assert type(grads["list"]) is list
    assert torch.equal(grads["block"]["a"], torch.tensor([1.0, 8.0]))
    assert torch.equal(grads["list"][0], x)
    assert torch.equal(grads["list"][1], torch.zeros(2, 2))
    assert loss.item() == 0.25 + 16 + 1.5 + 2
    assert loss.shape == ()
    assert not loss.requires_grad
    assert torch.equal(aux.pop("a"), params["block"]["a"])
    assert aux == {"name": "aux", "none": None, "count": 3}


def test_a_loss_that_touches_no_leaf_has_zeros_as_its_gradient():
    params = {"a": torch.ones(2, 3), "b": torch.ones((), dtype=torch.float64)}
    (loss, _), grads = grad.value_and_grad(lambda p: (torch.tensor(2.5), None), engine="func")(params)
    assert loss == 2.5
    assert all(torch.equal(grads[path], torch.zeros_like(leaf)) for path, leaf in params.items())
    module, (x, y) = mlp(), CASES["mlp"][2]
    hidden = grad.ModuleLoss(module, lambda module, *batch: (mlp_loss(module, *batch)[0].detach(), None))
    cases = (
        (lambda p: (torch.tensor(p["a"].sum().item()), None), (params,)),
        (hidden, (dict(module.named_parameters()), x, y)),
    )
    for loss_fn, args in cases:
        with pytest.raises(
            ValueError, match=r"the loss has no gradient: it was computed under torch.no_grad, detached"
        ):
            grad.value_and_grad(loss_fn, engine="autograd")(*args)


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_gradient_that_would_not_run_is_refused_where_gradients_are_taken(hook):
    module, (x, y) = mlp(), CASES["mlp"][2]
    handle = getattr(module[0].weight, hook)(lambda g: None)
    for loss_fn in (loss := grad.ModuleLoss(module, mlp_loss), grad.with_master_weights(loss)):
        with pytest.raises(ValueError, match=r"hooks on the gradients .*\('0.weight'\) would not run.* optim.chain"):
            grad.value_and_grad(loss_fn)
    loss(dict(module.named_parameters()), x, y)  # a value is not concerned
    handle.remove()
    own = grad.value_and_grad(loss)
    getattr(module[0].weight, hook)(lambda g: None)  # one of later does not run either
    with pytest.raises(ValueError, match=r"hooks on the gradients .*\('0.weight'\) would not run"):
        own(dict(module.named_parameters()), x, y)


class Wrapped(nn.parallel.DistributedDataParallel):
    """By type, without processes."""

    def __init__(self, module):
        nn.Module.__init__(self)
        self.module = module

    def forward(self, x):
        return self.module(x)


def test_a_module_whose_gradients_torch_would_average_is_refused():
    module, (x, y) = Wrapped(mlp()), CASES["mlp"][2]
    loss = grad.ModuleLoss(module, mlp_loss)
    with pytest.raises(ValueError, match=r"the module is a DistributedDataParallel.* by smat_fn.parallel.repl"):
        grad.value_and_grad(loss, engine="autograd")
    loss(dict(module.named_parameters()), x, y)


@pytest.mark.parametrize("aux", [None, "text", 1.5, (), [torch.ones(2), {"x": 1}]], ids=repr)
@pytest.mark.parametrize("engine", ENGINES)
def test_aux_is_anything_and_comes_back_as_it_was(engine, aux):
    (_, got), _ = grad.value_and_grad(lambda p: ((p["a"] ** 2).sum(), aux), engine=engine)({"a": torch.ones(2)})
    if isinstance(aux, list):
        assert torch.equal(got[0], aux[0])
        assert got[1] == aux[1]
    else:
        assert got == aux


@pytest.mark.parametrize("engine", ENGINES)
def test_a_bare_tensor_is_a_tree(engine):
    (loss, _), g = grad.value_and_grad(lambda p: ((p**3).sum(), None), engine=engine)(torch.tensor([1.0, 2.0]))
    assert loss.item() == 9
    assert torch.equal(g, torch.tensor([3.0, 12.0]))


def test_the_autograd_engine_detaches_and_works_under_no_grad():
    params = {"a": torch.tensor([1.0, 2.0], requires_grad=True)}
    with torch.no_grad():
        (loss, _), grads = grad.value_and_grad(lambda p: ((p["a"] ** 2).sum(), None), engine="autograd")(params)
    assert not loss.requires_grad
    assert not grads["a"].requires_grad
    assert torch.equal(grads["a"], torch.tensor([2.0, 4.0]))
    assert params["a"].grad is None
    assert params["a"].requires_grad


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("inside", [False, True], ids=["made before", "made inside"])
def test_gradients_under_inference_mode_are_the_same(engine, inside):
    def trees():
        return {"a": torch.tensor([1.0, 2.0]), "n": None}, torch.tensor([3.0, -1.0])

    run = grad.value_and_grad(lambda p, x: ((p["a"] ** 2 * x).sum(), p["a"] * x), engine=engine)
    given = None if inside else trees()
    with torch.inference_mode():
        (loss, aux), grads = run(*(given or trees()))
    assert loss.item() == -1
    assert aux.tolist() == [3, -2]
    assert grads["a"].tolist() == [6, -4]
    assert grads["n"] is None


def test_a_modules_gradient_under_inference_mode_is_that_of_backward():
    module, (x, y) = mlp(), CASES["mlp"][2]
    params, run = away(module), grad.value_and_grad(grad.ModuleLoss(module, mlp_loss), engine="autograd")
    with torch.inference_mode():
        (_, _), grads = run(params, x.clone(), y)
    want = by_backward(module, params, mlp_loss, (x, y))[2]
    assert all(torch.equal(g, want[name]) for name, g in grads.items())


@pytest.mark.parametrize("engine", ENGINES)
def test_what_comes_back_has_no_graph(engine):
    def loss_fn(p, x):
        kept = p["a"] * x
        return (kept**2).sum(), {"kept": kept, "list": [kept.sum(), "text"]}

    params, x = {"a": torch.tensor([1.0, 2.0])}, torch.tensor([3.0, -1.0])
    (loss, aux), grads = grad.value_and_grad(loss_fn, engine=engine)(params, x)
    assert aux["kept"].tolist() == [3, -2]
    assert aux["list"][1] == "text"
    assert not any(t.requires_grad for t in (loss, grads["a"], aux["kept"], aux["list"][0]))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("result", "told"),
    [
        (lambda p: (p["a"] ** 2).sum(), r"returned a Tensor: return \(loss, aux\), or \(loss, None\)"),
        (lambda p: {"loss": p["a"].sum()}, "returned a dict: return"),
        (lambda p: (p["a"].sum(), None, None), "returned 3 values: return"),
        (lambda p: (p["a"], None), r"the loss has shape \(2,\): must be a 0-d tensor, take its mean or sum"),
        (lambda p: (1.0, None), "the loss is a float: must be a 0-d tensor"),
    ],
)
def test_a_loss_without_aux_or_of_another_shape_is_one_sentence(engine, result, told):
    with pytest.raises(ValueError, match=told):
        grad.value_and_grad(result, engine=engine)({"a": torch.ones(2)})


def test_the_func_engine_composes():
    def inner(v):
        return grad.value_and_grad(lambda p: ((p["a"] ** 3).sum(), None))({"a": v})[1]["a"]

    v = torch.tensor([1.0, 2.0])
    assert torch.equal(torch.func.jacrev(inner)(v), torch.diag(6 * v))
    assert torch.equal(torch.func.vmap(inner)(torch.stack((v, 2 * v))), torch.stack((3 * v**2, 12 * v**2)))


def test_the_func_engine_compiles_without_a_graph_break():
    run = grad.value_and_grad(lambda p, x: (((p["a"] - x) ** 2).sum(), {"x": x}))
    params, x = {"a": torch.tensor([1.0, 2.0])}, torch.tensor([0.5, 0.0])
    (loss, aux), grads = torch.compile(run, backend="aot_eager", fullgraph=True)(params, x)
    assert loss.item() == 4.25
    assert torch.equal(aux["x"], x)
    assert torch.equal(grads["a"], torch.tensor([1.0, 4.0]))


def test_bad_requests_are_refused():
    with pytest.raises(ValueError, match=r"engine 'jax' is unknown, choose one of \('func', 'autograd'\)"):
        grad.value_and_grad(quadratic, engine="jax")
    bad = {"i": torch.ones(2).long(), "f": torch.ones(1), "c": torch.ones(1, dtype=torch.complex64)}
    for engine in ENGINES:
        with pytest.raises(ValueError, match=r"parameter 'i' of params has dtype int64.*'c' of params has dtype compl"):
            grad.value_and_grad(lambda p: (p["f"].sum(), None), engine=engine)(bad)


def test_module_loss_lists_all_wrong_names_and_shapes():
    module = llama()
    loss, params, args = grad.ModuleLoss(module, llama_loss), away(module), CASES["llama"][2]
    # functional_call alone would take the alias of a tied weight, and ignore an unknown name
    wrong = {**params, "lm_head.weight": torch.zeros(11, 8), "nope": torch.zeros(1), "model.norm.weight": torch.ones(1)}
    for call in (lambda: loss(wrong, *args), lambda: grad.value_and_grad(loss, engine="autograd")(wrong, *args)):
        with pytest.raises(ValueError, match=r"take names and shapes from module\.named_parameters") as caught:
            call()
        text = str(caught.value)
        assert "leaf 'lm_head.weight' is not a parameter of the module" in text
        assert "leaf 'nope' is not a parameter of the module" in text
        assert "leaf 'model.norm.weight' has shape (1,), the module's is (8,)" in text
        assert "embed_tokens" not in text


def test_names_left_out_keep_the_modules_own_values():
    module, (x, y) = mlp(), CASES["mlp"][2]
    some = {"3.weight": away(module)["3.weight"]}
    whole = {**{n: p.detach() for n, p in module.named_parameters()}, **some}
    loss = grad.ModuleLoss(module, mlp_loss)
    assert torch.equal(loss(some, x, y)[0], loss(whole, x, y)[0])
    (_, _), grads = grad.value_and_grad(loss, engine="autograd")(some, x, y)
    assert list(grads) == ["3.weight"]
    assert torch.equal(grads["3.weight"], by_backward(module, whole, mlp_loss, (x, y))[2]["3.weight"])
    assert all(p.grad is None for p in module.parameters())


def test_a_tied_weight_is_one_leaf_that_collects_both_gradients():
    module = llama()
    params, (tokens,) = away(module), CASES["llama"][2]
    assert "lm_head.weight" not in params
    name = "model.embed_tokens.weight"
    g = grad.value_and_grad(grad.ModuleLoss(module, llama_loss), engine="autograd")(params, tokens)[1][name]
    untied = copy.deepcopy(module)
    untied.lm_head.weight = nn.Parameter(untied.model.embed_tokens.weight.detach().clone())
    split = {**params, "lm_head.weight": params[name]}
    gs = grad.value_and_grad(grad.ModuleLoss(untied, llama_loss), engine="autograd")(split, tokens)[1]
    torch.testing.assert_close(g, gs[name] + gs["lm_head.weight"], rtol=1e-5, atol=1e-7)
    assert gs["lm_head.weight"].abs().max() > 1e-3


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant=False):
        super().__init__()
        self.inner, self.head, self.on, self.reentrant = mlp(), nn.Linear(3, 3), True, reentrant

    def forward(self, x):
        return self.head(checkpoint(self.inner, x, use_reentrant=self.reentrant) if self.on else self.inner(x))


def test_reentrant_checkpointing_is_refused():
    module, (x, y) = Checkpointed(reentrant=True), CASES["mlp"][2]
    loss = grad.ModuleLoss(module, mlp_loss)
    with pytest.raises(ValueError, match="use_reentrant=True hides the parameters of its layers"):
        grad.value_and_grad(loss, engine="autograd")(away(module), x.clone().requires_grad_(), y)


def test_checkpointing_is_refused_by_torch_func_until_it_is_switched_off():
    module, (x, y) = Checkpointed(), CASES["mlp"][2]
    run = grad.value_and_grad(grad.ModuleLoss(module, mlp_loss))
    text = (
        "torch.func runs no hooks on saved tensors, which gradient checkpointing uses: take engine='autograd', or "
        "switch checkpointing off"
    )
    for call in (run, lambda *args: torch.func.vmap(lambda x: run(args[0], x, y))(x[None])):
        with pytest.raises(ValueError, match=f"^{text}$"):
            call(away(module), x, y)
    assert torch._C._autograd._saved_tensors_hooks_is_enabled()
    module.on = False
    plain = grad.value_and_grad(grad.ModuleLoss(module, mlp_loss), engine="autograd")
    torch.testing.assert_close(run(away(module), x, y)[1], plain(away(module), x, y)[1])

    def fails(params, batch):
        raise RuntimeError("of the loss itself")

    with pytest.raises(RuntimeError, match="of the loss itself"):
        grad.value_and_grad(fails)(away(module), None)


def plain_and_checkpointed(case):
    if case == "mlp":
        torch.manual_seed(0)
        module = Checkpointed()
        plain = copy.deepcopy(module)
        plain.on = False
        return plain, module, mlp_loss, CASES["mlp"][2]
    plain, module = llama().train(), llama().train()
    module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    module.config.use_cache = plain.config.use_cache = False
    return plain, module, llama_loss, CASES["llama"][2]


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.parametrize("case", ["mlp", "llama"])
def test_gradient_checkpointing_changes_no_bit(case):
    plain, module, loss, args = plain_and_checkpointed(case)
    params = away(module)
    (value, _), grads = grad.value_and_grad(grad.ModuleLoss(module, loss), engine="autograd")(params, *args)
    (want, _), want_grads = grad.value_and_grad(grad.ModuleLoss(plain, loss), engine="autograd")(params, *args)
    assert torch.equal(value, want)
    assert all(torch.equal(g, want_grads[name]) for name, g in grads.items())

    # a backward outside the swap recomputes on the module's own weights: torch does so in silence
    around = grad.ModuleLoss(module, loss)
    with pytest.raises(ValueError, match="again in the backward pass, at the module's own weights"):
        grad.value_and_grad(lambda *given: around(*given), engine="autograd")(params, *args)
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
    outside = functional_call(_Run(module, loss), {f"module.{n}": v for n, v in leaves.items()}, args)
    wrong = dict(zip(leaves, torch.autograd.grad(outside, list(leaves.values())), strict=True))
    assert torch.equal(outside, value)
    assert any((wrong[n] - g).norm() > 0.01 * g.norm() for n, g in grads.items())


class _Run(nn.Module):
    def __init__(self, module, loss):
        super().__init__()
        self.module, self.loss = module, loss

    def forward(self, *args):
        return self.loss(self.module, *args)[0]


def test_apply_fn_is_the_forward_on_given_weights():
    module = mlp()
    params, x = away(module), torch.randn(4, 5, generator=draws(2))
    apply = grad.apply_fn(module)
    assert torch.equal(apply(params, x), functional_call(module, params, (x,)))
    assert not torch.equal(apply(params, x), module(x))
    assert torch.equal(apply({}, x), module(x))
    with pytest.raises(ValueError, match="leaf 'x' is not a parameter of the module"):
        apply({"x": x}, x)


def test_apply_fn_passes_keywords():
    module = llama()
    params, (tokens,) = away(module), CASES["llama"][2]
    out = grad.apply_fn(module)(params, input_ids=tokens, labels=tokens)
    assert torch.equal(out.loss, grad.ModuleLoss(module, llama_loss)(params, tokens)[0])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("of_a_module", [False, True], ids=["function", "module"])
def test_master_weights_meet_the_loss_rounded_and_their_gradient_is_upcast(of_a_module, engine):
    params = {"weight": torch.tensor([[1.001, -2.003, 0.3337]])}
    rounded = params["weight"].bfloat16()
    assert not torch.equal(rounded.float(), params["weight"])

    def loss(weight):
        return weight.square().sum().float(), weight.detach().clone()

    if of_a_module:
        module = nn.Linear(3, 1, bias=False, dtype=torch.bfloat16)
        loss_fn = grad.ModuleLoss(module, lambda module: loss(module.weight))
    else:

        def loss_fn(params):
            return loss(params["weight"])

    (value, met), grads = grad.value_and_grad(grad.with_master_weights(loss_fn), engine=engine)(params)
    assert torch.equal(met, rounded)
    assert value == rounded.square().sum().float()
    assert grads["weight"].dtype == torch.float32
    assert torch.equal(grads["weight"], (2 * rounded).float())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("of_a_module", [False, True], ids=["function", "module"])
def test_a_reparametrised_loss_is_that_of_the_weights_with_the_chain_rule(of_a_module, engine):
    phi, x = {"half": torch.tensor([[0.5, -1.0]], dtype=torch.float64)}, torch.tensor([3.0, 2.0], dtype=torch.float64)
    if of_a_module:
        module = nn.Linear(2, 1, bias=False, dtype=torch.float64)
        loss_fn = grad.ModuleLoss(module, lambda module, x: (module(x).square().sum(), {}))
    else:

        def loss_fn(params, x):
            return (params["weight"] @ x).square().sum(), {}

    doubled = grad.reparametrised(loss_fn, lambda phi: {"weight": 2 * phi["half"]})
    assert isinstance(doubled, grad.ModuleLoss) == of_a_module
    (loss, _), grads = grad.value_and_grad(doubled, engine=engine)(phi, x)
    # (2 phi x)^2 = 1 and 2 (2 phi x) 2 x
    assert loss == (2 * (1.5 - 2.0)) ** 2
    assert torch.equal(grads["half"], 4 * -1.0 * x[None])
