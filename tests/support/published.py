"""Published models as their config.json describes them; no weights."""

from megatron_opd.models.spec import ModelSpec, read_model_spec
from tests.support.paths import ROOT

MODELS = ROOT / "examples" / "cluster" / "models"


def spec_of(name: str) -> ModelSpec:
    """What `name`, a folder of examples/cluster/models, is made of."""
    return read_model_spec(MODELS / name)
