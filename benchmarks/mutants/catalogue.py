"""Faults that the tests must find: one small change of the source each, anchored at the text that it replaces.

An anchor must occur once in its file, or, with ``file:function``, once in that function or class. Docstrings do not
count. ``equivalent`` gives the reason why a change cannot be seen.
"""

# ruff: noqa: E501

from typing import NamedTuple


class Mutant(NamedTuple):
    """A fault: a change of one text in one file."""

    place: str  # file under smat_fn, and perhaps a function or class in it
    old: str
    new: str
    equivalent: str = ""  # the reason why no test can fail


def _of(place: str, *changes: tuple[str, ...]) -> list[Mutant]:
    return [Mutant(place, *change) for change in changes]


MUTANTS = [
    # Scale, Mask and Perturb
    *_of(
        "simulation/state.py:draw",
        ("scale = (", "scale = 0.5 * ("),
        ("* unit).to(torch.float32)", ").to(torch.float32)"),
        ("random.fold_in(key, 0)", "random.fold_in(key, 1)"),
        ("Draw(key, scale, number(drop_prob), number(sigma)", "Draw(key, scale, number(sigma), number(drop_prob)"),
        ("(alpha_max - least) * unit", "(1 - least) * unit"),
        ('if noise == "uniform" and not', 'if noise != "gaussian" and not'),
    ),
    *_of(
        "simulation/state.py:draw_problems",
        ("0 <= alpha_min <= 1", "0 < alpha_min <= 1"),
        ("0 <= drop_prob < 1", "0 <= drop_prob <= 1"),
        ("0 <= sigma < math.inf", "0 < sigma < math.inf"),
        ("alpha_max >= min(alpha_min, 1)", "alpha_max > min(alpha_min, 1)"),
    ),
    *_of(
        "simulation/state.py",
        ("alpha_min == 1 and drop_prob == 0 and sigma == 0", "alpha_min == 1 and drop_prob == 0"),
        ("starts.get(path, 0)", "0"),
        ("type(start) is int and start >= 0", "type(start) is int and start >= -1"),
        ("masked = [", "masked = [True or "),
        ("draw._replace(scale=torch.ones_like(draw.scale), factors={})", "draw"),
    ),
    *_of("simulation/state.py:reweight", ("ops.reweight(raw, part.numbers, part.masked, part.starts)", "raw")),
    *_of(
        "simulation/losses.py",
        ("(1 - lam) * clean + lam * merged", "clean"),
        ("(1 - lam) * clean + lam * merged", "lam * clean + (1 - lam) * merged"),
        (
            "loss_fn(simulate(params, base, draw, where=where), batch)",
            "loss_fn(simulate(base, params, draw, where=where), batch)",
        ),
        ("loss_fn(simulate(params, base, draw, where=where), batch)", "loss_fn(simulate(params, base, draw), batch)"),
        ("(clean_aux, merged_aux)", "(merged_aux, clean_aux)"),
        ("0 <= lam <= 1", "0 <= lam < 1"),
    ),
    *_of(
        "simulation/naive.py",
        (
            "theta_0 + (alpha * m) * (theta - theta_0) + noise(draw, path, leaf)",
            "theta_0 + (alpha * m) * (theta - theta_0) - noise(draw, path, leaf)",
        ),
        (
            "theta_0 + (alpha * m) * (theta - theta_0) + noise(draw, path, leaf)",
            "theta_0 + m * (theta - theta_0) + noise(draw, path, leaf)",
        ),
        ("(65535 - f if opposite else f) < cutoff", "(65535 - f if opposite else f) <= cutoff"),
        ("kept = 1 / (1 - cutoff / 65536)", "kept = 1.0"),
        ("f + 0.5 - 2**15", "f - 2**15"),
        ("word >> 16 if coordinate % 2 else word % 2**16", "word % 2**16 if coordinate % 2 else word >> 16"),
        ("_MASK, _NOISE = 0, 1", "_MASK, _NOISE = 1, 0"),
        ("key[1] + coordinate // 8", "key[1] + coordinate // 4"),
    ),
    *_of(
        "simulation/noise.py",
        ("(32768.5 + i) / 65536", "(32768 + i) / 65536"),
        ("-math.log(2 * (1 - q))", "-math.log(1 - q)"),
        ("(-positive[::-1], positive)", "(positive[::-1], positive)"),
        ("z / rms for z in half", "z for z in half"),
    ),
    *_of(
        "simulation/relative.py",
        ("max(1, sum(delta.numel() for delta in deltas.values()))", "len(deltas)"),
        ("leaf.to(dtype) - origin.to(dtype)", "leaf.to(dtype)"),
        ("sigma=sigma * rms", "sigma=rms"),
    ),
    *_of(
        "simulation/probes.py",
        (" * part.weight for", " for"),
        ("part.weight for part in parts) / total", "part.weight for part in parts) / len(parts)"),
        ("Probe(loss(params), ", "Probe(loss(base), "),
    ),
    # methods
    *_of(
        "mat/smat.py",
        ("(step + 1) % period == 0", "step % period == 0"),
        ("or lam == 0", ""),
        ("and alpha_max == 1 and not factors)", "and not factors)"),
        ("and alpha_max == 1 and not factors)", "and alpha_max == 1)"),
        ('if climb == "both" or (climb == "clean" and clean)', 'if climb == "both" or climb == "clean"'),
        ('if climb == "both" or (climb == "clean" and clean)', "if climb is not None and clean"),
        (
            "point, momentum_of(state.opt_state, point), rho=rho)",
            "point, momentum_of(state.opt_state, point), rho=0.5)",
        ),
        (
            "1 if lam is not None else period",
            "period",
            "says over how many clean steps the copies of an offloaded base are spread; with lam no step is clean, and "
            "what has not been copied is copied before use",
        ),
    ),
    *_of("mat/smat.py:literal_step", ("grads = reweight(grads, drawn, where=where)", "pass")),
    *_of(
        "mat/smat.py:Schedule",
        ("self.key_of(key, step", "(lambda *_: key)(key, step"),
        ("1 - 2 * second", "1"),
        ("step - second * self.period", "step"),
        (" or self.alpha_max != 1", ""),
    ),
    *_of(
        "mat/smat.py:build_from",
        ("undone = None if simulated.reweighted else drawn", "undone = None"),
    ),
    *_of(
        "mat/smat.py:_Mixed",
        ("(1 - lam) * a.to(dtype) + lam * b.to(dtype)", "lam * a.to(dtype) + (1 - lam) * b.to(dtype)"),
        ("(1 - lam) * loss + lam * merged_loss", "(1 - lam) * loss"),
        ("merged = reweight(merged, drawn, where=self._where)", "pass"),
    ),
    *_of(
        "mat/simulated.py",
        ("slices=period - 1", "slices=period"),
        ("g.to(leaf.dtype), grads, params", "g, grads, params"),
        ("ops.library.simulate(theta, theta_0, ", "ops.library.simulate(theta_0, theta, "),
    ),
    *_of(
        "mat/weights.py",
        ("        if drawn is None:\n            yield", "        if False:\n            yield"),
        ("self._parameters[path].data = state", "self._parameters[path].data = self._buffer[path]"),
        ("all(grad is None for grad in grads.values())", "not grads"),
        ("for first, second in tree.sharing(parameters)", "for first, second in ()"),
        ("for text in found]", "for text in ()]"),
        ("if drawn is not self._passed:", "if False:"),
        ("and not self._differentiated:", "and False:"),
        ("raise_problems(problems + trained.norm_problems(trained.norms_of(self._module)))", "pass"),
        ("self._drawn, self._passed, self._differentiated = None, None, False", "self._drawn = None"),
    ),
    *_of(
        "mat/step.py",
        ("divide(s, sum(weights))", "divide(s, len(weights))"),
        ("leaf: leaf * weight)(wide)", "leaf: leaf)(wide)"),
        ("torch.add, terms) / sum(weights)", "torch.add, terms)"),
        ("state.step + 1", "state.step"),
        ("tree.clone(params) if donate", "params if donate"),
    ),
    *_of(
        "mat/asam.py",
        ("grads, rho=rho, adaptive=adaptive, donate=donate)", "grads, rho=rho, donate=donate)"),
        (
            "climbed_loss, _, grads = step.accumulate(at, climbed, batch)",
            "climbed_loss, _, _ = step.accumulate(at, climbed, batch)",
        ),
    ),
    *_of(
        "mat/msam.py",
        ('if along == "momentum" else state.previous', 'if along != "momentum" else state.previous'),
        ("climbed, batch)", "state.params, batch)"),
        ("old.copy_(new), previous, grads)", "old, previous, grads)"),
    ),
    *_of(
        "mat/relative.py",
        ("in_units_of(update_rms(params, self._base), drawn)", "drawn"),
        ("self._base, drawn, where=self._where", "self._base, drawn"),
    ),
    *_of(
        "mat/l2sp.py",
        ("+ pull * (theta", "- pull * (theta"),
        ("theta.to(dtype) - theta_0.to(dtype)", "theta.to(dtype)"),
    ),
    *_of(
        "mat/mixout.py",
        ("drop_prob=drop_prob", "drop_prob=1 - drop_prob"),
        ("period=1, engine", "period=2, engine"),
        ("0 <= drop_prob < 1", "0 <= drop_prob <= 1"),
    ),
    *_of(
        "mat/mergopt.py",
        ("(a, 10.0) - 1", "(a, 10.0)"),
        (".floor() + 1", ".floor()"),
        ("sigma=math.sqrt(2) * b, noise", "sigma=b, noise"),
        (", state.step), b=b", ", 0), b=b"),
        ("STRENGTHS = 6", "STRENGTHS = 7"),
    ),
    *_of(
        "mat/orthoreg.py",
        ("+ lambda_reg * r)", "- lambda_reg * r)"),
        ("2 / terms[-1], 0", "1 / terms[-1], 0"),
        (
            "excess @ delta if delta.shape[0] < delta.shape[1] else delta @ excess",
            "excess @ delta if delta.shape[0] <= delta.shape[1] else delta @ excess",
        ),
        ("picked = where if block_only else None", "picked = None if block_only else where"),
        ("leaf.to(dtype) - origins[path].to(dtype)", "leaf.to(dtype)"),
    ),
    # optimizers
    *_of(
        "optim/schedules.py",
        ("0.5 * (1 + _cos(", "0.5 * (1 - _cos("),
        ("lr * ((total - done) / total)", "lr * (done / total)"),
        ("decay(step - warmup, steps - warmup)", "decay(step, steps)"),
        ("if step < steps else 0.0", "if step <= steps else 0.0"),
    ),
    *_of(
        "optim/schedules.py:constant",
        ("return lr * (step + 1) / warmup if", "return lr * step / warmup if"),
        ("and step < warmup else lr", "and step <= warmup + 1 else lr"),
    ),
    *_of(
        "optim/schedules.py:_decaying",
        ("return lr * (step + 1) / warmup", "return lr * step / warmup"),
        ("        if step < warmup:", "        if step <= warmup:"),
    ),
    *_of(
        "optim/averaging.py",
        ("state.step + 1, params)", "state.step, params)"),
        ("step = (theta.to(mean.dtype) - mean)", "step = (mean - theta.to(mean.dtype))"),
        ("else 1 / (step - first + 1)", "else 1 / (step - first + 2)"),
        ("(1 - decay) / (1 - decay **", "(1 - decay) / (1 + decay **"),
        ("max(1, round(share * steps))", "max(0, round(share * steps))"),
        ('if options.get("donate") else mean + step', "if True else mean + step"),
    ),
    *_of(
        "optim/partition.py",
        ("for path in others}, state.rest", "for path in others}, state.chosen"),
        ("PartitionState(first, second)", "PartitionState(second, first)"),
        ("tree.combine(params, ours, others), P", "tree.combine(params, tree.partition(params, where)[0], others), P"),
    ),
    *_of(
        "optim/adam.py",
        ("float(step), dtype", "float(step + 1), dtype"),
        ("AdamState(state.step + 1, mu, nu)", "AdamState(state.step + 1, nu, mu)"),
        ("beta1=betas[0]", "beta1=betas[1]"),
        ("0 <= b < 1", "0 <= b <= 1"),
        ("grad if grad.stride() == param.stride() else torch.empty_like(param).copy_(grad)", "grad"),
    ),
    *_of(
        "optim/muon.py",
        ("leaf.ndim == 2 and leaf", "leaf.ndim == 2 or leaf"),
        ("nesterov=True", "nesterov=False"),
        ("0 <= momentum < 1", "0 <= momentum <= 1"),
        ("MuonState(state.step + 1, ", "MuonState(state.step, "),
        ("1 <= ns_steps < 100", "1 <= ns_steps <= 100"),
    ),
    *_of(
        "optim/chain.py",
        ("clip(grads, max_norm)[0]", "grads"),
        ("for transform in transforms", "for transform in reversed(transforms)"),
        ("0 < max_norm < math.inf", "0 <= max_norm < math.inf"),
        ("any(isinstance(t, Optimizer) for t in transforms)", "all(isinstance(t, Optimizer) for t in transforms)"),
    ),
    # mergers
    *_of(
        "merge/parts/merger.py",
        ("COEFS = tuple(i / 10 for i in range(1, 11))", "COEFS = tuple(i / 10 for i in range(0, 11))"),
        ("WIDE = tuple(i / 5 for i in range(1, 11))", "WIDE = tuple(i / 5 for i in range(1, 6))"),
    ),
    *_of(
        "merge/parts/chunks.py",
        ("leaf.to(start.device).to(dtype) - start.to(dtype)", "start.to(dtype) - leaf.to(start.device).to(dtype)"),
        ("return shape[-1] if shape else 1", "return shape[0] if shape else 1"),
        (".add_(32768)", ".add_(32767)"),
    ),
    *_of(
        "merge/parts/vectors.py",
        ("scaled.add_(start[piece].to(dtype))", "scaled"),
    ),
    *_of(
        "merge/parts/arithmetic.py",
        ("next(rest) if into_first else next(rest).clone()", "next(rest)"),
        ("add(tensors) >= 0", "add(tensors) > 0"),
        ("tensor * sign > 0", "tensor * sign >= 0"),
        ("total / count.clamp(min=1) if mean else total", "total / len(tensors) if mean else total"),
        ("products[left][left] * products[right][right]", "products[left][left] * products[left][left]"),
        ("products[left][right] / size if size else 0.0", "products[left][right] / size if size else 1.0"),
        ("min(begin + BLOCK, size)", "min(begin + BLOCK - 1, size)"),
    ),
    *_of(
        "merge/ties.py",
        ("(net > 0) - (net < 0)", "1"),
        ("(net > 0) - (net < 0)", "(net < 0) - (net > 0)"),
        ("(delta * sign).relu_()", "(delta * sign)"),
        ("count += agrees.sign_()", "count += 1"),
        ("max(magnitudes.numel() - count, 1)", "max(magnitudes.numel() - count + 1, 1)"),
        ("device=delta.device) <= cut.last", "device=delta.device) < cut.last"),
        (
            "return Cut(value_of(order.bits, magnitudes.dtype), last)",
            "return Cut(value_of(order.bits, magnitudes.dtype), None)",
        ),
        ('_exact if scope == "tensor" else _threshold', '_exact if scope == "global" else _threshold'),
        (
            "not piece.start <= cut.last < stop - 1",
            "not piece.start <= cut.last < stop",
            "two equal ways, of which the faster is chosen: where the last kept position is the last of the chunk, the chunk keeps all equal magnitudes",
        ),
    ),
    *_of(
        "merge/dare.py",
        (
            "zeroed(delta / divisor(kept, delta), fields >= threshold)",
            "zeroed(delta / divisor(kept, delta), fields > threshold)",
        ),
        ("zeroed(delta / divisor(kept, delta), fields >= threshold)", "zeroed(delta, fields >= threshold)"),
    ),
    *_of("merge/dare.py:dropped", ("kept = 1 - threshold / 65536", "kept = threshold / 65536")),
    *_of(
        "merge/della.py",
        ("(1 - drop_prob) - window / 2", "(1 - drop_prob) - window"),
        ("divisor(max(length - 1, 1), rank)", "divisor(length, rank)"),
        ("share * window", "(1 - share) * window"),
        ("random.threshold(1 - keep)", "random.threshold(keep)"),
        ("agreeing(masked, elected(masked), mean=True)", "agreeing(masked, elected(masked), mean=False)"),
        ("low > _SLACK", "low >= -_SLACK"),
    ),
    *_of(
        "merge/dare_ties.py",
        ('mean=aggregate == "mean"', 'mean=aggregate != "mean"'),
        ("elected(masked)", "elected(piece.deltas)"),
    ),
    *_of(
        "merge/slerp.py",
        ("left * near + right * far", "left * far + right * near"),
        ("left + (right - left) * coef", "right + (left - right) * coef"),
        ("abs(cos) > _PARALLEL", "cos > _PARALLEL"),
    ),
    *_of(
        "merge/model_stock.py",
        ("1 + (count - 1) * cos", "1 + count * cos"),
        ("max(cos, 0.0) if clamp else cos", "cos"),
        ("return count * cos / below", "return cos / below"),
    ),
    *_of("merge/magmax.py", ("high >= -low", "high > -low"), ("high >= -low", "high >= low")),
    *_of(
        "merge/breadcrumbs.py",
        (
            "return int(size * drop_smallest), size - int(size * drop_largest)",
            "return int(size * drop_largest), size - int(size * drop_smallest)",
        ),
        ("mask & ~_above(part.delta, part.start, *last)", "mask"),
        ("size - kept - int(drop_largest * size)", "size - kept"),
    ),
    *_of("_loops.py:_banded_delta", ("uint32(size - low) < width", "uint32(size - low) <= width"), ("* weight", "")),
    *_of("_loops.py:_until", ("left > 0", "left > 1")),
    *_of("_loops.py:packed", ("- most, 0)", "- most - 1, 0)"), ("rest != uint32(0)", "rest == uint32(0)")),
    *_of("_loops.py:ranked", ("ahead = field % 8", "ahead = 0")),
    *_of(
        "_loops.py:norms",
        ("int32(halves[j]) >= cutoff", "int32(halves[j]) > cutoff"),
        ("kept[end - begin :] = 0", "pass"),
    ),
    *_of("_loops.py:gram", ("rows[:, stop - first :] = 0", "pass"), ("row[j] -= origin[j]", "row[j] += origin[j]")),
    *_of("_loops.py:absolute_sums", ("rest[:left] = rows[i, rows.shape[1] - left :]", "rest[:left] = rows[i, :left]")),
    *_of("_loops.py:averaged", ("error[j] -= first_one[j]", "error[j] += first_one[j]")),
    *_of("_loops.py:erased", ("value * sign[j] > 0", "value * sign[j] >= 0"), ("if share[j] > least else least", "")),
    *_of("_loops.py:farthest", ("merged[j] >= -low[j]", "merged[j] > -low[j]"), ("merged[j] if", "low[j] if")),
    *_of("_loops.py:between", ("under + uint32(sizes[j] < low)", "under + uint32(sizes[j] <= low)")),
    *_of("_loops.py:nth_equal", ("if met == left:", "if met > left:")),
    *_of("_loops.py:_half_16", ("0x38800000", "0x38000000")),
    *_of(
        "merge/tsv_merge.py",
        ("else min(shape) // experts", "else min(shape)"),
        ("(orthonormal(left) * values) @ orthonormal(right).mT", "(left * values) @ right.mT"),
    ),
    *_of(
        "merge/iso_c.py",
        ("(left @ right).mul_(values.mean())", "(left @ right).mul_(values[0])"),
        ("svd(add(deltas))", "svd(add(deltas).div_(len(deltas)))"),
    ),
    *_of(
        "merge/iso_cts.py",
        ("delta - shared @ (shared.mT @ delta)", "delta"),
        ("least - own * len(deltas)", "least - own"),
        ("orthonormal(right).mT).mul_(values.mean())", "orthonormal(right).mT).mul_(values.sum())"),
    ),
    *_of(
        "merge/parts/spectral.py",
        ("values.dtype) * values[0]", "values.dtype) * 0 * values[0]"),
        ("divided(add(deltas), len(deltas)) if others", "add(deltas) if others"),
    ),
    *_of(
        "merge/wudi.py",
        ("size**0.5 if norms else 1", "size if norms else 1"),
        ("if not ridge", "if ridge"),
        (
            "len(stacked) < stacked.shape[1]",
            "len(stacked) <= stacked.shape[1]",
            "two equal ways, of which the smaller system is chosen; for a square one they are as large",
        ),
    ),
    *_of(
        "merge/nuslerp.py",
        ("math.sin(t * angle) / math.sin(angle)", "math.sin((1 - t) * angle) / math.sin(angle)"),
        ('axis = 0 if along == "first" else -1', 'axis = -1 if along == "first" else 0'),
        ("        return 1 - t, t", "        return t, 1 - t"),
    ),
    *_of(
        "merge/multislerp.py",
        ("zip(weights, norms, strict=True)) / size", "zip(weights, norms, strict=True)) * size"),
        ("weight / (norm + _EPS)", "weight / (norm + 1)"),
    ),
    *_of(
        "merge/karcher.py",
        ("[1 / len(norms)] * len(norms)", "[1.0] * len(norms)"),
        ("max(tol, _OPPOSITE)", "tol"),
        ("s - pull * cos * x", "s + pull * cos * x"),
        ("angle / math.sin(angle) / len(live)", "angle / len(live)"),
        ("math.fsum(norms) / len(norms)", "math.fsum(norms) / len(live)"),
    ),
    *_of(
        "merge/ram.py",
        ("shared / count.clamp(min=1)", "shared"),
        ("torch.where(count > 1", "torch.where(count > 0"),
        ("alone += own * factor", "alone += own"),
        ("(changed & several).sum(1)", "several.sum().expand(len(deltas))"),
        ("changed.sum(0) > 1", "changed.sum(0) > 0"),
        ("counts = found if counts is None else found + counts.to(found.device)", "counts = found"),
        ("1 + boost * min(s / u, cap)", "1 + boost * s / u"),
        ("~(delta.abs() <= threshold)", "delta.abs() >= threshold"),
        ('self.boost and self.scope == "tensor"', "self.boost"),
    ),
    *_of(
        "merge/opcm.py",
        ("value <= share * sums[-1]", "value < sums[-1]"),
        ("taken[:count, :count] = inside[:count, :count]", "pass"),
        ("torch.diag_embed(inside.diagonal())", "torch.zeros_like(inside)"),
        ("total += delta - left", "total -= delta - left"),
        ("lambda deltas: mix(deltas).mul_(scale)", "mix"),
        ("lambda deltas: add(deltas).mul_(scale)", "add"),
        ("math.fsum(sizes[:-1]) / len(sizes[:-1]) / sizes[-1]", "math.fsum(sizes[:-1]) / sizes[-1]"),
    ),
    *_of(
        "merge/dc_merge.py",
        ("torch.block_diag(*blocks)", "core"),
        ("if config.elect else total", "if config.elect or True else total"),
        ("total.sign(), mean=True", "total.sign(), mean=False"),
        ("u * smoothed(values, config.smooth, config.ratio)", "u * values"),
        ("min(ratio, float(values[0] / values[count - 1]))", "ratio"),
        ("values.sum() / shares.sum()", "values.sum() / len(shares)"),
        ("sizes >= sizes", "sizes > sizes"),
        ("count * len(deltas) if config.share else min(deltas[0].shape)", "min(deltas[0].shape)"),
    ),
    *_of(
        "merge/parts/spectral.py",
        ("whole[start : start + len(delta)] = delta", "whole[start : start + len(delta)] = deltas[0]"),
    ),
    *_of(
        "merge/fisher.py",
        ("(part >= 0) & part.isfinite()", "part.isfinite()"),
        ("(part >= 0) & part.isfinite()", "(part >= 0)"),
        ("(count / total) ** 0.5", "(total / count) ** 0.5"),
        (".clamp_(min=floor)", ""),
        ("bottom += share", "bottom += 1"),
    ),
    *_of(
        "mat/offload/rebuild.py",
        ("self._tensor._version != self._version", "False"),
        ("return gradient, None", "return -gradient, None"),
    ),
    *_of(
        "merge/nearswap.py",
        (".clamp(-self.t, self.t)", ".clamp(0, self.t)"),
        ("0 < self.t <", "0 <= self.t <"),
        ("least=1, most=1", "least=1, most=2"),
    ),
    *_of(
        "merge/sce.py",
        ("below.clamp_(min=LEAST)", "1"),
        ("total >= floor", "total < floor"),
        ("among_largest(variance.abs_(), count)", "~among_largest(variance.abs_(), count)"),
    ),
    *_of(
        "merge/arcee_fusion.py",
        ("second + 1.5 * (third - first)", "second + 0.5 * (third - first)"),
        ("(two - one).mul_(keep)", "(one - two).mul_(keep)"),
        ("in (two, one)]", "in (one, two)]"),
    ),
    *_of(
        "merge/cart.py",
        ("weight - mean, full_matrices", "weight, full_matrices"),
        ("math.ceil(share", "math.floor(share"),
    ),
    *_of(
        "merge/consensus.py",
        ("needed >= least", "needed > least"),
        ("(total - delta).abs_()", "total.abs()"),
    ),
    *_of("merge/tall_mask.py", ("needs(piece.deltas[place]", "needs(piece.deltas[0]")),
    *_of(
        "merge/emr.py",
        ("return before / after", "return after / before"),
        ("add(deltas) > 0", "add(deltas) >= 0"),
        ("deltas[place] * sign > 0", "deltas[place] * sign >= 0"),
        ("part / max(size, 1)", "part"),
    ),
    *_of(
        "merge/svc.py",
        (".clamp(min=alpha)", ""),
        ("(eta / len(others))", "eta"),
        (".clamp(min=1e-12))", ")"),
    ),
    *_of(
        "where.py:by_depth",
        ("(layer or 0) / max(last, 1)", "(layer or 0) / (max(last, 1) + 1)"),
        ("high - low) *", "high + low) *"),
        ("last < 1", "last < 0"),
    ),
    *_of(
        "merge/around/depth.py",
        ("total / size / len(flat)", "total / size"),
        ("glob.escape(block)", "glob.escape(block[:-1])"),
        ('rest["*"] = low', 'rest["*"] = high'),
    ),
    *_of(
        "merge/pcb.py",
        ("inside.mul_(len(deltas))", "inside"),
        ("deltas * add(deltas)", "add(deltas)"),
        ("int(size * (1 - clip) - 1)", "int(size * (1 - clip))"),
    ),
    *_of(
        "merge/parts/ranks.py",
        ("known, rank - below", "known, rank"),
        ("return keys ^ (", "return keys & ("),
        ("size - count + 1)", "size - count)"),
        ("count - (size - order.below - order.equal)", "order.equal"),
        ("mask[: last + 1]", "mask[:last]"),
        ("keys > order.bits", "keys >= order.bits"),
        ("finite = not bool(counts[not_finite:].any())", "pass"),
    ),
    *_of(
        "merge/around/factors.py",
        ("math.copysign(root, share)", "root"),
        ("count += agrees", "count += 1"),
        ("(total >= 0)", "(total > 0)"),
        ("t / divisor(kept, t) *", "t *"),
        ("a * w * s for", "a * w for"),
        ("b @ a * s for", "b @ a for"),
        ("random.fold_in(random.fold_in(key, name), part)", "random.fold_in(key, name)"),
    ),
    *_of(
        "merge/around/spaces.py",
        ("factors.b.double() * factors.scale", "factors.b.double()"),
        ("real[:1] = True", "pass"),
        ("vector[module] * coef", "vector[module]"),
    ),
    *_of(
        "folders/combining.py",
        ("-len(pair[0])", "len(pair[0])"),
        ('"lora_alpha": rank', '"lora_alpha": 2 * rank'),
        ("ranks.keys() - parameters", "ranks.keys()"),
    ),
    *_of("merge/weight_average.py:weight_average", ("len(experts))", "len(experts) + 1)")),
    *_of(
        "merge/weighted_average.py",
        ("math.fsum(weights) if normalize else 1.0", "1.0 if normalize else math.fsum(weights)"),
    ),
    *_of(
        "merge/parts/coefs.py",
        (
            "(glob for glob in _table(rules) if fnmatchcase(path, glob))",
            "(glob for glob in reversed(_table(rules)) if fnmatchcase(path, glob))",
        ),
        ("coef=coefs[path])[path]", "coef=1.0)[path]"),
    ),
    *_of(
        "merge/around/select.py",
        ("return sorted(given)", "return sorted(given, reverse=True)"),
        ("if above(value, curve[best][1])", "if above(curve[best][1], value)"),
        ("rel_tol=_ROUNDING", "rel_tol=0"),
        ("return ordered[0] / 2 if", "return ordered[0] / 4 if"),
        ('"largest" if coef == max(coefs)', '"largest" if coef == min(coefs)'),
        (
            '"language": {"ties": 0.3, "dare": 0.3, "della": 1.0}',
            '"language": {"ties": 0.2, "dare": 0.2, "della": 1.0}',
        ),
    ),
    # gradients
    *_of(
        "grad/engines.py",
        ("value = loss.detach(), ", "value = loss, "),
        ('_func_engine(loss_fn) if engine == "func"', '_autograd_engine(loss_fn) if engine == "func"'),
        (".detach().requires_grad_()", ".requires_grad_()"),
    ),
    *_of(
        "grad/engines.py:_autograd_engine",
        ("if isinstance(loss_fn, ModuleLoss):", "if not isinstance(loss_fn, ModuleLoss) and False:"),
    ),
    *_of(
        "tree.py",
        ("torch.zeros_like(leaf) if grad is None", "torch.ones_like(leaf) if grad is None"),
    ),
    *_of(
        "grad/modules.py",
        ("if self._shapes.get(name) != value.shape", "if name not in self._shapes"),
        ("loss_fn(weights(params), *args, **options)", "loss_fn(params, *args, **options)"),
    ),
    *_of(
        "grad/modules.py:_Reparametrised",
        ("self.inner.within(self._weights(params), fn)", "self.inner.within(params, fn)"),
    ),
    *_of(
        "grad/master_weights.py",
        ("self.loss_fn(tree.cast(params, self.dtype), *args, **options)", "self.loss_fn(params, *args, **options)"),
        ("self.inner.within(tree.cast(params, self.dtype), fn)", "self.inner.within(params, fn)"),
    ),
    # masked sets
    *_of(
        "where.py",
        (
            "len(children) > 1 and len({type(child) for child in children}) == 1",
            "len({type(child) for child in children}) == 1",
        ),
        ("if any(True for _ in child.children())", "if True"),
        ("picked - left_out", "picked"),
        ("if p.requires_grad", "if True"),
        ("leaf.ndim == 2 and inside(path, leaf)", "inside(path, leaf)"),
        ('or type(layer).__name__ == "Conv1D"', ""),
        ("p.ndim == 3 and min(p.shape) > 1", "p.ndim == 3"),
        ("rows <= {1, *experts.values()}", "rows <= set(experts.values())"),
        ("(count := _expert_count(child)) > 1", "(count := _expert_count(child)) > 0"),
        ('name.endswith("proj_weight")', 'name.endswith("weight_k")'),
        ("isinstance(m, nn.Embedding)", "False"),
    ),
    *_of(
        "where.py:mask_problems",
        ("and not drop_prob", "and drop_prob"),
        ("or picks is never", ""),
        ("any(picks(path, leaf)", "all(picks(path, leaf)"),
        ("where.how if isinstance(where, Picked)", "where.how if False"),
    ),
    # the climb
    *_of(
        "ops/climb.py",
        ("wide.abs() * weighted if adaptive else weighted", "weighted"),
        ("rho / (tree.global_norm(", "rho * (tree.global_norm("),
        ("(wide + step", "(wide - step"),
        ("length = rho / (tree.sum_by_halves(sums).sqrt()", "length = rho / (tree.sum_by_halves(sums)"),
        ("theta.to(s.dtype).abs() * s if adaptive", "theta.to(s.dtype) * s if adaptive"),
    ),
    *_of(
        "ops/cpu.py",
        ("(first[leaf] + start // BLOCK,)", "(first[0] + start // BLOCK,)"),
        ("*more(rows[row], start))", "*more(row, start))"),
        ("stop - start, rows[row]", "stop - start, row"),
    ),
    *_of(
        "ops/launch.py",
        ("not ((start | size) % 8 or", "not (size % 8 or"),
        ("block if others is None else second", "program if others is None else second"),
        ("block += counts[-1]", "block += 1"),
    ),
]
