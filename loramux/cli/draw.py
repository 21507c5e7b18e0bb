"""`loramux draw`: draw images with adapters, without a server."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from loramux.cli.console import counting, say, show_error, working
from loramux.config.images import ImageLora, demo_images, parse_image_lora, parse_size
from loramux.errors import InvalidRequest, LoramuxError

if TYPE_CHECKING:
    from loramux.diffusion.image_pipeline import Drawing, DrawnImage, ImagePipeline

MAX_SEED = 2**32
FORMATS = (".png", ".jpg", ".jpeg", ".webp")


IMAGE_MODEL = typer.Option(
    metavar="FOLDER",
    help="Image model: a folder that diffusers saved. Default: the demo's, with its adapters, "
    "which are part of a checkout of the sources.",
)
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
    image_model: Annotated[Path | None, IMAGE_MODEL] = None,
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
) -> None:
    """Draw an image with a diffusion model and LoRA adapters.

    [bold]Example[/bold]

    loramux draw "a fox" --adapter night:0.6

    loramux draw "a red fox" --image-model ./flux --image-lora ink=ink.safetensors --adapter ink:0.6
    """
    console, began = Console(), time.monotonic()
    try:
        if out.suffix.lower() not in FORMATS:
            raise InvalidRequest(f"--out must end with {', '.join(FORMATS)}.")
        model, loras, weights = _model(image_model, image_lora)
        selections = _selections(adapter, weights, [lora.name for lora in loras] if each else None)
        width, height = (None, None) if size is None else parse_size(size)
        seed = secrets.randbelow(MAX_SEED) if seed is None else seed
        with working("Loading the image model"):
            # Imported here: torch and diffusers take seconds, and `--help` needs neither.
            from loramux.diffusion.image_pipeline import Drawing, ImagePipeline, sheet

            pipeline = ImagePipeline(model)
            for lora in loras:
                pipeline.add_adapter(lora.name, lora.source)
        loaded = time.monotonic()
        drawings = [
            Drawing(
                prompt=prompt,
                negative_prompt=negative_prompt,
                adapters=selection,
                width=width,
                height=height,
                steps=steps,
                guidance_scale=guidance_scale,
                seed=seed,
            )
            for selection in selections
        ]
        drawn = _draw(pipeline, drawings)
        sheet(drawn, enlarge).save(out)
        ended = time.monotonic()
    except (LoramuxError, OSError) as error:
        show_error(Console(stderr=True), str(error))
        raise typer.Exit(2 if isinstance(error, InvalidRequest) else 1) from error
    _say(console, drawn, out)
    seconds = f"{ended - loaded:.1f}, and {loaded - began:.1f} to load the model"
    say(console, "Seconds", f" {seconds}", style="bold")


def _say(console: Console, drawn: list[DrawnImage], out: Path) -> None:
    size = f"{drawn[0].request.width}x{drawn[0].request.height}"
    say(console, "Image  ", f"{out} ({len(drawn)} of {size})", style="bold")
    for one in drawn:
        chosen = " ".join(f"{name}:{weight:g}" for name, weight in one.drawing.adapters.items())
        say(console, "Digest ", f"{one.digest} {chosen or 'base'}", style="bold")
    say(console, "Seed   ", str(drawn[0].seed), style="bold")


def _model(
    folder: Path | None, given: list[str] | None
) -> tuple[Path, list[ImageLora], dict[str, float]]:
    """Returns the model, its adapters, and the weights of those that draw without --adapter."""
    loras = [parse_image_lora(text) for text in given or ()]
    weights = {lora.name: lora.weight for lora in loras}
    if folder is not None:
        return folder, loras, weights
    model, demo = demo_images()
    return Path(model), [*map(parse_image_lora, demo), *loras], weights


def _selections(
    adapters: list[str] | None, weights: dict[str, float], each: list[str] | None
) -> list[dict[str, float]]:
    """Returns the adapters of each image; `each`: names of those that draw alone."""
    if each is None:
        return [_selected(adapters, weights)]
    if adapters is not None:
        raise InvalidRequest("--each draws with every adapter: leave out --adapter.")
    return [{}, *({name: weights.get(name, 1.0)} for name in each)]


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


def _draw(pipeline: ImagePipeline, drawings: list[Drawing]) -> list[DrawnImage]:
    with counting("Steps") as show:
        return pipeline.draw(drawings, on_progress=lambda _, done, total: show(done, total))
