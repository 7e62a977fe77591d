"""Which layouts of the learner a search looks at."""

from megatron_opd.config.load import load_config
from megatron_opd.config.schema import Config
from megatron_opd.sim.planner.space import Pins, layouts
from tests.support.paths import ROOT
from tests.support.published import spec_of


def test_stages_of_a_fixed_size_hold_every_layer():
    """94 layers, 11 in the first stage and the last. Before: plans of layers that no stage held."""
    config = load_config(Config, ROOT / "examples" / "cluster" / "sixteen_nodes" / "config.yaml")
    spec = spec_of("Qwen3-235B-A22B")
    found = list(layouts(config, spec, Pins(), gpus=128, node=8))
    assert {layout.pp for layout in found} == {1, 4, 8}
    assert any(layout == config.learner.parallel for layout in found)
