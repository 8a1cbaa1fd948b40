"""What a label stands for, from the settings of its experts alone."""

from dataclasses import replace

import pytest

from smat_fn.report.found import settings_of, with_muon


def one(make, values, method="smat", **options):
    _, runs = make("x", [1.0], method, values, **options)
    return settings_of(runs)["x"]


@pytest.mark.parametrize(
    ("off", "parts", "kind"),
    [
        ({}, ("Scale", "Mask", "Perturb"), "main"),
        ({"alpha_min": 1.0}, ("Mask", "Perturb"), "ablation"),
        ({"drop_prob": 0.0}, ("Scale", "Perturb"), "ablation"),
        ({"sigma": 0.0}, ("Scale", "Mask"), "ablation"),
        ({"alpha_min": 1, "sigma": 0}, ("Mask",), "ablation"),
        ({"alpha_min": 1, "drop_prob": 0}, ("Perturb",), "noise"),
        ({"alpha_min": 1, "drop_prob": 0, "sigma": 0}, (), "main"),
    ],
)
def test_parts_that_are_on(make, full, off, parts, kind):
    setting = one(make, full | off)
    assert (setting.parts, setting.kind) == (parts, kind)
    assert setting.ablates(one(make, full))
    assert not setting.ablates(one(make, full | {"period": 2}))
    assert not setting.ablates(one(make, full, optimizer="muon"))
    no_mask = one(make, full | {"drop_prob": 0})
    assert not one(make, full | {"drop_prob": 0, "sigma": 0}).ablates(no_mask)


@pytest.mark.parametrize("more", [{"alpha_max": 1.5}, {"alpha_depth": [0.2, 1.0]}])
def test_scale_is_on_where_alpha_is_above_one_or_depends_on_depth(make, full, more):
    perturbed = {"alpha_min": 1, "drop_prob": 0}
    setting = one(make, full | perturbed | more)
    assert (setting.parts, setting.kind) == (("Scale", "Perturb"), "ablation")
    assert one(make, full | perturbed).ablates(one(make, full | more))


def test_other_methods_have_no_parts(make):
    setting = one(make, {"rho": 0.25}, "asam")
    assert (setting.parts, setting.kind, setting.muon) == (None, "main", False)
    assert one(make, {}, "ft", optimizer="muon").muon


def test_steps_and_epochs_may_differ_by_task_other_settings_may_not(make, full):
    _, runs = make("SMAT", [1.0, 2.0], "smat", full)
    longer = replace(runs[1], training=runs[1].training | {"steps": 70, "epochs": {"b": 7}})
    assert settings_of([runs[0], longer]) == settings_of(runs[:1])
    other = replace(runs[1], training=runs[1].training | {"lr": 2.0}, hyperparameters=full | {"sigma": 0.02})
    _, more = make("FT", [1.0])
    with pytest.raises(
        ValueError, match=r"experts of 'SMAT' differ in lr, sigma: .*--label; experts of 'FT' differ in"
    ):
        settings_of([*runs, other, more[0], replace(more[1], hyperparameters={"rho": 1})])


def test_a_sigma_that_was_found_for_each_seed_may_differ_and_one_that_was_given_may_not(make, full):
    _, runs = make("SMAT", [1.0, 2.0, 3.0], "smat", full)
    seeds = dict(zip(range(3), (0.0021, 0.0023, 0.0022), strict=True))
    found = [replace(run, hyperparameters=full | {"sigma": seeds[run.seed]}) for run in runs]
    with pytest.raises(ValueError, match="experts of 'SMAT' differ in sigma: train each"):
        settings_of(found)
    auto = [replace(run, sigma_from={"from": "the updates of ft"}) for run in found]
    setting = settings_of(auto)["SMAT"]
    assert (setting.hyperparameters["sigma"], setting.described["sigma"]) == (0.0021, "0.0021 to 0.0023 (auto)")
    assert settings_of(auto[:2])["SMAT"].described == full | {"sigma": 0.0021}
    assert setting.sigma == 0.0022
    no_mask = [replace(run, hyperparameters=run.hyperparameters | {"drop_prob": 0.0}) for run in auto[2:]]
    assert settings_of(no_mask)["SMAT"].ablates(setting)  # the same but for Mask: each run found its own sigma
    only_some = replace(auto[-1], training=auto[-1].training | {"dev": {"every": 2}})
    with pytest.raises(ValueError, match="experts of 'SMAT' differ in dev: train each"):
        settings_of([*auto, only_some])


def test_muons_labels_say_so_once(make):
    rows, runs = make("FT", [1.0], optimizer="muon")
    named, facts = with_muon(rows, runs)
    assert {row.method for row in named} == {run.label for run in facts} == {"FT (Muon)"}
    assert with_muon(named, facts) == (named, facts)
    assert with_muon(*make("FT-Muon", [1.0], optimizer="muon")) == make("FT-Muon", [1.0], optimizer="muon")
    assert with_muon(*make("FT", [1.0])) == make("FT", [1.0])
