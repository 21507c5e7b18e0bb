"""The strict reader of image LoRA files, in the names of all trainers.

In: a safetensors file and the modules of a pipeline. Out: an adapter that uses every tensor, or a
refusal.
"""
