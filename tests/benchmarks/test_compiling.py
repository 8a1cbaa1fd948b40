"""The benchmark of compile times: nodes of its graphs."""

import pytest

from benchmarks import compiling


@pytest.mark.slow
def test_nodes_of_the_simulation_hardly_grow_with_the_number_of_leaves(capsys, tmp_path):
    compiling.main(layers=(1, 2), dry_run=True, out=tmp_path / "none.json")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[:3] for row in rows] == [
        [what, str(layers), str(leaves)]
        for what in ("simulate and reweight", "the loss and its gradient", "a step of SMAT with AdamW")
        for layers, leaves in ((1, 11), (2, 20))
    ]
    nodes = [int(row[3]) for row in rows]
    assert 0 < nodes[1] - nodes[0] <= 5 * 9
    assert 0 < nodes[5] - nodes[4] - (nodes[3] - nodes[2]) <= 7 * 9
    assert not list(tmp_path.iterdir())
