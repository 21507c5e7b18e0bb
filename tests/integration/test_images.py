"""`loramux serve --image-model` as a user starts it, with OpenAI's client."""

from __future__ import annotations

import base64
import io
import signal
import subprocess
import sys
from pathlib import Path

import openai
import pytest
from PIL import Image

from tests.serve_factory import running_server

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_openai_client_draws_with_adapters(tmp_path: Path) -> None:
    script = ROOT / "examples" / "images" / "make_tiny_model.py"
    subprocess.run([sys.executable, script, tmp_path], check=True, capture_output=True)
    flags = ["--image-model", str(tmp_path / "model"), "--served-model-name", "flux"]
    loras = [f"ink={tmp_path / 'ink.safetensors'}@0.8", f"night={tmp_path / 'night.safetensors'}"]
    flags += ["--image-lora", *loras, "--image-default-lora", "ink"]
    with running_server(tmp_path / "log", *flags) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            fixed = {"seed": 1, "num_inference_steps": 3, "guidance_scale": 3.5}

            def digest(**extra: object) -> str:
                drawn = client.images.generate(
                    model="flux", prompt="a cat", size="64x64", extra_body=fixed | extra
                )
                with Image.open(io.BytesIO(base64.b64decode(drawn.data[0].b64_json))) as image:
                    assert image.size == (64, 64)
                found: str = drawn.model_extra["serving"]["images"][0]["pixel_digest"]
                return found

            default, base = digest(), digest(adapters=[])
            assert default == digest(adapters=["ink"], adapter_weights=[0.8])
            assert len({default, base, digest(adapters=["night"])}) == 3
            events = client.images.generate(
                model="night", prompt="a cat", size="64x64", stream=True, partial_images=1
            )
            kinds = [event.type.removeprefix("image_generation.") for event in events]
            assert kinds == ["partial_image", "completed"]
            with pytest.raises(openai.UnprocessableEntityError, match="Unknown adapter"):
                digest(adapters=["nope"])
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0


@pytest.mark.slow
def test_a_wrong_adapter_ends_the_start_with_the_reason(tmp_path: Path) -> None:
    script = ROOT / "examples" / "images" / "make_tiny_model.py"
    subprocess.run([sys.executable, script, tmp_path], check=True, capture_output=True)
    command = [sys.executable, "-m", "loramux.cli.main", "serve", "--port", "0"]
    command += ["--image-model", str(tmp_path / "model"), "--image-lora", f"x={tmp_path / 'model'}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 1
    assert "has 0 .safetensors files" in ended.stderr
