"""From any body to a GenerationRequest, and its run: sampling, prompts, scores, usage.

In: fields of all APIs. Out: deltas, scores, embeddings, receipts.
"""
