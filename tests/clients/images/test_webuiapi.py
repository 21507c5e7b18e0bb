"""webuiapi, a client of A1111's web UI."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import pytest
import webuiapi
from PIL import Image

from tests.clients.live import IMAGE_ADAPTERS, IMAGE_BASE, Live

CLIENT = "webuiapi"
shows = pytest.mark.shows
SMALL: dict[str, Any] = {"width": 32, "height": 32, "steps": 3, "seed": 7}


@pytest.fixture
def client(images: Live) -> Any:
    address = urlsplit(images.url)
    return webuiapi.WebUIApi(host=address.hostname, port=address.port, sampler="Euler")


def pixels(result: Any) -> bytes:
    return bytes(result.image.convert("RGB").tobytes())


@shows("images", "adapters")
def test_txt2img_with_adapters_in_the_prompt(client: Any) -> None:
    base = client.txt2img(prompt="a red hill <lora:ink:0>", **SMALL)
    ink = client.txt2img(prompt="a red hill <lora:ink:0.8>", **SMALL)
    assert base.image.size == (32, 32)
    assert pixels(base) != pixels(ink)
    # Without a tag, the default adapter draws.
    assert pixels(client.txt2img(prompt="a red hill", **SMALL)) == pixels(ink)
    assert base.info["seed"] == 7 and base.parameters["steps"] == 3
    two = client.txt2img(prompt="a red hill", batch_size=2, **SMALL)
    assert two.info["all_seeds"] == [7, 8] and len(two.images) == 2
    again = client.txt2img(prompt="a red hill", **{**SMALL, "seed": -1})
    assert again.info["seed"] >= 0


@shows("images", "adapters")
def test_img2img_and_a_mask(client: Any, photo: Image.Image) -> None:
    plain = client.img2img([photo], prompt="a hill", denoising_strength=0.7, **SMALL)
    assert plain.image.size == (32, 32)
    mask = Image.new("L", (32, 32))
    mask.paste(255, (16, 0, 32, 32))
    part: dict[str, Any] = {"mask_image": mask, "inpaint_full_res": False, "inpainting_fill": 1}
    masked = client.img2img([photo], prompt="a hill <lora:night:1>", **part, **SMALL)
    assert pixels(masked) != pixels(plain)
    with pytest.raises(RuntimeError, match="inpaint"):
        client.img2img([photo], prompt="a hill", mask_image=mask, **SMALL)


@shows("images")
def test_lists_options_and_progress(client: Any) -> None:
    assert [one["name"] for one in client.get_loras()] == list(IMAGE_ADAPTERS)
    assert client.util_get_model_names() == [client.util_get_current_model()]
    assert client.get_sd_models()[0]["model_name"] == IMAGE_BASE
    assert client.util_get_sampler_names() == ["Euler"]
    assert "automatic" in client.util_get_scheduler_names()
    client.util_set_model(IMAGE_BASE)
    client.util_wait_for_ready()


@shows("errors")
def test_errors_say_what_is_wrong(client: Any) -> None:
    for fields, text in (
        ({"prompt": "x <lora:nope:1>"}, "Unknown adapter"),
        ({"prompt": "x", "sampler_name": "Euler a"}, "no sampler"),
        ({"prompt": "x", "enable_hr": True}, "enable_hr is not supported"),
        ({"prompt": "x", "styles": ["y"]}, "styles"),
    ):
        with pytest.raises(RuntimeError) as caught:
            client.txt2img(**SMALL | fields)
        assert caught.value.args[0] == 422 and text in caught.value.args[1]
