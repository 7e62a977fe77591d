"""The learner's section."""

import pytest
import yaml

from megatron_opd.config.learner import LearnerConfig


@pytest.mark.parametrize(("written", "mode"), [("off", "off"), ("'off'", "off"), ("current",) * 2])
def test_routing_replay_can_be_switched_off_as_yaml_has_it(written: str, mode: str):
    found = yaml.safe_load(f"routing_replay: {written}")
    assert LearnerConfig.model_validate(found).routing_replay == mode
    with pytest.raises(ValueError, match="routing_replay"):
        LearnerConfig.model_validate({"routing_replay": True})
