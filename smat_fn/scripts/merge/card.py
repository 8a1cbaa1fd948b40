"""The card of a merged model, from its manifest."""

from collections.abc import Mapping
from typing import Any

from ...merge import RANDOM


def card(manifest: Mapping[str, Any]) -> str:
    """A merged model in words: what was merged, how, which coefficient, its dev scores, fingerprints."""
    options = ", ".join(f"{name} {value}" for name, value in manifest["hyperparameters"].items()) or "no options"
    masks = f", random masks from seed {manifest['merge_seed']}" if manifest["merger"] in RANDOM else ""
    lines = [
        f"# {manifest['label']} experts merged by {manifest['merger'].upper()}",
        "",
        f"Merger: {manifest['merger']} ({options})" + masks + ".",
    ]
    lines += density(manifest)
    if found := manifest.get("calibration"):
        tried = ", ".join(f"{value}: {score:.2f}" for value, score in found["curve"])
        lines += ["", f"{found['field']} was chosen on dev at coefficient {found['coef']} (mean over tasks): {tried}."]
    if manifest["dev_curve"]:
        tried = ", ".join(f"{coef}: {score:.2f}" for coef, score in manifest["dev_curve"])
        lines += ["", f"The coefficient was chosen on dev (mean over tasks): {tried}."]
    if finals := manifest.get("dev_finals"):
        again = ", ".join(f"{coef}: {score:.2f}" for coef, score in finals)
        lines += ["", f"That was one decode; the best were decoded again, means over decodes: {again}."]
    if tried_ := manifest.get("tried"):
        lines += ["", _cost(tried_)]
    lines += ["", "| expert | dev score of the merged model | fingerprint (SHA-256) |", "|---|---:|---|"]
    lines += [
        f"| {task} | {manifest['dev'][task]:.2f} | `{print_}` |"
        if task in manifest["dev"]
        else f"| {task} | | `{print_}` |"
        for task, print_ in manifest["experts"].items()
    ]
    versions = ", ".join(f"{name} {version}" for name, version in manifest["versions"].items())
    lines += [
        "",
        f"Base `{manifest['base_fingerprint']}`, merged weights `{manifest['fingerprint']}`.",
        "",
        versions + ".",
    ]
    return "\n".join(lines) + "\n"


def density(manifest: Mapping[str, Any]) -> list[str]:
    """What TIES kept of every expert, as a paragraph; nothing for other mergers."""
    kept = ", ".join(f"{name} {share:.6f}" for name, share in (manifest.get("density") or {}).items())
    return ["", f"Share of coordinates that was kept: {kept}."] if kept else []


def _cost(tried: Mapping[str, float]) -> str:
    known = f" ({tried['kept']} known from before, {tried['seconds_saved']:.1f} s saved)" if tried["kept"] else ""
    return (
        f"Tried on dev: {tried['candidates']} candidates, {tried['scores']} scores of one task and decode{known}; "
        f"{tried['seconds_merging']:.1f} s of merging, {tried['seconds_scoring']:.1f} s of scoring."
    )
