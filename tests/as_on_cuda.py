"""A mode in which operations raise that have no deterministic form on CUDA."""

import math

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# what torch.use_deterministic_algorithms lists
RAISE = {
    "kthvalue", "histc", "put", "put_", "nll_loss2d_forward", "_ctc_loss_backward", "avg_pool3d_backward",
    "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward", "adaptive_max_pool2d_backward",
    "fractional_max_pool2d_backward", "fractional_max_pool3d_backward", "max_unpool2d", "max_unpool3d",
    "upsample_linear1d_backward", "upsample_bilinear2d_backward", "upsample_bicubic2d_backward",
    "upsample_trilinear3d_backward", "reflection_pad1d_backward", "reflection_pad2d_backward",
    "reflection_pad3d_backward", "grid_sampler_2d_backward", "grid_sampler_3d_backward",
}  # fmt: skip
# one rounding for each coordinate, or none
EXACT = {
    "_local_scalar_dense", "_to_copy", "abs", "add", "alias", "clamp", "clone", "constant_pad_nd", "copy_",
    "count_nonzero", "detach", "div", "empty_like", "eq", "expand", "ge", "gt", "hardshrink", "index", "isnan", "le",
    "lift_fresh", "lt", "masked_fill", "maximum", "minimum", "mul", "ne", "neg", "ones_like", "permute", "relu",
    "round", "rsub", "select", "sign", "slice", "split", "squeeze", "stack", "sub", "unbind", "unsqueeze", "view",
    "where", "zeros_like",
}  # fmt: skip


class AsOnCuda(TorchDispatchMode):
    """Raises for operations that raise on CUDA under ``torch.use_deterministic_algorithms(True)``.

    ``inexact`` lists those that were called and may have other bits on CUDA.
    """

    def __init__(self):
        super().__init__()
        self.inexact = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        floats = any(isinstance(a, torch.Tensor) and a.is_floating_point() for a in args)
        indexed = name in ("median", "nanmedian") and func._overloadname == "dim"
        added = name in ("cumsum", "cumsum_") and (floats or kwargs.get("dtype", torch.int64).is_floating_point)
        if name in RAISE or indexed or added or (name == "bincount" and len(args) > 1 and args[1] is not None):
            raise RuntimeError(f"{name} has no deterministic form on CUDA")
        if floats and not self._exact(name.removesuffix("_"), args, kwargs):
            self.inexact.add(name)
        return func(*args, **kwargs)

    def _exact(self, name, args, kwargs):
        if name == "div":  # CUDA multiplies by the reciprocal of a number
            return isinstance(args[1], torch.Tensor) or math.frexp(args[1])[0] == 0.5
        if name in ("add", "sub"):  # CUDA rounds a + alpha b once
            return kwargs.get("alpha", 1) in (1, -1)
        if name == "pow":
            return args[1] == 2
        if name == "sum":  # of a few integers
            return bool((args[0] == args[0].round()).all()) and float(args[0].abs().double().sum()) < 2**24
        return name in EXACT or f"{name}_" in EXACT
