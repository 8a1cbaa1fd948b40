"""Memory of sums over experts, which merge.py states before it begins."""

import pytest
import torch

from smat_fn.config import ModelStock, Slerp
from smat_fn.merge.parts.arithmetic import BLOCK, gram_memory


@pytest.mark.parametrize("size", [7, BLOCK, 4 * BLOCK])
def test_inner_products_hold_a_block_of_every_expert(size):
    leaves = {"small": torch.empty(3, device="meta"), "large": torch.empty(size, device="meta")}
    for count in (2, 5):
        need = 32 * count * min(size, BLOCK)
        assert gram_memory(leaves, count) == need
        assert ModelStock().memory(leaves, count) == Slerp().memory(leaves, count) == need
