"""SmolLM3: a Llama in which every fourth layer has no positions."""

from __future__ import annotations

from typing import Any

from slime_rl.trainer.families.family import Family, biases, decoder, no_sliding_window, standard_rules
from slime_rl.trainer.families.fields import Fields


def _smollm3(f: Fields) -> dict[str, Any]:
    no_sliding_window(f)
    f.ignore("no_rope_layer_interval")  # no_rope_layers holds what follows from it
    uses_rope = f("no_rope_layers")  # 1: positions, 0: none
    return decoder(f, **biases(f), no_rope_freq=[1 - int(uses) for uses in uses_rope])


SMOLLM3 = Family("smollm3", _smollm3, standard_rules)
