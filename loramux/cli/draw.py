"""`loramux draw`: draw an image with adapters, on a running server or without one."""

from __future__ import annotations

import base64
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from loramux.cli.console import counting, say, show_error, working
from loramux.errors import InvalidRequest, LoramuxError

FORMATS = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}
OK = 200


IMAGE_MODEL = typer.Option(
    metavar="FOLDER", help="Draw here, with this image model: a folder that diffusers saved."
)
URL = typer.Option(
    metavar="URL", help="Draw on this server instead, such as http://127.0.0.1:8000."
)
API_KEY = typer.Option(envvar="LORAMUX_API_KEY", help="Sent to the server as a bearer token.")
IMAGE_LORA = typer.Option(metavar="NAME=FILE[@WEIGHT]", help="An adapter; repeat for more.")
ADAPTER = typer.Option(
    metavar="NAME[:WEIGHT]",
    help="Draw with this adapter; repeat to add several. Default: all of --image-lora.",
)
SIZE = typer.Option(metavar="WxH", help="Default: that of the model.")


def draw(  # noqa: PLR0913  (one for each flag)
    prompt: Annotated[str, typer.Argument(help="What the image shows.")],
    image_model: Annotated[Path | None, IMAGE_MODEL] = None,
    url: Annotated[str | None, URL] = None,
    image_lora: Annotated[list[str] | None, IMAGE_LORA] = None,
    adapter: Annotated[list[str] | None, ADAPTER] = None,
    out: Annotated[Path, typer.Option(help="File: .png, .jpg or .webp.")] = Path("image.png"),
    negative_prompt: Annotated[str, typer.Option(help="What it does not show.")] = "",
    size: Annotated[str | None, SIZE] = None,
    steps: Annotated[int | None, typer.Option(help="Default: that of the model.")] = None,
    guidance_scale: Annotated[float | None, typer.Option(help="Default: the model's.")] = None,
    seed: Annotated[int | None, typer.Option(help="Default: a random one.")] = None,
    api_key: Annotated[str | None, API_KEY] = None,
) -> None:
    """Draw an image with a diffusion model and LoRA adapters.

    [bold]Examples[/bold]

    loramux draw "a red fox" --image-model ./flux --image-lora ink=ink.safetensors --adapter ink:0.6

    loramux draw "a red fox" --url http://127.0.0.1:8000 --adapter acme/ink@prod:0.6
    """
    asked = Asked(
        prompt=prompt,
        adapters=adapter,
        negative_prompt=negative_prompt,
        size=size,
        steps=steps,
        guidance_scale=guidance_scale,
        seed=seed,
    )
    try:
        if out.suffix.lower() not in FORMATS:
            raise InvalidRequest(f"--out must end with {', '.join(FORMATS)}.")
        if (url is None) == (image_model is None):
            raise InvalidRequest("Give --image-model FOLDER, or --url of a server.")
        if url is not None:
            if image_lora:
                raise InvalidRequest("--image-lora is for --image-model: the server has its own.")
            drawn = _draw_there(asked, url, api_key, out)
        else:
            assert image_model is not None
            drawn = _draw_here(asked, image_model, image_lora or [], out)
    except (LoramuxError, OSError) as error:
        show_error(Console(stderr=True), str(error))
        raise typer.Exit(2 if isinstance(error, InvalidRequest) else 1) from error
    console = Console()
    say(console, "Image  ", f"{out} ({drawn.size})", style="bold")
    say(console, "Seed   ", drawn.seed, style="bold")
    say(console, "Digest ", drawn.digest, style="bold")
    say(console, "Seconds", f" {drawn.seconds:.1f}", style="bold")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The flags that describe the image."""

    prompt: str
    adapters: list[str] | None
    negative_prompt: str
    size: str | None
    steps: int | None
    guidance_scale: float | None
    seed: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """What is printed of a finished image."""

    size: str
    seed: str
    digest: str
    seconds: float


def _draw_here(asked: Asked, model: Path, image_lora: list[str], out: Path) -> Drawn:
    from loramux.config.images import parse_image_lora, parse_size

    loras = [parse_image_lora(text) for text in image_lora]
    width, height = (None, None) if asked.size is None else parse_size(asked.size)
    with working("Loading the image model"):
        # Imported here: torch and diffusers take seconds, and `--help` needs neither.
        from loramux.diffusion.image_pipeline import Drawing, ImagePipeline

        pipeline = ImagePipeline(model)
        for lora in loras:
            pipeline.add_adapter(lora.name, lora.source)
    weights = {lora.name: lora.weight for lora in loras}
    drawing = Drawing(
        prompt=asked.prompt,
        negative_prompt=asked.negative_prompt,
        adapters=_selected(asked.adapters, weights),
        width=width,
        height=height,
        steps=asked.steps,
        guidance_scale=asked.guidance_scale,
        seed=asked.seed,
    )
    drawn = _draw(pipeline, drawing)
    drawn.save(out)
    return Drawn(
        size=f"{drawn.request.width}x{drawn.request.height}",
        seed=str(drawn.seed),
        digest=drawn.digest,
        seconds=drawn.facts.denoise_s + drawn.facts.decode_s,
    )


def _draw_there(asked: Asked, url: str, api_key: str | None, out: Path) -> Drawn:
    """Draws on a server, and writes the file that it answers with."""
    # Imported here: HTTP clients slow down `--help`.
    import httpx2

    body: dict[str, Any] = {"prompt": asked.prompt, "output_format": FORMATS[out.suffix.lower()]}
    given = {
        "negative_prompt": asked.negative_prompt or None,
        "size": asked.size,
        "steps": asked.steps,
        "guidance_scale": asked.guidance_scale,
        "seed": asked.seed,
    }
    body |= {name: value for name, value in given.items() if value is not None}
    if asked.adapters:
        terms = [_split_weight(text) for text in asked.adapters]
        body["adapters"] = [name for name, _ in terms]
        if any(weight is not None for _, weight in terms):
            body["adapter_weights"] = [1.0 if weight is None else weight for _, weight in terms]
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    began = time.monotonic()
    try:
        with working("Drawing"):
            answer = httpx2.post(
                f"{url.rstrip('/')}/v1/images/generations", json=body, headers=headers, timeout=None
            )
        found = answer.json()
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
        raise LoramuxError(f"{url} does not answer as a server of images: {error}") from error
    if answer.status_code != OK:
        message = found.get("error", {}).get("message", "no reason is given")
        raise LoramuxError(f"The server refused the image ({answer.status_code}): {message}")
    out.write_bytes(base64.b64decode(found["data"][0]["b64_json"]))
    (image,) = found.get("serving", {}).get("images") or [{}]
    return Drawn(
        size=found["size"],
        seed=str(image.get("seed", "not told: the server gives no receipts")),
        digest=image.get("pixel_digest", "–"),
        seconds=time.monotonic() - began,
    )


def _split_weight(text: str) -> tuple[str, float | None]:
    """Reads NAME[:WEIGHT]; a name may have colons itself."""
    name, colon, weight = text.rpartition(":")
    if not colon:
        return text, None
    try:
        return name, float(weight)
    except ValueError:
        return text, None


def _selected(adapters: list[str] | None, weights: dict[str, float]) -> dict[str, float]:
    """Returns the weights by name: those given, else those of --image-lora."""
    if adapters is None:
        return weights
    selected: dict[str, float] = {}
    for text in adapters:
        name, colon, weight = text.rpartition(":")
        if not colon:
            name, weight = text, str(weights.get(text, 1.0))
        if name in selected:
            raise InvalidRequest(f"--adapter names {name} twice.")
        try:
            selected[name] = float(weight)
        except ValueError as error:
            raise InvalidRequest(f"--adapter {text}: {weight!r} is not a weight.") from error
    return selected


def _draw(pipeline: Any, drawing: Any) -> Any:
    with counting("Steps") as show:
        return pipeline.draw(drawing, on_progress=lambda _, done, total: show(done, total))[0]
