"""Transport against closed forms: signs by hand, and bases that are one function in other coordinates."""

import pytest
import torch
from torch import nn

from smat_fn import ModuleLoss
from smat_fn.data.batching import split_rows
from smat_fn.merge import ta
from smat_fn.transport import Alignment, alignments, descent_signs, gradfix, theseus
from smat_fn.types import Micro

GENERATOR = torch.Generator().manual_seed(5)


def normal(*shape):
    return torch.randn(*shape, generator=GENERATOR)


@pytest.fixture(autouse=True)
def alone():
    """Numbers of a test do not depend on the tests before it."""
    GENERATOR.manual_seed(5)


class Net(nn.Module):
    """An embedding, a norm and two linear layers; nothing but the widths differs between its bases."""

    def __init__(self, width, hidden):
        super().__init__()
        self.embed, self.norm = nn.Embedding(60, width), nn.LayerNorm(width)
        self.up, self.down, self.scale = nn.Linear(width, hidden), nn.Linear(hidden, 5), nn.Parameter(torch.ones(1))

    def forward(self, tokens):
        return self.scale * self.down(torch.relu(self.up(self.norm(self.embed(tokens)))))


def squares(module, batch):
    return module(batch["tokens"]).square().mean(), {}


def leaves(module):
    return {path: leaf.detach().clone() for path, leaf in module.named_parameters()}


def moved_by(change, size=0.1):
    return {path: leaf + size * normal(*leaf.shape) for path, leaf in change.items()}


@pytest.fixture
def old():
    net = Net(6, 5)
    return leaves(net) | {path: normal(*leaf.shape) for path, leaf in leaves(net).items()}


def permuted(tree, residual, hidden):
    """The same function with the coordinates of its layers in another order."""
    return {
        "embed.weight": tree["embed.weight"][:, residual],
        "norm.weight": tree["norm.weight"][residual],
        "norm.bias": tree["norm.bias"][residual],
        "up.weight": tree["up.weight"][hidden][:, residual],
        "up.bias": tree["up.bias"][hidden],
        "down.weight": tree["down.weight"][:, hidden],
        "down.bias": tree["down.bias"],
        "scale": tree["scale"],
    }


def tokens(count=40):
    return {"tokens": torch.randint(60, (count, 3), generator=GENERATOR)}


def close(one, other, atol=1e-5):
    return all(torch.allclose(one[path], other[path], atol=atol) for path in other) and one.keys() == other.keys()


def test_gradfix_by_hand():
    new, old = (
        {"a": torch.tensor([1.0, 2.0, 3.0, 4.0]), "n": torch.tensor(7)},
        {"a": torch.zeros(4), "n": torch.tensor(5)},
    )
    expert = {"a": torch.tensor([0.5, -0.25, 0.5, 0.0]), "n": torch.tensor(6)}
    signs = {"a": torch.tensor([1, 1, 0, 1], dtype=torch.int8)}
    found = gradfix(new, old, expert, signs, coef=2.0)
    assert found["a"].tolist() == [2.0, 2.0, 3.0, 4.0]
    assert found["n"].item() == 7
    assert new["a"].tolist() == [1.0, 2.0, 3.0, 4.0]


def test_gradfix_with_the_signs_of_the_change_adds_it_and_against_them_nothing(old):
    new, expert = moved_by(old), moved_by(old)
    signs = {path: expert[path] - leaf for path, leaf in old.items()}
    whole = gradfix(new, old, expert, signs, coef=0.7)
    added = ta(old, {"new": new, "expert": expert}, coef=1.0, weights={"expert": 0.7})
    assert close(whole, added, atol=1e-6)
    against = gradfix(new, old, expert, {path: -leaf for path, leaf in signs.items()}, coef=0.7)
    assert all(torch.equal(against[path], leaf) for path, leaf in new.items())


def losses(params, batch):
    inputs, wanted = batch
    return (inputs @ params["w"] - wanted).square().mean(), {}


def test_signs_are_those_of_the_mean_gradient_or_of_most_rows():
    new = {"w": torch.zeros(2)}
    inputs = torch.tensor([[1.0, 1.0], [1.0, 0.0], [-10.0, 0.0]])
    wanted = torch.tensor([1.0, 1.0, 1.0])  # -gradients at 0: twice wanted x inputs
    rows = split_rows((inputs, wanted), 3)
    assert descent_signs(losses, new, rows)["w"].tolist() == [-1, 1]
    assert descent_signs(losses, new, rows, vote="majority")["w"].tolist() == [1, 1]
    assert descent_signs(losses, new, split_rows((inputs, wanted), 1))["w"].tolist() == [-1, 1]
    heavy = [Micro(row.batch, 100.0 if i < 2 else 1.0) for i, row in enumerate(rows)]
    assert descent_signs(losses, new, heavy)["w"].tolist() == [1, 1]


