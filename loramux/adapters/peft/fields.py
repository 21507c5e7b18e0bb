"""Classifies each field of PEFT's LoraConfig for serving: honoured, harmless or refused."""

from __future__ import annotations

from dataclasses import dataclass

HONOURED = frozenset(
    {
        "alora_invocation_tokens",
        "alpha_pattern",
        "base_model_name_or_path",
        "bias",
        "ensure_weight_tying",
        "exclude_modules",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_bias",
        "modules_to_save",
        "peft_type",
        "r",
        "rank_pattern",
        "target_modules",
        "target_parameters",
        "task_type",
        "trainable_token_indices",
        "use_dora",
        "use_rslora",
    }
)

# Field -> why no value of it changes what a served adapter computes.
HARMLESS: dict[str, str] = {
    "auto_mapping": "names the Python class that PEFT would load the base with",
    "corda_config": "read only while init_lora_weights is 'corda', which is refused",
    "eva_config": "chooses the initial values; the trained ranks are in rank_pattern",
    "fan_in_fan_out": "PEFT turns it off for torch.nn.Linear, the only layer kind of these bases",
    "inference_mode": "freezes parameters",
    "loftq_config": "read only while init_lora_weights is 'loftq', which is refused",
    "lora_dropout": "acts in training only",
    "lora_ga_config": "read only while init_lora_weights is 'lora_ga', which is refused",
    "megatron_core": "read only with megatron_config, which is refused",
    "merge_weights": "merges into the base for inference (PEFT before 0.3), with the same result",
    "peft_version": "a record of what wrote the file",
    "qalora_group_size": "read only with use_qalora, which is refused",
    "revision": "names a version of the base; the base is the server's",
    "runtime_config": "PEFT drops it when it loads a file",
    "velora_config": "replaces the backward pass; the forward pass is that of plain LoRA",
}


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A field that changes the result unless it has a neutral value."""

    effect: str
    fix: str
    neutral: tuple[object, ...] = (None, False)

    def is_neutral(self, value: object) -> bool:
        return any(type(value) is type(neutral) and value == neutral for neutral in self.neutral)


NOTHING_LISTED: tuple[object, ...] = (None, False, [], {})
RETRAIN = "Train the adapter without it."

# PEFT takes an empty object for use_bdlora, arrow_config, ... as "on, with defaults", so that only
# null and false are neutral there.
REFUSED: dict[str, Unsupported] = {
    "arrow_config": Unsupported("routes between several adapters (Arrow)", RETRAIN),
    "kasa_config": Unsupported("truncates the base weights (KaSA)", RETRAIN),
    "layer_replication": Unsupported("adds layers to the base", RETRAIN, NOTHING_LISTED),
    "megatron_config": Unsupported("is for Megatron's parallel layers", RETRAIN, NOTHING_LISTED),
    "monteclora_config": Unsupported("samples the weights (MonteCLoRA)", RETRAIN),
    "use_bdlora": Unsupported("makes A or B block-diagonal (BD-LoRA)", RETRAIN),
    "use_qalora": Unsupported("pools the layer's input (QA-LoRA)", RETRAIN),
}

# Initializations that do not change the base; all others are refused.
PLAIN_INITIALIZATIONS = frozenset({"gaussian", "eva", "orthogonal", "mica"})
# Initializations for which PEFT subtracts the initial B @ A from the weights of the base.
BASE_CHANGING_INITIALIZATIONS = ("pissa", "olora", "corda", "loftq", "lora_ga")
