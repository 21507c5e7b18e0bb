"""Runs vLLM's serving benchmark without the rest of its command line, which needs its engine."""

from __future__ import annotations

from vllm.benchmarks import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    serve.main(parser.parse_args())
