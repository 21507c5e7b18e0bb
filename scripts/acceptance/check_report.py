"""Reads the report that a client wrote: says what it did, and fails unless all of it succeeded.

python check_report.py CLIENT REPORT SERVER_URL
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any
from urllib.request import urlopen

NUM_REQUESTS = 20
LORA_RESIDENT = re.compile(r'^loramux:adapter_resident\{adapter="([^"]+)"\} 1', re.MULTILINE)
RESTARTS = re.compile(r"^loramux:engine_restarts_total\S* (\S+)", re.MULTILINE)


def openai(report: dict[str, Any]) -> str:
    require(report["failed"] == [], f"failed: {', '.join(report['failed'])}")
    return f"{len(report['passed'])} checks passed, 0 failed"


def vllm_bench(report: dict[str, Any]) -> str:
    errors = [error for error in report["errors"] if error]
    require(report["failed"] == 0 and not errors, f"{report['failed']} failed: {errors[:3]}")
    require(report["completed"] == NUM_REQUESTS, f"{report['completed']} requests completed")
    return (
        f"{report['completed']} requests, 0 failed; {report['output_throughput']:.1f} tok/s, "
        f"median TTFT {report['median_ttft_ms']:.0f} ms, ITL {report['median_itl_ms']:.0f} ms"
    )


def guidellm(report: dict[str, Any]) -> str:
    (benchmark,) = report["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    expected = {"successful": NUM_REQUESTS, "errored": 0, "incomplete": 0, "total": NUM_REQUESTS}
    require(totals == expected, f"{totals}")
    first_token = benchmark["metrics"]["time_to_first_token_ms"]["successful"]["median"]
    return f"{NUM_REQUESTS} requests, 0 errored, 0 incomplete; median TTFT {first_token:.0f} ms"


def lm_eval(report: dict[str, Any]) -> str:
    scores = {
        task: next(score for name, score in result.items() if name.endswith(",none"))
        for task, result in report["results"].items()
    }
    require(set(scores) == {"capital_choice", "capital_writing"}, f"tasks: {sorted(scores)}")
    for task, samples in report["n-samples"].items():
        require(samples["effective"] == samples["original"] > 0, f"{task}: {samples}")
    # A model that knows capitals: less means that log-probabilities or texts are wrong.
    require(min(scores.values()) >= 0.5, f"scores: {scores}")
    return ", ".join(f"{task} {score:.2f}" for task, score in scores.items())


CHECKS = {"openai": openai, "vllm-bench": vllm_bench, "guidellm": guidellm, "lm-eval": lm_eval}
NUM_ADAPTERS_USED = {"openai": 2, "vllm-bench": 2, "guidellm": 1, "lm-eval": 1}


def require(holds: bool, otherwise: str) -> None:
    if not holds:
        sys.exit(otherwise)


def check_server(url: str, num_adapters: int) -> str:
    with urlopen(f"{url}/metrics", timeout=30) as answer:
        metrics = answer.read().decode()
    restarts = RESTARTS.findall(metrics)
    require([float(count) for count in restarts] == [0], f"engine restarts: {restarts}")
    used = LORA_RESIDENT.findall(metrics)
    require(len(used) == num_adapters, f"adapters in use: {used}, not {num_adapters}")
    return f"adapters used: {', '.join(used)}"


def main() -> None:
    client, report, url = sys.argv[1:]
    summary = CHECKS[client](json.loads(Path(report).read_text()))
    print(f"{summary}; {check_server(url, NUM_ADAPTERS_USED[client])}")


if __name__ == "__main__":
    main()
