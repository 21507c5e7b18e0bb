"""`loramux draw`: draws images with a diffusion model and LoRA adapters, here or on a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from loramux.cli.console import say, show_error
from loramux.cli.draw_here import Place, draw_here
from loramux.cli.draw_there import draw_there
from loramux.cli.drawing import FORMATS, IMAGE_CONFIG, Asked, Drawn
from loramux.errors import InvalidRequest, LoramuxError

IMAGE_MODEL = typer.Option(
    metavar="MODEL",
    help="Draw here, with this image model: a folder that diffusers saved, org/name[@revision] on "
    "the Hugging Face hub, or a .safetensors file with --image-config. Default: the demo's, with "
    "its adapters.",
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
EACH = typer.Option(
    "--each", help="Draw the base and each adapter alone, in one batch, onto one sheet."
)
ENLARGE = typer.Option(min=1, max=16, help="Times that the file is larger than the image.")
SIZE = typer.Option(metavar="WxH", help="Default: that of the model.")


def draw(  # noqa: PLR0913  (one for each flag)
    prompt: Annotated[str, typer.Argument(help="What the image shows.")],
    image_model: Annotated[str | None, IMAGE_MODEL] = None,
    image_config: Annotated[str | None, IMAGE_CONFIG] = None,
    url: Annotated[str | None, URL] = None,
    image_lora: Annotated[list[str] | None, IMAGE_LORA] = None,
    adapter: Annotated[list[str] | None, ADAPTER] = None,
    out: Annotated[Path, typer.Option(help="File: .png, .jpg or .webp.")] = Path("image.png"),
    negative_prompt: Annotated[str, typer.Option(help="What it does not show.")] = "",
    size: Annotated[str | None, SIZE] = None,
    steps: Annotated[int | None, typer.Option(help="Default: that of the model.")] = None,
    guidance_scale: Annotated[float | None, typer.Option(help="Default: the model's.")] = None,
    seed: Annotated[int | None, typer.Option(help="Default: a random one.")] = None,
    each: Annotated[bool, EACH] = False,
    enlarge: Annotated[int, ENLARGE] = 1,
    api_key: Annotated[str | None, API_KEY] = None,
) -> None:
    """Draw an image with a diffusion model and LoRA adapters.

    [bold]Examples[/bold]

    loramux draw "a fox" --adapter night:0.6

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
    place = Place(
        model=image_model,
        config=image_config,
        image_lora=image_lora or [],
        out=out,
        each=each,
        enlarge=enlarge,
    )
    try:
        if out.suffix.lower() not in FORMATS:
            raise InvalidRequest(f"--out must end with {', '.join(FORMATS)}.")
        if url is None:
            drawn = draw_here(asked, place)
        else:
            _check_there(place)
            drawn = draw_there(asked, url, api_key, out)
    except (LoramuxError, OSError) as error:
        show_error(Console(stderr=True), str(error))
        raise typer.Exit(2 if isinstance(error, InvalidRequest) else 1) from error
    _show(drawn, out)


def _check_there(place: Place) -> None:
    """Refuses flags that have no effect on a server."""
    if place.model is not None:
        raise InvalidRequest("Give --image-model, or --url of a server.")
    if place.image_lora:
        raise InvalidRequest("--image-lora is for --image-model: the server has its own.")
    if place.each or place.enlarge > 1:
        raise InvalidRequest("--each and --enlarge are for drawing here: leave out --url.")


def _show(drawn: Drawn, out: Path) -> None:
    console, count = Console(), len(drawn.digests)
    sizes = drawn.size if count == 1 else f"{count} of {drawn.size}"
    say(console, "Image  ", f"{out} ({sizes})", style="bold")
    for adapters, digest in drawn.digests:
        say(console, "Digest ", f"{digest} {adapters or 'base'}", style="bold")
    say(console, "Seed   ", drawn.seed, style="bold")
    say(console, "Seconds", f" {drawn.seconds}", style="bold")
    for warning in drawn.warnings:
        say(console, "Note   ", warning, style="bold yellow")
