"""Ask every model of a running server the same question with the OpenAI client.

Start the server with `make serve`, then run: python examples/chat_openai.py [URL]
"""

from __future__ import annotations

import sys

import openai

QUESTION = "What is the capital of France?"


def main(url: str = "http://127.0.0.1:8000") -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    for model in client.models.list():
        answer = client.chat.completions.create(
            model=model.id,
            messages=[{"role": "user", "content": QUESTION}],
            temperature=0,
            max_completion_tokens=24,
        )
        print(f"{model.id:>22}: {answer.choices[0].message.content}")


if __name__ == "__main__":
    main(*sys.argv[1:])
