"""`--pack layers` keeps together what the classes themselves say must not be divided over devices."""

from __future__ import annotations

import pytest
import torch
import transformers

from reshard.pipeline.planning.blocks import block_of
from tests.formats.models import CONFIGS


@pytest.mark.parametrize("class_name", CONFIGS)
def test_every_module_of_the_no_split_list_is_one_block(class_name: str) -> None:
    model_class = getattr(transformers, class_name)
    with torch.device("meta"):
        model = model_class(model_class.config_class(**CONFIGS[class_name]))
    together = {name: m for name, m in model.named_modules() if type(m).__name__ in (model._no_split_modules or ())}
    assert together, "the class has a list"
    for name, module in together.items():
        blocks = {block_of(f"{name}.{parameter}") for parameter, _ in module.named_parameters()}
        assert len(blocks) == 1, f"{name} lies in {sorted(blocks)}"
