"""Segmented LoRA: shrink and expand over the pages of the adapters of a batch."""
