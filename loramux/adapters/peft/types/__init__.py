"""PEFT's methods beside plain LoRA: one module for each rule.

In: a configuration and its tensors. Out: low-rank pairs and extras of linear layers.
"""
