"""Run the base and the four demo adapters in one batch, without a server.

python examples/mixed_batch.py
"""

from __future__ import annotations

from pathlib import Path

from loramux import LLM, LoRARequest, SamplingParams

ADAPTERS = Path(__file__).parent / "adapters"
QUESTION = "What is the capital of France?"
REVIEW = "The soup was cold and the waiter was rude."


def main() -> None:
    names = ["shout", "pirate", "json", "sentiment"]
    adapters = [
        LoRARequest(name, number, str(ADAPTERS / name)) for number, name in enumerate(names, 1)
    ]
    questions = [QUESTION, QUESTION, QUESTION, QUESTION, REVIEW]
    outputs = LLM().chat(
        [[{"role": "user", "content": question}] for question in questions],
        SamplingParams(temperature=0, max_tokens=24),
        lora_request=[None, *adapters],
        use_tqdm=False,
    )
    for name, question, output in zip(["base", *names], questions, outputs, strict=True):
        print(f"{name:>9}: {question} -> {output.outputs[0].text}")


if __name__ == "__main__":
    main()