def test_kept_coordinates_go_downhill():
    new, old, expert = ({"w": normal(6)} for _ in range(3))
    batch = normal(20, 6), normal(20)
    moved = gradfix(new, old, expert, descent_signs(losses, new, split_rows(batch, 20)), coef=1e-3)
    assert not torch.equal(moved["w"], new["w"])
    assert losses(moved, batch)[0] < losses(new, batch)[0]


def test_theseus_finds_a_permutation(old):
    residual, hidden = torch.randperm(6, generator=GENERATOR), torch.randperm(5, generator=GENERATOR)
    new, expert, batch = permuted(old, residual, hidden), moved_by(old), tokens()
    loss = ModuleLoss(Net(6, 5), squares)
    assert torch.allclose(loss(old, batch)[0], loss(new, batch)[0])
    maps = alignments(loss, old, loss, new, [batch])
    moved = theseus(new, old, expert, maps, others="add")
    assert close(moved, permuted(expert, residual, hidden))
    assert torch.allclose(loss(moved, batch)[0], loss(expert, batch)[0], rtol=1e-4)
    zero = theseus(new, old, expert, maps)  # scale has no map: its output has other coordinates than it
    assert torch.equal(zero["scale"], new["scale"])
    half = theseus(new, old, expert, maps, coef=0.5)
    assert torch.allclose(half["up.weight"] - new["up.weight"], (zero["up.weight"] - new["up.weight"]) / 2, atol=1e-6)


def test_theseus_turns_linear_layers_by_any_orthogonal_map():
    first, second = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)), nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    turn, _ = torch.linalg.qr(normal(5, 5))
    old = leaves(first)
    new = {
        "0.weight": turn.T @ old["0.weight"], "0.bias": turn.T @ old["0.bias"], "1.weight": old["1.weight"] @ turn,
        "1.bias": old["1.bias"],
    }  # fmt: skip
    expert, rows = moved_by(old), normal(50, 4)
    mean = lambda module, batch: (module(batch).mean(), {})  # noqa: E731
    maps = alignments(ModuleLoss(first, mean), old, ModuleLoss(second, mean), new, rows.split(20))
    assert torch.allclose(maps["1.weight"].last.float(), turn, atol=1e-5)
    moved = theseus(new, old, expert, maps)
    assert torch.allclose(moved["0.weight"], turn.T @ expert["0.weight"], atol=1e-5)
    assert torch.allclose(moved["1.weight"], expert["1.weight"] @ turn, atol=1e-5)


def test_what_no_row_shows_keeps_its_direction(old):
    loss, expert = ModuleLoss(Net(6, 5), squares), moved_by(old)
    maps = alignments(loss, old, loss, old, [{"tokens": torch.tensor([[1, 2]])}])  # two rows, fewer than any width
    assert close(theseus(old, old, expert, maps, others="add"), expert)


def test_batches_count_together(old):
    loss, new, batch = ModuleLoss(Net(6, 5), squares), moved_by(old, 1.0), tokens(20)
    parts = [{"tokens": part} for part in batch["tokens"].split([7, 13])]
    whole, apart = (alignments(loss, old, loss, new, batches) for batches in ([batch], parts))
    assert torch.allclose(apart["up.weight"].first, whole["up.weight"].first, atol=1e-6)
    last = alignments(loss, old, loss, new, parts[1:])
    assert not torch.allclose(last["up.weight"].first, whole["up.weight"].first, atol=1e-3)


def test_padding_is_not_compared(old):
    loss, batch, new = ModuleLoss(Net(6, 5), squares), tokens(6), moved_by(old)
    mask = torch.ones(6, 3, dtype=torch.long)
    mask[:, 2] = 0
    masked = alignments(loss, old, loss, new, [{**batch, "attention_mask": mask}])
    cut = alignments(loss, old, loss, new, [{"tokens": batch["tokens"][:, :2]}])
    assert masked["up.weight"].first is not None
    pairs = [(a, b) for path in cut for a, b in zip(masked[path], cut[path], strict=True) if a is not None]
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in pairs)
    assert not torch.allclose(masked["up.weight"].first, alignments(loss, old, loss, new, [batch])["up.weight"].first)


def test_theseus_moves_to_wider_layers(old):
    wide = Net(9, 12)
    new = {path: normal(*leaf.shape) for path, leaf in leaves(wide).items()}
    batch, expert = tokens(), moved_by(old)
    maps = alignments(ModuleLoss(Net(6, 5), squares), old, ModuleLoss(wide, squares), new, [batch])
    assert maps["up.weight"].first.shape == (5, 12)
    assert maps["up.weight"].last.shape == (6, 9)
    assert torch.allclose(maps["up.weight"].last @ maps["up.weight"].last.mT, torch.eye(6, dtype=torch.float64))
    moved = theseus(new, old, expert, maps)
    change, own = expert["up.weight"] - old["up.weight"], moved["up.weight"] - new["up.weight"]
    assert own.shape == (12, 9)
    assert torch.allclose(own.norm(), change.norm(), rtol=1e-4)  # its geometry is kept
    with pytest.raises(ValueError, match=r"'up.weight' has shape \(5, 6\) in old and \(12, 9\) in new.*others='zero'"):
        theseus(new, old, expert, {}, others="add")


