"""Extension points of the trainer."""

from __future__ import annotations

from slime_rl.protocols import ModelConversion, ModelProvider
from slime_rl.registry import ExtensionPoint

MODEL_CONVERSION = ExtensionPoint(
    "--model-conversion-path",
    ModelConversion,
    {
        "families": "slime_rl.trainer.conversion:FamilyConversion",
        "mbridge": "slime_rl.trainer.bridge:MbridgeConversion",
    },
)
MODEL_PROVIDER = ExtensionPoint("--model-provider-path", ModelProvider, {})
