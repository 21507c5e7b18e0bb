"""PEFT's format: configuration, strict reader, validation, writer.

In: adapter_config.json and safetensors. Out: tensors by module, or a refusal with its reason.
"""