class Pictures(nn.Module):
    """As many channels as columns: a layer's last axis is as long as its bias, and holds columns."""

    def __init__(self, width):
        super().__init__()
        self.patches, self.norm, self.inner = nn.Conv2d(3, width, 1), nn.BatchNorm2d(width), Scaled(width)
        self.eval()

    def forward(self, images):
        return self.inner(self.norm(self.patches(images)))


class Scaled(nn.Module):
    """A vector over channels, after a linear layer over the last axis."""

    def __init__(self, width):
        super().__init__()
        self.scale, self.up = nn.Parameter(torch.ones(width)), nn.Linear(width, width)

    def forward(self, features):
        return self.up(features.movedim(1, -1)).movedim(-1, 1) * self.scale[:, None, None]


def test_channels_before_the_last_axis_have_no_maps():
    mean = lambda module, batch: (module(batch).mean(), {})  # noqa: E731
    first, second, wide = Pictures(4), Pictures(4), Pictures(6)
    old, batch = leaves(first), normal(5, 3, 4, 4)
    loss = ModuleLoss(first, mean)
    for other in (second, wide):
        maps = alignments(loss, old, ModuleLoss(other, mean), leaves(other), [batch])
        assert maps.keys() == {"inner.up.weight", "inner.up.bias"}
        expert, new = moved_by(old), leaves(other)
        moved = theseus(new, old, expert, maps)
        assert {path for path, leaf in moved.items() if not torch.equal(leaf, new[path])} == {*maps}


def test_bad_input_is_refused(old):
    new, expert = moved_by(old), moved_by(old)
    signs = {path: torch.ones_like(leaf) for path, leaf in old.items()}
    with pytest.raises(ValueError, match=r"coef is nan.*signs lacks parameter 'scale' of new"):
        gradfix(new, old, expert, {path: s for path, s in signs.items() if path != "scale"}, coef=float("nan"))
    with pytest.raises(ValueError, match=r"'up.bias' has shape \(9,\) in expert but \(5,\) in old"):
        gradfix(new, old, expert | {"up.bias": torch.zeros(9)}, signs)
    with pytest.raises(ValueError, match="vote is 'most', choose mean or majority"):
        descent_signs(losses, new, [], vote="most")
    with pytest.raises(ValueError, match="no rows: give at least one"):
        descent_signs(losses, new, [])
    with pytest.raises(ValueError, match="row 0 is a tuple: give Micro"):
        descent_signs(losses, {"w": torch.zeros(2)}, [(torch.zeros(1, 2), torch.zeros(1))])
    with pytest.raises(ValueError, match="the gradient"):
        descent_signs(losses, {"w": torch.full((2,), float("inf"))}, split_rows((torch.ones(1, 2), torch.zeros(1)), 1))
    with pytest.raises(ValueError, match="others is 'mean', choose zero or add"):
        theseus(new, old, expert, {}, others="mean")
    with pytest.raises(ValueError, match=r"maps name 'other\.weight', which new lacks"):
        theseus(new, old, expert, {"other.weight": Alignment()})
    with pytest.raises(ValueError, match=r"'up.bias'.*do not join: make maps of these two bases"):
        theseus(new, old, expert, {"up.bias": Alignment(torch.eye(7))})


def test_bases_that_cannot_be_compared_are_refused(old):
    loss, batch = ModuleLoss(Net(6, 5), squares), tokens(4)
    with pytest.raises(ValueError, match="loss_new is not a loss of a module"):
        alignments(loss, old, losses, old, [batch])
    with pytest.raises(ValueError, match="there are 0 batches for the old base"):
        alignments(loss, old, loss, old, [])
    with pytest.raises(ValueError, match="there are 1 batches for the old base and 2 for the new one"):
        alignments(loss, old, loss, old, [batch], [batch, batch])
    with pytest.raises(ValueError, match="layer 'embed' sees 12 rows in the old base and 6 in the new one"):
        alignments(loss, old, loss, old, [batch], [{"tokens": batch["tokens"][:2]}])
    with pytest.raises(ValueError, match="no layer of one name"):
        alignments(
            loss, old, ModuleLoss(nn.Sequential(nn.Linear(3, 2)), squares), {"0.weight": torch.zeros(2, 3)}, [batch]
        )
